"""A result of every kind in all forms: in a terminal, in a notebook, as a page and as JSON."""

import importlib
import json
import re
import runpy
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from tests.tuner.conftest import RESULTS, changed
from tests.tuner.reports import (
    code_to_paste,
    html_report,
    html_summary,
    in_words,
    page_without_pictures,
    printed,
)

from cellfeed_tuner import AutotuneResult, Estimate, plots
from cellfeed_tuner._reports._text import cells_of
from cellfeed_tuner._results import STATUS_MEANINGS

CODE = "from cellfeed import CellDataset\n\nx = 'a < b' if 1 & 2 else \"c\"\n"
SCHEMA = Path(__file__).parents[2] / "docs" / "autotune_schema.py"
# Kinds whose pictures are unlike those of all others.
PICTURED = [
    "recommended", "nothing feasible", "too long", "nothing timed",
    "wrong loader", "several labels", "ranges", "one configuration",
]  # fmt: skip
RECOMMENDED = RESULTS["recommended"]


class Page(HTMLParser):
    """What a browser would make of a page, as far as it matters here."""

    def __init__(self, html):
        super().__init__()
        self.tags = Counter[str]()
        self.attributes = list[tuple[str, str]]()
        self.texts = dict[str, str]()
        self.open = list[str]()
        self._section = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in {"br", "meta"}:
            self.open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"]

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and data.strip():
            for where in (self._section, f"<{self.open[-1]}>"):
                self.texts[where] = self.texts.get(where, "") + data

    def values(self, name):
        return [value for key, value in self.attributes if key == name]


@cache
def page_of(kind):
    """Draw the page of a kind, with its pictures, once."""
    return html_report(RESULTS[kind], code=CODE)


def check_terminal(result):
    """It starts with the answer, which takes at most eight lines beside the code."""
    text = printed(result)
    assert len(text.strip().split("\nTo train with it:")[0].splitlines()) <= 8 + 1
    said = " ".join(text.split())
    if result.loader_fault is not None:
        assert said.startswith("THE LOADER DELIVERS WRONG DATA: do not train with it.")
        assert result.loader_fault in said
    elif result.recommended is None:
        assert said.startswith("No configuration is feasible. ")
    else:
        assert said.startswith(f"Recommended: {result.recommended.settings} ")
        assert result.recommended.reason in said
        assert "CellDataset.from_autotune(" in said


def check_notebook(result):
    """It is short, and needs no style; so is what Python prints of it."""
    shown = Page(html_summary(result))
    assert not shown.attributes
    assert shown.tags.keys() <= {"div", "p", "span", "strong", "table", "tr", "th", "td", "pre"}
    text = "".join(shown.texts.values())
    assert len(text) < 6_000
    chosen = result.recommended
    wrong = result.loader_fault is not None
    nothing = "THE LOADER DELIVERS WRONG DATA" if wrong else "No configuration is feasible"
    assert (f"{chosen.configuration}" if chosen else nothing) in text
    assert len(repr(result)) < 120
    assert "\n" not in repr(result)


def check_page(result, html):
    """It has the sections of its kind, a row for each configuration, and needs nothing else."""
    page = Page(html)
    wanted = {
        "recommendation": True, "code": result.recommended, "picture": True, "bottleneck": True,
        "configurations": True, "conditions": True,
    }  # fmt: skip
    sections = [name for name, is_there in wanted.items() if is_there]
    assert [name for name in page.values("id") if name in wanted] == sections
    assert all(page.texts[name].strip() for name in sections)
    assert page.texts.get("code", "").count(CODE) == (result.recommended is not None)
    assert page.tags["svg"] == 1
    stages = result.bottleneck.stages if result.bottleneck else ()
    assert page.tags["tr"] == 1 + len(result.configurations) + len(stages)

    assert Counter(page.values("id")).most_common(1)[0][1] == 1
    assert not {"script", "link", "img", "image", "iframe", "object", "embed"} & page.tags.keys()
    assert (
        not {"src", "srcset", "xlink:href", "xmlns", "onload", "onclick"}
        & dict(page.attributes).keys()
    )
    places = {f"#{name}" for name in page.values("id")}
    assert set(page.values("href")) <= places
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= places
    assert "@import" not in html
    assert "//" not in html.replace("s3://cells/", "")  # which is text
    assert "default-src 'none'" in " ".join(page.values("content"))
    return page


@pytest.fixture(scope="module")
def validate():
    """Checks plain values against the published schema."""
    jsonschema: Any = importlib.import_module("jsonschema")  # which has no types
    schema = runpy.run_path(str(SCHEMA))["result_schema"]()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def validate(plain):
        validator.validate(plain)
        assert plain.keys() == schema["$defs"]["AutotuneResult"]["properties"].keys()

    return validate


@pytest.mark.parametrize("kind", RESULTS)
def test_every_kind_has_all_forms(kind, validate, tmp_path):
    result = RESULTS[kind]
    check_terminal(result)
    check_notebook(result)
    check_page(result, page_without_pictures(result, code=CODE))
    for path in (tmp_path / "autotune.json", str(tmp_path / "text.json")):
        result.save(path)
        assert AutotuneResult.load(path) == result
    validate(json.loads(json.dumps(result.to_json(), allow_nan=False)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(PICTURED[0], marks=pytest.mark.smoke), *PICTURED[1:]]
)
def test_pictures_of_a_kind(kind):
    page = check_page(RESULTS[kind], page_of(kind))
    assert page.values("href")
    if kind != "recommended":
        return
    drawn = page.texts["<text>"]
    for text in ("throughput (cells/s)", "Pareto front", "block size (cells)"):
        assert text in drawn
    # What is pointed at is described: the point of each that was timed.
    titles = re.findall(r"<title>(.*?)</title>", page_of(kind))[1:]
    timed = [each for each in RECOMMENDED.configurations if each.cells_per_second is not None]
    assert sorted(titles) == sorted(plots.hover(each).removeprefix("hover: ") for each in timed)
    chosen = RECOMMENDED.recommended.configuration
    assert f"{chosen}: 8,800 [8,500, 9,100] cells/s; 96.0% of random sampling" in titles


@pytest.mark.slow
def test_the_same_result_gives_the_same_page():
    assert page_of("ranges") == html_report(RESULTS["ranges"], code=CODE)


@cache
def texts_of(kind):
    """What is said of a kind, by the section of the page or the other form that says it."""
    result = RESULTS[kind]
    return Page(page_without_pictures(result, code=CODE)).texts | {
        "terminal": " ".join(printed(result).split()),
        "notebook": "".join(Page(html_summary(result)).texts[""].splitlines()),
        "repr": repr(result),
        "to paste": code_to_paste(result, Path("autotune.json")),
    }


FACTS = [
    ("recommended", "terminal repr", "8,800 [8,500, 9,100] cells/s"),
    ("recommended", "notebook recommendation", "cells/s [95 % interval]8,800 [8,500, 9,100]"),
    ("recommended", "notebook recommendation", "3.456 bits, 96.0%"),
    ("recommended", "recommendation", "Measured as the plan gives."),
    ("recommended", "notebook recommendation", "compared with 2 other configurations, alternating"),
    ("recommended", "terminal recommendation", "1 out of budget"),
    ("recommended", "terminal configurations", "no workers here"),
    ("recommended", "configurations", "5 inside: as planned"),
    ("recommended", "conditions", "cold: dropped before each epoch"),
    ("recommended", "conditions", "The files are not shuffled"),
    ("recommended", "conditions", "torchnot installed"),
    ("recommended", "conditions", "2026-11-21 09:30 UTC"),
    ("not compared", "terminal notebook recommendation", "timed, but not compared"),
    ("not compared", "terminal notebook recommendation", "9,000 [8,100, 10,800]"),
    ("predicted", "terminal notebook recommendation", "This is a prediction"),
    ("predicted", "repr", "cells/s, predicted>"),
    ("nothing feasible", "terminal notebook recommendation", "The nearest is block size 64"),
    ("nothing feasible", "conditions", "at least 50,000 cells/s"),
    ("too long", "terminal notebook recommendation", "None could be timed: 12 too long."),
    ("too long", "terminal notebook recommendation", "A larger --budget may suffice."),
    ("too long", "conditions", "storage ordernot checked"),
    ("ranges without a choice", "terminal notebook recommendation", "1 failed: no workers here"),
    ("wrong loader", "terminal notebook recommendation repr", "minibatch 0 has plate p3"),
    ("wrong loader", "configurations", "1 loader: not as planned"),
    ("wrong loader", "configurations", "loader"),
    ("several labels", "<title>", "mixed by plate and cell_line"),
    ("several labels", "notebook recommendation", "entropy of cell_line / random3.421 bits, 95.0%"),
    ("several labels", "notebook recommendation", "entropy of cell_line / random"),
    ("several labels", "recommendation", "cell_line: Measured as the plan gives."),
    ("several labels", "configurations", "entropy of cell_line"),
    ("several labels", "configurations", "entropy of cell_line / random"),
    ("several labels", "conditions", "cell_linevalues50, 5.600 bitswithout label7 cells"),
    ("ranges", "recommendation", "Of 35,651,584 configurations (block size 1 to 4,096,"),
    ("ranges", "configurations", "14 inside: as planned"),
    ("warm", "conditions", "warm: all files were read beforehand"),
    ("unknown cache", "conditions", "unknown: the kernel kept pages"),
    ("explained", "terminal bottleneck", "decompression: 80.0 of 113.0 us per cell"),
    ("explained", "terminal bottleneck", "would be at least 2.5x as fast"),
    ("explained", "bottleneck", "decompressing160.0 [144.0, 176.0]"),
    ("explained", "bottleneck", "1.67 bytes are decompressed for each byte used"),
    ("link", "bottleneck", "53.1 MB per second of stored chunks are read"),
    ("warnings", "terminal notebook recommendation", "Other programs took 35% of the processors"),
    ("warnings", "conditions", "1.4 cores busy"),
    ("warnings", "recommendation", "outside the paper's bounds"),
    ("warnings", "terminal notebook recommendation conditions", "filter <b> is not supported"),
    ("warnings", "to paste", ", elements=['layers/counts'])"),
    ("remote", "to paste", ", storage_options=...)"),
    ("waiting", "terminal recommendation", "waits for data 12.5% [10.0%, 15.0%] of the time"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "places", "fact"), FACTS)
def test_what_sets_a_kind_apart_is_said(kind, places, fact):
    for place in re.split(" (?!paste)", places):
        assert fact in texts_of(kind)[place]
        assert kind == "recommended" or fact not in texts_of("recommended").get(place, "")


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("recommended", {}, "too few rounds were timed (see --budget)"),
        ("predicted", {}, "the recommended configuration was not timed (see --budget)"),
        ("interrupted", {}, "the run was interrupted before it was counted"),
        ("nothing timed", {}, "no training step had ended after 60 s"),
        ("nothing feasible", {}, "nothing is recommended"),
        ("wrong loader", {}, "the loader delivers wrong data"),
        ("ranks", {}, "it is counted for a single rank only"),
        ("recommended", {"dataset.loader": "Other"}, "Other does not count it"),
    ],
)
def test_an_unknown_bottleneck_has_one_reason(kind, changes, why):
    (said,) = in_words("no_bottleneck", changed(RESULTS[kind], changes))
    assert said.startswith(f"Not known: {why}")
    assert " or " not in said


def test_only_what_failed_is_listed_in_a_terminal():
    said = texts_of("recommended")["terminal"]
    assert said.count(" workers: ") + said.count(" worker: ") == 1
    assert "Measured as" not in said  # a verdict that warns of nothing


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("waiting", {}, "[10.0%, 15.0%] of the time (timed over 8 fetches per worker)."),
        ("waiting", {"waiting.n_rounds": 1}, "12.5% of the time (timed over 1 fetch per"),
        ("waiting", {"waiting.share": None}, "training would wait for data 20.0% of the time."),
        ("link", {"recommended.prefetch": 16}, "still helps, so latency limits throughput."),
        ("link", {"recommended.prefetch": 4}, "the bandwidth of the link or the server limits"),
        ("link", {"bottleneck.kind": "decompressing"}, "does not help, so latency is hidden."),
        ("link", {"recommended.prefetch": None}, "of stored chunks are read."),
        ("link", {"cache": "cold"}, None),
        ("link", {"bottleneck": None}, None),
    ],
)
def test_waiting_and_the_link_in_words(kind, changes, said):
    result = RESULTS["link" if kind == "link" else "waiting"]
    of = {k.replace("waiting.", "recommended.waiting."): each for k, each in changes.items()}
    result = changed(result, of)
    assert said is None or said in in_words(kind, result)[0]
    assert len(in_words(kind, result)) == (said is not None)


def test_what_was_read_for_a_cell_by_what_it_takes_in_storage():
    result = RESULTS["waiting"]
    assert result.read_amplification(result.chosen) == 3.0
    warm = replace(result, cache="warm")
    assert warm.read_amplification(result.chosen) == 1.5  # requested of the system


def test_a_command_in_advice_is_code():
    (advice,) = RESULTS["explained"].storage_advice
    advice = replace(advice, command="cellfeed preshuffle 'a&b' shuffled")
    result = replace(RESULTS["explained"], storage_advice=(advice,))
    page = Page(page_without_pictures(result, code=CODE))
    assert advice.command in page.texts["<code>"]
    assert "`" not in page.texts["bottleneck"]


def rows_of(result):
    """The rows of the page's table: each with its class, and cells by heading."""
    html = page_without_pictures(result, code=CODE).partition('id="configurations"')[2]
    html = html.partition("</section>")[0]
    return html, [
        (kind, dict(re.findall(r'<td data-of="(.*?)">(.*?)</td>', row)))
        for kind, row in re.findall(r'<tr class="(\w+)">(.*?)</tr>', html)
    ]


def test_all_are_compared_with_the_chosen():
    html, rows = rows_of(RECOMMENDED)
    settings = [(int(row["block size"]), int(row["workers"])) for _, row in rows]
    assert settings[:6] == [(64, 0), (1024, 0), (64, 1), (4, 1), (4, 0), (4, 0)]
    assert [kind for kind, _ in rows] == ["chosen"] + ["timed"] * 5 + ["absent"] * 6
    assert [row["outcome"] for _, row in rows[:4]] == [
        "recommended", "below the entropy floor", "slower", "slower",
    ]  # fmt: skip
    # The figure of its turns, as everywhere.
    assert rows[0][1]["cells/s [95 % interval]"] == "8,800 [8,500, 9,100]"
    assert rows[2][1]["times recommended"] == "0.89x [0.83x, 0.95x]"
    unknown = changed(RECOMMENDED.configurations[7], {"relative": Estimate(1.0, 0.3, 3.0)})
    assert cells_of(RECOMMENDED, unknown)["times recommended"] == "unknown"
    assert "The entropy floor of 0.95 costs throughput: block size 1024, " in html
    assert "was 1.36x [1.18x, 1.58x] as fast." in html
    html, rows = rows_of(RESULTS["nothing feasible"])
    assert {row["times recommended"] for _, row in rows} == {"unknown"}
    assert "recommended" not in {row["outcome"] for _, row in rows}
    assert "entropy floor of" not in html


def test_each_configuration_says_what_became_of_it():
    _, rows = rows_of(RECOMMENDED)
    outcomes = [row["outcome"] for _, row in rows]
    for each in RECOMMENDED.configurations:
        if each.cells_per_second is None:
            wanted = STATUS_MEANINGS[each.status] + f": {each.note}" * bool(each.note)
            assert wanted in outcomes
    assert "failed: no workers here" in outcomes
    assert [row["verdict"] for _, row in rows][:3] == ["inside", "inside", "inside"]
    predicted = {row["cells/s [95 % interval]"] for kind, row in rows if kind == "absent"}
    assert "unknown" in predicted
    assert any(each.endswith(" (predicted)") for each in predicted)


@pytest.mark.parametrize(
    "page_with", [page_without_pictures, pytest.param(html_report, marks=pytest.mark.slow)]
)
def test_what_comes_from_the_user_is_escaped(page_with):
    evil = "</title></style><script>alert(1)</script><img src=x onerror='alert(\"2\")'>&amp;"
    result = changed(
        RECOMMENDED,
        {
            "dataset.labels": {evil: RECOMMENDED.dataset.labels["plate"]},
            "dataset.paths": (f"{evil}.h5ad", "\udcff.h5ad"),
            "configurations": tuple(
                replace(each, labels={evil: each.labels["plate"]})
                for each in RECOMMENDED.configurations
            ),
        },
    )
    failed = replace(result.configurations[5], note=evil)
    grid = (*result.configurations[:5], failed, *result.configurations[6:])
    html = page_with(replace(result, configurations=grid), code=evil)
    html.encode()
    page = Page(html)
    assert not {"script", "img"} & page.tags.keys()
    assert page.texts["<title>"].startswith(f"autotune: 28,000 cells mixed by {evil}")
    assert f"{evil}.h5ad" in page.texts["conditions"]
    assert evil in page.texts["configurations"]
    assert evil in page.texts["code"]
    notebook = Page(html_summary(result))
    assert "script" not in notebook.tags
    assert evil in notebook.texts[""]


@pytest.mark.slow
@pytest.mark.process
def test_a_browser_draws_all_pages_and_complains_of_a_wrong_one(tmp_path):
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        pytest.skip("there is no Chromium; apt-get install chromium")

    def complaints_of(page, picture):
        """What its console says while it draws a page without a window."""
        ran = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb",
                "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}",
                "--allow-file-access-from-files", f"--screenshot={picture}",
                "--window-size=1200,3600", page.as_uri(),
            ],
            capture_output=True, text=True, check=True, timeout=600,
        )  # fmt: skip
        return [line for line in ran.stderr.splitlines() if "CONSOLE" in line]

    pages = [page_of(kind) for kind in PICTURED]
    pages.append(pages[0].replace("</main>", "<script>alert(1)</script></main>"))
    for number, page in enumerate(pages):
        (tmp_path / f"{number}.html").write_text(page, encoding="utf-8")
    frames = [f'<iframe src="{number}.html"></iframe>' for number in range(len(pages))]
    (tmp_path / "all.html").write_text("<!doctype html>" + "".join(frames))
    complaints = complaints_of(tmp_path / "all.html", tmp_path / "all.png")
    assert complaints
    assert all(f"/{len(PICTURED)}.html" in line for line in complaints), complaints
    assert complaints_of(tmp_path / "0.html", tmp_path / "page.png") == []
    pixels = (imread(tmp_path / "page.png")[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (3600, 1200)
    colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3)[::7].tolist()}
    assert (91, 163, 208) in colours  # the darkest ground of a square in the heat maps
