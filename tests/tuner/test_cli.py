"""``autotune`` as users run it: from a shell, from a script and in a notebook."""

import html
import json
import re
import subprocess
import sys
import textwrap
import threading
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import nbformat
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient
from tests import commands
from tests.tuner.reports import LiveDisplay, page_without_pictures
from tests.warm import python as warm

from cellfeed import CellDataset, open_collection
from cellfeed_tuner import AutotuneResult, Configuration, measure

pytestmark = pytest.mark.usefixtures("short_replicates")

SHARED = Path(__file__).parents[3] / "shared" / "data"
SMALL_GRID = ["--block-sizes=4,16", "--fetch-factors=2 8", "--workers=0", "--budget=600"]
ONE = ["--block-sizes", "4", "--fetch-factors", "8", "--workers", "0", "--budget", "600"]


@pytest.fixture
def tune(small_collection, tmp_path):
    """Runs the command on the small collection; gives what it printed and, if it ended well, all
    that it wrote.
    """

    def tune(*options, exit_code=0):
        settings = ["--label", "plate", "--output", tmp_path, *options]
        printed = commands.autotune(small_collection, *settings)
        assert printed.exit_code == exit_code, printed.output
        written = json.loads((tmp_path / "autotune.json").read_text())
        page = html.unescape((tmp_path / "autotune.html").read_text(encoding="utf-8"))
        assert (tmp_path / "autotune.png").read_bytes().startswith(b"\x89PNG")
        for kind in ("json", "png", "html"):
            assert str(tmp_path / f"autotune.{kind}") in printed.output
        return printed, written, page

    return tune


def check_configurations(result):
    for each in result["configurations"]:
        assert {"block_size", "fetch_factor", "num_workers"} == each["configuration"].keys()
        names = {"measured", "expected", "lower_bound", "upper_bound", "random"}
        label = each["labels"]["plate"]
        assert names <= label["entropy_bits"].keys()
        verdict = label["verdict"]
        # A slow machine may have too few whole fetches in the time, and nothing or little to judge.
        if each["status"] != "too long":
            assert (verdict is not None) == (each["status"] in {"timed", "compared"})
        if verdict is not None:
            assert verdict["kind"] in {"inside", "outside"}, each
            assert {"bits", "error_bits", "sentence"} <= verdict.keys()
        if each["status"] in {"timed", "compared"}:
            assert each["cells_per_second"]["low"] <= each["cells_per_second"]["high"]
            assert each["peak_memory_bytes"] > 0


@pytest.mark.smoke
@pytest.mark.process
def test_a_collection_is_tuned_and_the_result_used(tune, small_collection, tmp_path):
    printed, result, page = tune("--entropy-floor", "0.9", *SMALL_GRID)
    assert "Recommended: block size" in printed.stdout
    assert "of random sampling's" in " ".join(printed.stdout.split())
    assert "Measuring throughput" in printed.stderr
    assert "Measuring throughput" not in printed.stdout
    assert result["schema"] == "cellfeed.autotune/4"
    assert {"machine", "dataset", "configurations", "recommended"} <= result.keys()
    assert len(result["configurations"]) == 4
    check_configurations(result)

    loaded = AutotuneResult.load(tmp_path / "autotune.json")
    chosen, recommended = loaded.chosen, loaded.recommended
    assert chosen is not None
    assert recommended is not None
    assert recommended.reason in page
    assert all(each.sentence in page for each in chosen.verdicts)
    assert "The files are not shuffled" in page
    assert recommended.peak_memory_bytes == chosen.peak_memory_bytes
    for speed in (chosen.cells_per_second, recommended.cells_per_second):
        assert speed is not None
        assert f"{speed.value:,.0f} [{speed.low:,.0f}, {speed.high:,.0f}]" in printed.stdout

    code = textwrap.dedent(printed.stdout.split("To train with it:")[1].split("Wrote")[0])
    assert code.strip() in page
    scope: dict[str, Any] = {}
    exec(code, scope)
    assert len(scope["minibatch"]) <= scope["dataset"].batch_size
    collection = open_collection(small_collection, obs=["plate"])
    dataset = CellDataset.from_autotune(collection, tmp_path / "autotune.json", seed=0)
    sizes = recommended.configuration
    assert dataset.strategy.block_size == sizes.block_size  # type: ignore[attr-defined]
    assert dataset.fetch_factor == sizes.fetch_factor
    assert dataset.loader().num_workers == sizes.num_workers
    rows = np.concatenate([minibatch.rows for minibatch in dataset.loader()])
    assert np.array_equal(np.sort(rows), np.arange(len(collection)))


@pytest.mark.slow
@pytest.mark.process
def test_files_that_are_shuffled_already_or_read_slowly_are_called_so(tmp_path, capfd):
    plates = np.random.default_rng(0).permutation(np.repeat(["p0", "p1", "p2"], 1000))
    obs = pd.DataFrame({"plate": pd.Categorical(plates)}, index=[str(i) for i in range(3000)])
    ad.AnnData(np.eye(3000, 20, dtype=">f4"), obs=obs).write_h5ad(tmp_path / "all.h5ad")
    grid = ["--block-sizes", "256", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(
        tmp_path / "all.h5ad", "--label", "plate", "--output", tmp_path, *grid
    )
    assert printed.exit_code == 0, printed.output
    result = AutotuneResult.load(tmp_path / "autotune.json")
    assert result.chosen is not None
    (verdict,), order = result.chosen.verdicts, result.storage_order
    assert order is not None
    assert order.already_shuffled
    page = html.unescape((tmp_path / "autotune.html").read_text(encoding="utf-8"))
    assert order.sentence in page
    assert verdict.sentence in page
    assert "Blocks of one label each, drawn independently, would give 0." in verdict.sentence
    said = " ".join(printed.stdout.split())
    assert "`X` is read slowly, through h5py: its numbers are big-endian; write it as" in said
    assert "UserWarning" not in capfd.readouterr().err  # of processes that measure


@pytest.mark.slow
@pytest.mark.process
def test_of_ranges_what_a_study_proposes_is_measured(tune):
    ranges = ["--block-sizes", "1:256", "--fetch-factors", "1:16", "--workers", "0:0"]
    settings = ["--entropy-floor", "0.8", *ranges, "--budget", "600"]
    _, result, page = tune(*settings)
    assert result["ranges"]["block_sizes"] == [1, 256]
    assert result["ranges"]["n_configurations"] == 256 * 16
    assert result["ranges"]["n_considered"] >= len(result["configurations"])
    check_configurations(result)
    for each in result["configurations"]:
        assert 1 <= each["configuration"]["block_size"] <= 256
        assert 1 <= each["configuration"]["fetch_factor"] <= 16
        bits = each["labels"]["plate"]["entropy_bits"]
        assert bits["expected"]["value"] >= 0.8 * bits["random"]
    assert "Of 4,096 configurations (block size 1 to 256," in page


@pytest.mark.slow
@pytest.mark.process
def test_json_on_stdout_even_where_nothing_can_be_stored(tune, monkeypatch, caplog):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", "/proc/nowhere")
    printed, result, _ = tune("--entropy-floor", "0.5", *ONE, "--json")
    assert json.loads(printed.stdout) == result
    for said in ("Measuring throughput", "Wrote", "Recommended: block size 4"):
        assert said in printed.stderr
    assert [each.name for each in caplog.records] == ["cellfeed_tuner._history"]


@pytest.mark.slow
@pytest.mark.process
def test_where_nothing_is_feasible_it_says_so_and_names_the_nearest(tune):
    grid = ["--block-sizes", "64", "--fetch-factors", "1", "--workers", "0", "--budget", "600"]
    printed, result, _ = tune(*grid, exit_code=1)
    assert "No configuration is feasible" in printed.stdout
    assert "The nearest is block size 64" in printed.stdout
    assert result["recommended"] is None


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "label"), [("scgen_valid.h5ad", "cell_type"), ("pbmc68k_reduced.h5ad", "louvain")]
)
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not beside this clone")
def test_real_files_of_any_age_are_tuned(name, label, tmp_path):
    grid = ["--block-sizes", "8", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(SHARED / name, "--label", label, "--output", tmp_path, *grid)
    assert printed.exit_code == 0, printed.output
    assert "Recommended: block size 8, fetch factor 2, 0 workers" in printed.stdout


@pytest.mark.slow
@pytest.mark.process
def test_runs_are_kept_and_other_data_replace_a_result(tune, small_collection, tmp_path):
    for more in ((), ("--batch-size", "32")):
        printed, _, _ = tune("--entropy-floor", "0.5", *ONE, *more)
        assert "this replaced" not in printed.stdout
    shown = json.loads(commands.autotune("show", "--json").stdout)["runs"]
    assert [each["settings"]["batch_size"] for each in shown] == [32, 64]
    assert Path(shown[0]["path"]).parent == small_collection

    first, second, _ = sorted(small_collection.iterdir())
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", "0.5", *ONE]
    said = " ".join(commands.autotune(first, second, *settings).stdout.split())
    assert f"this replaced the result of {first} (--output chooses another folder)" in said


@pytest.mark.slow
@pytest.mark.process
def test_a_module_in_the_current_folder_is_not_taken_for_ours(
    small_collection, tmp_path, monkeypatch
):
    # A process that imports by itself.
    monkeypatch.setattr("cellfeed_tuner._measuring._process.subprocess", subprocess)
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    collection = open_collection(small_collection)
    found = measure(collection, Configuration(block_size=4, fetch_factor=8), seconds=0.1)
    assert found.failure == ""


@pytest.mark.process
def test_a_script_without_a_main_guard_measures_a_warm_cache(small_collection, tmp_path):
    script = tmp_path / "tune.py"
    script.write_text(
        "from cellfeed import open_collection\n"
        "from cellfeed_tuner import autotune\n"
        f"collection = open_collection({str(small_collection)!r}, obs=['plate'])\n"
        "result = autotune(collection, label='plate', block_sizes=[4], fetch_factors=[2],\n"
        "                  workers=[1], budget=600, cache='warm', entropy_floor=0.5)\n"
        "print(result.configurations[0].status, result.cache, result.recommended is not None)\n"
    )
    # As fast as the machine is.
    assert re.fullmatch("(timed|compared) warm True\n", warm.output_of(script))


COUNT = "with open({ran!r}, 'a') as file: file.write('once ')"
TUNE = """
from cellfeed import CellDataset, open_collection
from cellfeed_tuner import autotune

collection = open_collection({folder!r}, obs=["plate"])
result = autotune(
    collection, label="plate", block_sizes=[4], fetch_factors=[8], workers=[0, 1],
    entropy_floor=0.5, budget=600,
)
result
"""
TRAIN = """
dataset = CellDataset.from_autotune(collection, result, seed=0)
print(sum(len(minibatch) for minibatch in dataset.loader()))
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_notebook_tunes_once_and_trains(small_collection, tmp_path, monkeypatch):
    """The measuring process runs no cell again, though cells have no main guard."""
    monkeypatch.setattr("jupyter_client.launcher.Popen", warm.Popen)
    monkeypatch.setenv(warm.SHORT_REPLICATES, "1")
    ran = tmp_path / "ran"
    sources = COUNT.format(ran=str(ran)), TUNE.format(folder=str(small_collection)), TRAIN
    notebook = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, sources)))
    NotebookClient(notebook, timeout=300).execute()
    assert ran.read_text() == "once "
    (shown,) = notebook.cells[1].outputs  # nothing on stdout or stderr beside it
    assert "Recommended: block size 4, fetch factor 8" in shown.data["text/html"]
    assert shown.data["text/plain"].startswith("<AutotuneResult: block size 4, fetch factor 8, ")
    (printed,) = notebook.cells[2].outputs
    assert printed.text == "4500\n"


@pytest.fixture
def nothing_is_measured(monkeypatch):
    """The process that measures is not started beforehand, and must not be started later."""
    command = "cellfeed_tuner._commands._autotune_cli"
    monkeypatch.setattr(f"{command}._measuring_process", lambda _: nullcontext())
    monkeypatch.setattr("cellfeed_tuner._measuring._process.subprocess.Popen", pytest.fail)


@pytest.fixture
def report(nothing_is_measured, result_of, small_collection, tmp_path, monkeypatch):
    """Runs the command as if it had found the result of a kind; it draws little."""
    monkeypatch.setattr("cellfeed_tuner.plots.autotune_figure", lambda _: Figure(figsize=(1, 1)))
    monkeypatch.setattr("cellfeed_tuner._reports._page.html_report", page_without_pictures)

    def report(kind, *options, folder="all"):
        monkeypatch.setattr("cellfeed_tuner._autotune.tuned", lambda *_, **__: result_of(kind))
        # A slow machine leaves picture and page out where the budget is spent.
        settings = ["--label", "plate", "--output", tmp_path / folder, "--budget", "100000"]
        return commands.autotune(small_collection, *settings, *options)

    return report


@pytest.mark.parametrize(
    ("kind", "exit_code", "said"),
    [
        ("recommended", 0, "Recommended: block size 64"),
        ("nothing feasible", 1, "No configuration is feasible"),
        ("wrong loader", 1, "THE LOADER DELIVERS WRONG DATA"),
    ],
)
def test_what_was_found_is_printed_and_written(report, result_of, tmp_path, kind, exit_code, said):
    printed = report(kind)
    assert printed.exit_code == exit_code, printed.output
    assert said in printed.stdout
    assert AutotuneResult.load(tmp_path / "all" / "autotune.json") == result_of(kind)
    assert (tmp_path / "all" / "autotune.png").read_bytes().startswith(b"\x89PNG")
    page = html.unescape((tmp_path / "all" / "autotune.html").read_text(encoding="utf-8"))
    if exit_code == 0:
        code = printed.stdout.split("To train with it:")[1].split("Wrote")[0]
        assert textwrap.dedent(code).strip() in page
    as_json = report(kind, "--json")
    assert as_json.exit_code == exit_code
    assert json.loads(as_json.stdout) == result_of(kind).to_json()
    assert said in as_json.stderr


def test_the_first_file_that_does_not_fit_is_named(report, tmp_path):
    report("recommended", folder="whole")
    paths = [tmp_path / "whole" / f"autotune.{kind}" for kind in ("json", "png", "html")]
    sizes = [path.stat().st_size for path in paths]
    for fitting in sizes:
        first = next(path for path, size in zip(paths, sizes, strict=True) if size >= fitting)
        with commands.files_end_after(fitting - 1):
            printed = report("recommended", folder=f"{fitting}")
        assert printed.exit_code == 2
        path = tmp_path / f"{fitting}" / first.name
        assert f"{path}`" in printed.stderr.splitlines()[-1]
        assert "Recommended" in printed.stdout
        assert not path.exists()


@pytest.fixture
def files(small_collection, tmp_path):
    """One path for each way in which a file can be wrong."""
    good = small_collection / "plate0.h5ad"
    (tmp_path / "empty").mkdir()
    (tmp_path / "truncated.h5ad").write_bytes(good.read_bytes()[:20_000])
    (tmp_path / "text.h5ad").write_text("not HDF5")
    with h5py.File(tmp_path / "plain.h5ad", "w") as file:
        file["numbers"] = [1, 2, 3]
    obs = pd.DataFrame({"plate": ["a", "b"]}, index=["x", "y"])
    ad.AnnData(np.eye(2, dtype=np.float32), obs=obs).write_h5ad(tmp_path / "other_genes.h5ad")
    numbers = np.arange(300)
    obs = pd.DataFrame(
        {
            "score": np.sqrt(numbers),
            "rounded": numbers // 5 / 7,
            "barcode": [f"cell{number}" for number in numbers],
            "nearly": pd.Categorical(np.minimum(numbers, 199)),
        },
        index=numbers.astype(str),
    )
    quantities = ad.AnnData(np.eye(300, 4, dtype=np.float32), obs=obs)
    quantities.write_h5ad(tmp_path / "quantities.h5ad")
    return {"good": good, "folder": tmp_path}


@pytest.mark.parametrize(
    ("paths", "label", "said"),
    [
        (["{folder}/nowhere"], "plate", "nowhere: no such file or folder; check the path"),
        (["{folder}/none*.h5ad"], "plate", "matches no file"),
        (["{folder}/empty"], "plate", "empty: the folder has nothing that can be opened"),
        (["{folder}/truncated.h5ad"], "plate", "truncated; copy or download it again"),
        (["{folder}/text.h5ad"], "plate", "text.h5ad: is not an HDF5 file"),
        (["{folder}/plain.h5ad"], "plate", "plain.h5ad: is not an AnnData file"),
        (["{good}"], "nope", "has no column 'nope'; its columns are: plate, cell_type, constant"),
        (["{good}"], "constant", "there is nothing to mix; choose a label with at least two"),
        (["{good}", "{folder}/other_genes.h5ad"], "plate", "other_genes.h5ad: has other genes"),
        (["{folder}/quantities.h5ad"], "score", "'score' has 300 values in 300 cells, so that"),
        (["{folder}/quantities.h5ad"], "rounded", "'rounded' has 60 values in 300 cells"),
        (["{folder}/quantities.h5ad"], "rounded", "make bins of it (pandas.cut)"),
        (["{folder}/quantities.h5ad"], "barcode", "'barcode' has 300 values in 300 cells"),
        (["{folder}/quantities.h5ad"], "nearly", "'nearly' has 200 values in 300 cells"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_bad_input_is_one_line_and_exit_code_2(files, paths, label, said):
    printed = commands.autotune(*(path.format(**files) for path in paths), "--label", label)
    assert printed.exit_code == 2
    assert printed.stdout == ""
    assert said in printed.stderr
    assert printed.stderr.count("\n") == 1
    assert "Traceback" not in printed.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--block-sizes", "4;16"], "'4;16' is not a list of integers; write 4,16,64, or 1:4096"),
        (["--block-sizes", "1:8,16"], "'1:8,16' is not a list of integers"),
        (["--block-sizes", "0:8"], "0 is below 1, the minimum"),
        (["--block-sizes", "8:4"], "'8:4' is an empty range; write the lower end first"),
        (["--block-sizes", "0,4"], "0 is below 1"),
        (["--block-sizes", "four"], "'four' is not"),
        (["--fetch-factors", "-1"], "-1"),
        (["--workers", "-1"], "-1"),
        (["--batch-size", "0"], "0"),
        (["--batch-size", "100000"], "100"),
        (["--budget", "0"], "0"),
        (["--entropy-floor", "1.5"], "1.5"),
        (["--seed", "-1"], "-1"),
        (["--memory", "12 parsecs"], "12 parsecs"),
        (["--memory", "0"], "0"),
        (["--memory", "."], "."),
        (["--need", "inf"], "inf"),
        (["--need", "-5"], "-5"),
        (["--step-ms", "0"], "0"),
        (["--step-ms", "3", "--need", "100"], "give `--need` or `--step-ms`, not both"),
        (["--align", "--balance", "plate"], "`--align` is of shuffled blocks"),
        (["--cache", "lukewarm"], "lukewarm"),
        (["--output", "/proc/nowhere"], "/proc/nowhere: not writable ("),
        (["--output", "s3://bucket/results"], "s3://bucket/results: is a URL, but only local"),
    ],
)
@pytest.mark.usefixtures("nothing_is_measured")
def test_impossible_settings_are_refused_before_any_measuring(
    small_collection, tmp_path, option, said
):
    printed = commands.autotune(small_collection, "--label", "plate", "--output", tmp_path, *option)
    assert printed.exit_code == 2
    _, error, reason = " ".join(printed.stderr.split()).partition("Error:")
    assert error
    assert said in reason
    assert "Measuring" not in printed.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("nothing_is_measured")
def test_what_to_ask_is_said(small_collection, tmp_path, monkeypatch):
    printed = commands.autotune(small_collection)
    assert printed.exit_code == 2
    said = " ".join(printed.stderr.split())
    assert "Missing option '--label': an obs column to mix minibatches by" in said
    assert said.endswith("obs has: plate, cell_type, constant")
    # A path may have the name of a subcommand.
    (tmp_path / "explain").symlink_to(small_collection)
    monkeypatch.chdir(tmp_path)
    printed = commands.autotune("./explain", "--label", "nope")
    assert printed.exit_code == 2
    assert "has no column 'nope'" in printed.stderr


@pytest.mark.process
def test_runs_as_a_module():
    command = [sys.executable, "-m", "cellfeed_tuner", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("Usage: python -m cellfeed_tuner [OPTIONS] PATH...")
    _, _, listed = ran.stdout.partition("Commands:")
    assert "and where the time goes." in " ".join(listed.split())


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_progress_is_drawn_once_a_second_at_most_and_by_no_thread(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    file, clock = Terminal(), Clock()
    num_threads = threading.active_count()
    with LiveDisplay(file, clock=clock) as display:
        for tick in range(100):
            clock.now = 0.1 * tick
            display.show("throughput", clock.now, 60, "timing block size 4, fetch factor 256")
        assert threading.active_count() == num_threads
        drawn = file.getvalue().split("\r\x1b[K")[1:]
    assert 8 <= len(drawn) <= 11
    assert drawn[-1] == "Measuring throughput: 9 of 60 s: timing block size 4, fetch"
    assert file.getvalue().endswith("\r\x1b[K")


def test_outside_of_a_terminal_each_stage_is_a_line_and_every_15_s_is_another():
    file, clock = StringIO(), Clock()
    with LiveDisplay(file, clock=clock) as display:
        for stage in ("machine", "entropy", "start", "throughput"):
            for tick in range(3 if stage != "throughput" else 40):
                clock.now = float(tick)
                display.show(stage, tick, 60, f"timing number {tick}")
    assert file.getvalue().splitlines() == [
        "Inspecting the machine ...",
        "Computing label entropy ...",
        "Preparing to measure ...",
        "Measuring throughput ...",
        "  15 of 60 s: timing number 15",
        "  30 of 60 s: timing number 30",
    ]
