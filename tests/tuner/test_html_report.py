"""The page: complete, escaped, and in need of nothing beside it."""

import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from functools import cache
from html import unescape
from html.parser import HTMLParser

import pytest
from matplotlib.image import imread
from tests.tuner.reports import html_report

from cellfeed_tuner._results import STATUS_WORDS

CODE = "from cellfeed import CellDataset\n\nx = 'a < b' if 1 & 2 else \"c\"\n"
VOID = {"br", "meta"}
SECTIONS = [
    "recommendation", "code", "measured", "bottleneck", "trade-off", "grid", "bounds",
    "configurations", "conditions",
]  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Of pages in frames of one, this writes down what became of each.
WRITE_DOWN = """<script>
onload = () => document.body.replaceChildren(
  ...[...document.querySelectorAll("iframe")].map((frame) => Object.assign(
    document.createElement("pre"),
    {textContent: frame.contentDocument.documentElement.outerHTML})));
</script>
"""


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
        if tag not in VOID:
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


@pytest.fixture(scope="module")
def html_of(result_of):
    """Returns the page of a kind of result, which is drawn once."""
    return cache(lambda kind: html_report(result_of(kind), code=CODE))


def test_every_section_is_there_for_results_of_every_kind(any_kind, any_result, html_of):
    page = Page(html_of(any_kind))
    is_grid = any_result.ranges is None
    is_judged = any(each.verdict for each in any_result.configurations)
    n_timed = sum(each.cells_per_second is not None for each in any_result.configurations)
    optional = {
        "measured": n_timed, "code": any_result.recommended, "grid": is_grid,
        "bounds": is_grid or is_judged,
    }  # fmt: skip
    wanted = [name for name in SECTIONS if optional.get(name, True)]
    assert [name for name in page.values("id") if name in SECTIONS] == wanted
    assert all(page.texts[name].strip() for name in wanted)
    stages = any_result.bottleneck.stages if any_result.bottleneck else ()
    assert page.tags["svg"] == (n_timed > 0) + 3 * is_grid
    n_remarks = sum(bool(each.note or each.verdict) for each in any_result.configurations)
    n_rows = len(any_result.configurations) + n_remarks + len(stages)
    assert page.tags["tr"] == 1 + n_rows + (n_timed and 1 + n_timed)


def test_a_command_in_advice_is_code(result_of):
    result = result_of("explained")
    (advice,) = result.storage_advice
    command = "cellfeed preshuffle 'a&b' shuffled"
    html = html_report(
        replace(result, storage_advice=(replace(advice, command=command),)), code=CODE
    )
    page = Page(html)
    assert command in page.texts["<code>"]
    assert "`" not in page.texts["bottleneck"]


def test_the_recommendation_has_reason_figure_and_proof(html_of):
    said = Page(html_of("recommended")).texts["recommendation"]
    assert "block size 64, fetch factor 64, 0 workers" in said
    assert "It is the fastest of the 4 measured" in said
    assert (
        "throughput, measured in turns with its 2 closest rivals8,800 [8,500, 9,100] cells/s"
        in said
    )
    assert "3.456 bits, 96.0% of random sampling" in said
    assert "The theory does not apply because there are few blocks." in said
    assert "1 not timed (budget exhausted)" in said


@pytest.mark.parametrize(
    ("kind", "section", "sentence"),
    [
        (
            "not measured in turns",
            "recommendation",
            "throughput, not compared with others9,000 [8,100, 10,800]",
        ),
        ("nothing feasible", "recommendation", "No configuration is feasible.The nearest is block"),
        ("nothing feasible", "conditions", "at least 50,000 cells/s"),
        ("not enough samples", "recommendation", "None could be timed: "),
        ("not enough samples", "recommendation", ". A larger --budget may suffice."),
        ("not enough samples", "trade-off", "No throughput was measured"),
        ("not enough samples", "bounds", "No measured configuration could be judged"),
        ("not enough samples", "conditions", "storage ordernot checked"),
        ("wrong loader", "recommendation", "0 workers: minibatch 0 has plate p3; please"),
        ("wrong loader", "bounds", "1 loader: not as planned"),
        (
            "wrong loader",
            "configurations",
            "The loader delivered wrong data: measured something else.",
        ),
        ("recommended", "bounds", "4 inside: as planned"),
        ("recommended", "conditions", "cold: dropped before each epoch"),
        ("recommended", "conditions", "The files are not shuffled"),
        ("recommended", "conditions", "torchnot installed"),
        ("recommended", "conditions", "2026-11-21 09:30 UTC"),
        ("several labels", "<title>", "mixed by plate and cell_line"),
        (
            "several labels",
            "recommendation",
            "entropy of cell_line3.421 bits, 95.0% of random sampling",
        ),
        (
            "several labels",
            "recommendation",
            "entropy of plate within drug0.800 bits, 88.9%",
        ),
        ("several labels", "recommendation", "cell_line: The theory does not apply"),
        ("several labels", "trade-off", "entropy of the label mixed least"),
        ("several labels", "bounds", "Label plate."),
        ("several labels", "configurations", "cell_line: share of random"),
        ("several labels", "configurations", "plate within drug: expected bits"),
        ("several labels", "conditions", "labelcell_linevalues50, 5.600 bitswithout label7 cells"),
        ("ranges", "recommendation", "Of 35,651,584 configurations (block size 1 to 4,096,"),
        ("ranges", "bounds", "14 inside: as planned"),
        ("warm", "conditions", "warm: all files were read beforehand"),
        ("recommended", "bottleneck", "Not known: there is no recommendation"),
        ("explained", "bottleneck", "Bound by decompression: 80.0 [72.0, 88.0] us of the 113.0 us"),
        (
            "explained",
            "bottleneck",
            "give at least 2.5x the throughput (estimated from a sample)",
        ),
        ("explained", "bottleneck", "decompressing160.0 [144.0, 176.0]"),
        ("explained", "bottleneck", "1.67 bytes are decompressed for each byte used"),
        (
            "few rounds",
            "recommendation",
            "from only 5 rounds, not compared with others9,000 [8,100,",
        ),
        ("few rounds", "configurations", "9,000 [8,100, 10,800]*"),
        ("few rounds", "configurations", "* Not enough samples: only 4 to 7 rounds of whole f"),
        ("unknown cache", "conditions", "unknown: the kernel kept pages"),
    ],
)
def test_what_sets_a_kind_of_result_apart_is_said(html_of, kind, section, sentence):
    assert sentence in Page(html_of(kind)).texts[section]


def test_each_configuration_says_what_became_of_it(result_of, html_of):
    result = result_of("recommended")
    table = Page(html_of("recommended")).texts["configurations"]
    whole = html_of("recommended").split('id="configurations"')[1]
    chosen, *_ = re.findall(r'<tr class="(\w+)">', whole)
    assert chosen == "chosen"  # in sight
    for each in result.configurations:
        status = "recommended" if each == result.chosen else STATUS_WORDS[each.status].listed
        assert status in table
        assert each.note in table
        assert each.verdict is None or each.verdict.sentence in table


def test_the_measured_are_compared_with_the_chosen(result_of, html_of):
    html = html_of("recommended").split('id="measured"')[1].split("</section>")[0]
    rows = re.findall(r'<tr class="(\w+)">(.*?)</tr>', html)
    settings = [
        re.findall(r'<td data-of="(?:block size|workers)">(\d+)</td>', row) for _, row in rows
    ]
    assert settings == [["1024", "0"], ["64", "0"], ["64", "1"], ["4", "1"], ["4", "0"], ["4", "0"]]
    assert [kind for kind, _ in rows].index("chosen") == 1
    assert [row.count("recommended</td>") for _, row in rows] == [0, 1, 0, 0, 0, 0]
    assert ">below the entropy floor</td>" in rows[0][1]
    # The figure measured in turns, as everywhere.
    assert ">0.89x [0.83x, 0.95x]</td>" in rows[2][1]
    assert ">8,800 [8,500, 9,100]</td>" in rows[1][1]
    assert ">slower</td>" in rows[2][1]
    assert "The entropy floor of 0.95 costs throughput: below it, block size 1024, " in html
    assert "was 1.36x [1.18x, 1.58x] as fast." in html


def test_without_a_choice_there_is_nothing_to_compare_with(html_of):
    html = html_of("nothing feasible").split('id="measured"')[1].split("</section>")[0]
    assert html.count('<td data-of="times recommended"></td>') == 6
    assert "recommended</td>" not in html
    assert "entropy floor of" not in html


def test_what_is_pointed_at_is_described(result_of, html_of):
    titles = re.findall(r"<title>(.*?)</title>", html_of("recommended"))[1:]
    for each in result_of("recommended").configurations:
        n_squares = sum(title.startswith(f"{each.configuration}: ") for title in titles)
        assert n_squares >= (each.cells_per_second is not None)
    point = (
        "block size 64, fetch factor 64, 0 workers: 8,800 [8,500, 9,100] cells/s; 3.456 bits, 96.0%"
    )
    assert sum(title.startswith(point) for title in titles) == 3  # two squares, and a point


def test_the_code_is_there_as_it_is_pasted(html_of):
    assert Page(html_of("recommended")).texts["code"].count(CODE) == 1


def test_nothing_leaves_the_page(any_kind, html_of):
    html = html_of(any_kind)
    page = Page(html)
    assert not {"script", "link", "img", "image", "iframe", "object", "embed"} & page.tags.keys()
    assert not {"src", "srcset", "xlink:href", "onload", "onclick"} & dict(page.attributes).keys()
    places = {f"#{name}" for name in page.values("id")}
    assert page.values("href") or not page.tags["svg"]
    assert set(page.values("href")) <= places
    assert set(re.findall(r"url\(([^)]*)\)", html)) <= places
    assert "@import" not in html
    assert "//" not in html.replace("s3://cells/", "")  # which is text
    assert "default-src 'none'" in " ".join(page.values("content"))


def test_ids_are_unique(any_kind, html_of):
    ids = Counter(Page(html_of(any_kind)).values("id"))
    assert ids.most_common(1)[0][1] == 1


def test_text_in_figures_is_text(html_of):
    drawn = Page(html_of("recommended")).texts["<text>"]
    for text in ("throughput (cells/s)", "Pareto front", "block size (cells)", "upper bound"):
        assert text in drawn


def test_what_comes_from_the_user_is_escaped(result_of):
    evil = "</title></style><script>alert(1)</script><img src=x onerror='alert(\"2\")'>&amp;"
    result = result_of("recommended")
    dataset = replace(result.dataset, label=evil, paths=(f"{evil}.h5ad", "\udcff.h5ad"))
    failed = replace(result.configurations[5], note=evil)
    grid = (*result.configurations[:5], failed, *result.configurations[6:])
    html = html_report(replace(result, dataset=dataset, configurations=grid), code=evil)
    html.encode()
    page = Page(html)
    assert not {"script", "img"} & page.tags.keys()
    assert page.texts["<title>"].startswith(f"autotune: 28,000 cells mixed by {evil}")
    assert f"{evil}.h5ad" in page.texts["conditions"]
    assert evil in page.texts["configurations"]
    assert evil in page.texts["code"]


def test_the_same_result_gives_the_same_page(result_of, html_of):
    assert html_of("recommended") == html_report(result_of("recommended"), code=CODE)


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in a browser without a window; gives its DOM and what its console said."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("there is no Chromium; apt-get install chromium")
    profile = tmp_path_factory.mktemp("profile")

    def browse(page, *options):
        ran = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
                "--no-first-run", "--hide-scrollbars", "--force-color-profile=srgb",
                "--enable-logging=stderr", f"--user-data-dir={profile}", *options, page.as_uri(),
            ],
            capture_output=True, text=True, check=True, timeout=600,
        )  # fmt: skip
        return ran.stdout, [line for line in ran.stderr.splitlines() if "CONSOLE" in line]

    return browse


@pytest.fixture(scope="module")
def shown(kinds, html_of, browse, tmp_path_factory):
    """The DOM of the page of each kind, and of one to complain of, and what was complained of."""
    folder, script = tmp_path_factory.mktemp("pages"), "<script>alert(1)</script>"
    pages = {kind: html_of(kind) for kind in kinds}
    pages["complaint"] = pages["recommended"].replace("</main>", f"{script}</main>")
    for number, page in enumerate(pages.values()):
        (folder / f"{number}.html").write_text(page, encoding="utf-8")
    frames = [f'<iframe src="{number}.html"></iframe>' for number in range(len(pages))]
    (folder / "all.html").write_text("<!doctype html>" + "".join(frames) + WRITE_DOWN)
    # A browser takes longer to start than to show them all.
    dom, complaints = browse(folder / "all.html", "--dump-dom", "--allow-file-access-from-files")
    doms = map(unescape, re.findall(r"<pre>(.*?)</pre>", dom, re.DOTALL))
    return {
        kind: (found, [line for line in complaints if f"/{number}.html" in line])
        for number, (kind, found) in enumerate(zip(pages, doms, strict=True))
    }


def test_a_browser_shows_it_without_complaints(any_kind, html_of, shown):
    dom, complaints = shown[any_kind]
    assert complaints == []
    written, seen = Page(html_of(any_kind)), Page(dom)
    assert seen.values("id") == written.values("id")
    assert seen.tags == written.tags


def test_a_complaint_of_a_browser_would_be_heard(shown):
    _, complaints = shown["complaint"]
    assert complaints


def test_a_browser_draws_the_figures(html_of, browse, tmp_path):
    file, picture = tmp_path / "autotune.html", tmp_path / "page.png"
    file.write_text(html_of("recommended"), encoding="utf-8")
    _, complaints = browse(file, f"--screenshot={picture}", "--window-size=1200,3600")
    assert complaints == []
    pixels = (imread(picture)[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[:2] == (3600, 1200)
    colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3)[::7].tolist()}
    assert (91, 163, 208) in colours  # the darkest ground of a square in the heat maps


def test_a_busy_machine_is_said(html_of):
    said = "Other programs took 35% of the processors"
    assert said in html_of("busy")
    assert "1.4 cores busy" in html_of("busy")
    assert said not in html_of("recommended")


def test_files_that_are_read_slowly_are_said(result_of):
    result = result_of("recommended")
    line = "p3.h5ad: `X` is read slowly, through h5py: filter <b> is not supported; write it again"
    slow = replace(result, dataset=replace(result.dataset, slow_reading=line))
    for said, expected in ((result, False), (slow, True)):
        assert (line in Page(html_report(said, code="")).texts["conditions"]) == expected
