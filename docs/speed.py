"""The README's speed figure and table, from a run of `make peers`: `python docs/speed.py`.

Each row compares a loader with cellfeed doing the same work. Nothing is measured here.
"""

import json
import re
import textwrap
from pathlib import Path

import made
import matplotlib as mpl
from matplotlib.figure import Figure

from cellfeed_tuner.plots import BOUND, CHOSEN, STYLE

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "docs" / "benchmarks" / "peers.json"
PICTURE = ROOT / "docs" / "images" / "speed.png"
MADE_OF = [MEASURED, Path(__file__)]
README = ROOT / "README.md"

PLATES = "cellfeed on .h5ad plates, block 16, fetch 256, CSR"
OTHERS = "#0072b2"  # of the palette of Okabe and Ito, as in the notebooks
# Loader, what both read, its row in the run, and the row of cellfeed doing the same work.
PAIRS = [
    ("AnnLoader", ".h5ad files, true random", "AnnLoader, CSR",
     "cellfeed on .h5ad plates, block 1, fetch 256, CSR"),
    ("scDataset 0.3.0", ".h5ad files, blocks of 16",
     "scDataset, block 16, fetch 256, CSR, 0 workers", PLATES),
    ("scDataset 0.3.0", ".h5ad files, blocks of 16, dense",
     "scDataset, block 16, fetch 256, dense made of each minibatch, 0 workers",
     "cellfeed on .h5ad plates, block 16, fetch 256, dense"),
    ("cellstream 0.11", "cellstream's archive, true random",
     "cellstream, 16,384 random cells at a time, CSR",
     "cellfeed on cellstream's archive, block 1, fetch 256, CSR"),
    ("annbatch 0.3.1", "annbatch's shuffled store",
     "annbatch, chunk 512, preload 32, CSR (defaults but for minibatches of 64)",
     "cellfeed on annbatch's store, block 512, fetch 256, CSR"),
]  # fmt: skip
TABLE = re.compile(r"(<!-- python docs/speed.py -->\n).*?(<!-- end -->)", re.DOTALL)


def measured():
    """Return the description of the run, and for each pair the other loader's row and ours."""
    run = json.loads(MEASURED.read_text())
    rows = {row["name"]: row for row in run["rows"]}
    return run["run"], [
        (name, reads, rows[other], rows[ours]) for name, reads, other, ours in PAIRS
    ]


def times_as_fast():
    """Return how many times as fast cellfeed reads the same .h5ad files, the least and the most."""
    _, pairs = measured()
    times = [other["cellfeed_is_times_as_fast"] for _, reads, other, _ in pairs if ".h5ad" in reads]
    return f"{min(times):.2g} to {max(times):.2g}"


def table():
    """Return the rows as Markdown, with a line on how they were measured."""
    run, pairs = measured()
    lines = [
        "| loader | both read | its cells/s | cellfeed's cells/s | speedup |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for name, reads, other, ours in pairs:
        times = "cellfeed_is_times_as_fast"
        low, high = other[f"{times}_low"], other[f"{times}_high"]
        lines.append(
            f"| {name} | {reads} | {other['cells_per_s']:,.0f} | **{ours['cells_per_s']:,.0f}** "
            f"| {other[times]:.3g} [{low:.3g}, {high:.3g}] |"
        )
    machine, _, _ = run["machine"].partition(", ")
    how = (
        f"Medians of {run['rounds']} rounds in turns, page cache cold. The speedup is the median "
        "of the ratios within rounds (smallest and largest in brackets), not the ratio of the "
        f"medians. {machine}, {run['date']}."
    )
    return "\n".join([*lines, "", how])


def with_table(page):
    """Return the page with the table filled in."""
    text, n = TABLE.subn(lambda match: f"{match[1]}{table()}\n{match[2]}", page)
    assert n == 1, "the README must have exactly one speed table"
    return text


def draw():
    """Return a bar chart of the pairs, with whiskers to the smallest and largest round."""
    run, pairs = measured()
    with mpl.rc_context(STYLE):
        # Narrow, with the names above the bars, so that it can be read on a phone.
        figure = Figure(figsize=(6, 5.4), layout="constrained")
        axes = figure.subplots()
        for place, (name, reads, other, ours) in enumerate(reversed(pairs)):
            draw_bar(axes, place + 0.2, ours, CHOSEN)
            draw_bar(axes, place - 0.1, other, OTHERS)
            axes.text(0, place + 0.4, f"{name}: {reads}", va="bottom", fontsize=11)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlim(0, 1.15 * max(row["cells_per_s_high"] for pair in pairs for row in pair[2:]))
        axes.set_ylim(-0.35, len(pairs) - 0.15)
        axes.tick_params(labelsize=10)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("cells per second", fontsize=11)
        bars = [axes.barh(0, 0, color=each) for each in (CHOSEN, OTHERS)]
        names = ["cellfeed, the same work", "the other loader"]
        axes.legend(bars, names, loc="upper right", bbox_to_anchor=(1, 0.93), fontsize=11)
        how = (
            f"{run['collection']}. {run['machine'].split(', Linux')[0]}; {run['date']}. "
            "Minibatches of 64, CSR unless dense, page cache cold; "
            f"medians of {run['rounds']} interleaved rounds, whiskers to the smallest and largest."
        )
        figure.supxlabel(textwrap.fill(how, 92), x=0.01, ha="left", fontsize=8.5, color=BOUND)
    return figure


def draw_bar(axes, place, row, colour):
    speed, low, high = (row[f"cells_per_s{end}"] for end in ("", "_low", "_high"))
    axes.barh(
        place, speed, height=0.28, color=colour,
        xerr=[[speed - low], [high - speed]], error_kw={"elinewidth": 1, "capsize": 2},
    )  # fmt: skip
    axes.text(1.013 * high + 200, place, f"{speed:,.0f}", va="center", fontsize=10)


if __name__ == "__main__":
    made.save(draw(), PICTURE, of=MADE_OF)
    README.write_text(with_table(README.read_text()))
