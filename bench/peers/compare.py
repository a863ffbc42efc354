"""Compare cellfeed with other loaders on the same cells.

``python bench/peers/compare.py --out FOLDER`` makes an environment for each peer and the stores
that some of them need, checks what each loader delivers, times all of them in interleaved rounds,
and writes tables as Markdown and every measurement as JSON; the full profile also draws a picture.
"""

import datetime as dt
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import pandas as pd
import psutil
import table
from collection import Collection, open_collection
from conversions import CONVERSIONS, Stores
from entries import PROCESSES, Entry, all_entries, decompression, disk
from processes import DEFAULT_FOLDER, Interpreters, say
from rounds import Plan, Result, Runner, measuring_code
from targets import verdicts

from cellfeed import ParameterError
from cellfeed.console import OneLineErrorCommand
from cellfeed.synthetic import write_tahoe_like

ROOT = Path(__file__).parents[2]
FOLDER = click.Path(file_okay=False, path_type=Path)


@dataclass(frozen=True)
class Profile:
    """How much to measure: cells, timed rounds, seconds of each epoch, and until a job is ended.

    Of the entries with these names, each with cellfeed's that does the same work; None for all.
    """

    cells: int
    rounds: int
    seconds: float
    timeout: float
    names: tuple[str, ...] | None


# The pairs of the README, and two limits.
SHORT_NAMES = (
    "AnnLoader, CSR",
    "scDataset, block 16, fetch 256, CSR, 0 workers",
    "scDataset, block 16, fetch 256, dense made of each minibatch, 0 workers",
    "cellstream, 16,384 random cells at a time, CSR",
    "annbatch, chunk 512, preload 32, CSR (defaults but for minibatches of 64)",
    decompression("h5ad", 16),
    disk("h5ad"),
)
PROFILES = {
    "full": Profile(cells=200_000, rounds=5, seconds=10.0, timeout=300.0, names=None),
    "short": Profile(cells=100_000, rounds=3, seconds=3.0, timeout=120.0, names=SHORT_NAMES),
}


@click.command(cls=OneLineErrorCommand)
@click.option("--out", "output", required=True,
              type=click.Path(path_type=Path, resolve_path=True),
              help="Folder for tables, logs, stores, and cells without --data.")  # fmt: skip
@click.option("--profile", type=click.Choice(list(PROFILES)), default="full", show_default=True,
              help="All entries in hours, or the README's pairs in ten minutes.")  # fmt: skip
@click.option("--data", type=FOLDER, help="Folder of gzip .h5ad plates; default: synthetic.")
@click.option("--cells", type=click.IntRange(min=1_000),
              help="Synthetic cells; default: 200,000, short: 100,000.")  # fmt: skip
@click.option("--label", default="plate", show_default=True,
              help="obs column that loaders deliver too.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), help="Timed rounds; default: 5, short: 3.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True),
              help="Seconds timed of each epoch; default: 10, short: 3.")  # fmt: skip
@click.option("--peers", metavar="A,B", help="Only these peers; default: all.")
@click.option("--only", default="", metavar="REGEX", help="Only rows whose names contain a match.")
@click.option("--seed", default=0, show_default=True, help="Seed of all orders.")
@click.option("--environments", default=DEFAULT_FOLDER, type=FOLDER,
              help="Folder of the peers' virtual environments; default: .peers in the repository."
              )  # fmt: skip
@click.option("--python312", type=click.Path(path_type=Path),
              help="A Python 3.12, if neither PATH nor pyenv has one.")  # fmt: skip
def main(
    *,
    output: Path,
    profile: str,
    data: Path | None,
    cells: int | None,
    label: str,
    rounds: int | None,
    seconds: float | None,
    peers: str | None,
    only: str,
    seed: int,
    environments: Path,
    python312: Path | None,
) -> None:
    """Compare cellfeed with other loaders on the same cells."""
    chosen = PROFILES[profile]
    entries = choose(peers, only, chosen.names)
    plan = Plan(
        output=output, n_rounds=rounds or chosen.rounds, seconds=seconds or chosen.seconds,
        n_conversions=1, timeout=chosen.timeout, seed=seed,
    )  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    if data is None:
        n_cells = cells or chosen.cells
        data = output / f"plates-{n_cells}"
        say(f"{n_cells:,} synthetic cells in {data} ...")
        write_tahoe_like(data, n_cells=n_cells)
    say("Reading the collection ...")
    collection = open_collection(data, label)
    interpreters = Interpreters(environments, {"3.12": python312} if python312 else {})
    stores = convert(plan, collection, entries, interpreters)
    readable = [entry for entry in entries if entry.storage in {*stores.all, "h5ad", None}]
    results = {entry.name: Result(entry) for entry in readable}
    runner = Runner(plan, collection, stores, interpreters)
    runner.check(list(results.values()))
    for number in range(1, plan.n_rounds + 1):
        runner.time(list(results.values()), number)
        run = {
            "command": "make peers" if profile == "full" else "make compare-here",
            "collection": collection.describe(),
            "label": label,
            "machine": describe_machine(),
            "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
            "rounds": number,
            "seconds": plan.seconds,
            "seed": seed,
            "cache": runner.cache,
            "code": measuring_code(),
        }
        text = write(output, run, results, stores, draws=profile == "full")
    click.echo(text)


def choose(peers: str | None, only: str, names: tuple[str, ...] | None = None) -> list[Entry]:
    """Return the entries of some peers, separated by commas, whose names match a pattern.

    With names, only those of them, and those of cellfeed that do the same work.
    """
    entries = all_entries()
    known = sorted({entry.peer for entry in entries})
    wanted = set(known if peers is None else peers.split(","))
    if unknown := sorted(wanted - set(known)):
        raise ParameterError(f"peers are {', '.join(known)}, but got {', '.join(unknown)}")
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ParameterError(f"`--only` must be a regular expression, but {error}") from error
    among = {entry.name for entry in entries} if names is None else set(names)
    chosen = {
        entry.name: entry.versus
        for entry in entries
        if entry.peer in wanted and entry.name in among and pattern.search(entry.name)
    }
    if not chosen:
        raise ParameterError(f"`--only` and `--peers` leave no row; no name matches `{only}`")
    beside = set() if names is None else set(chosen.values())
    return [entry for entry in entries if entry.name in {*chosen, *beside}]


def convert(
    plan: Plan, collection: Collection, entries: list[Entry], interpreters: Interpreters
) -> Stores:
    """Make the stores that entries read, unless they exist."""
    needed = {entry.storage for entry in entries if not entry.is_limit}
    conversions = [each for each in CONVERSIONS if each.storage in needed]
    folder = plan.output / "stores"
    folder.mkdir(exist_ok=True)
    stores = Stores(folder, collection, conversions)
    for store in stores.all.values():
        if not store.runs:
            stores.make(store, interpreters, plan.output / "logs")
    return stores


def describe_machine() -> str:
    """Describe the resources that this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (
        f"{len(os.sched_getaffinity(0))} cores of {[*names, platform.machine()][0]}, "
        f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory, "
        f"{platform.system()} {platform.release()}"
    )


def write(
    output: Path, run: dict, results: dict[str, Result], stores: Stores, *, draws: bool
) -> str:
    """Write what was measured so far, and return the tables as Markdown."""
    rows, held = table.rows_of(results, stores.all), verdicts(results, stores.all)
    text = table.markdown(run=run, rows=rows, stores=stores.all)
    (output / "peers.md").write_text(text)
    found = {
        "run": run,
        "rows": rows,
        "results": [result.to_json() for result in results.values()],
        "conversions": {
            store.conversion.title: {"runs": store.runs, "failed": store.error}
            for store in stores.all.values()
        },
        "targets": [asdict(verdict) for verdict in held],
    }
    (output / "peers.json").write_text(json.dumps(found, indent=1) + "\n")
    # Rows of worker processes compare cellfeed with no other loader.
    shown = pd.DataFrame(row for row in rows if row["section"] != PROCESSES)
    if draws:
        (output / "targets.md").write_text(table.targets_markdown(run, held))
        if shown.loc[shown["peer"] != "machine", "cells_per_s"].notna().any():
            sys.path.append(str(ROOT))
            from notebooks.figures import loaders_figure  # noqa: PLC0415

            figure = loaders_figure(shown, caption=table.caption(run))
            figure.savefig(output / "peers.png")
    return text


if __name__ == "__main__":
    main()
