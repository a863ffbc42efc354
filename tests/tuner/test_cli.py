"""The ``autotune`` command, from its arguments to its files."""

import html
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from tests import commands
from tests.tuner.reports import printed
from tests.warm import python as warm

from cellfeed import CellDataset, open_collection
from cellfeed_tuner import AutotuneResult, Estimate, autotune
from cellfeed_tuner._interval import interval
from cellfeed_tuner._measuring import _process
from cellfeed_tuner._measuring._process import MeasuringProcess

pytestmark = pytest.mark.usefixtures("short_replicates")

SHARED = Path(__file__).parents[3] / "shared" / "data"
SMALL_GRID = ["--block-sizes=4,16", "--fetch-factors=2 8", "--workers=0", "--budget=600"]


@pytest.fixture(scope="module")
def tuned(short_replicates, small_collection, tmp_path_factory):
    """What the command printed and wrote for the small collection."""
    output = tmp_path_factory.mktemp("tuned")
    settings = ["--label", "plate", "--output", output, "--entropy-floor", "0.9", *SMALL_GRID]
    printed = commands.autotune(small_collection, *settings)
    assert printed.exit_code == 0, printed.output
    return printed, output


def test_it_prints_the_grid_the_reason_and_the_code(tuned):
    printed, output = tuned
    assert "Recommended: block size" in printed.stdout
    assert "random sampling's entropy" in " ".join(printed.stdout.split())
    code = printed.stdout.split("To train with it:")[1].split("Wrote")[0]
    scope: dict[str, Any] = {}
    exec(textwrap.dedent(code), scope)
    assert len(scope["minibatch"]) <= scope["dataset"].batch_size
    assert str(output / "autotune.png") in printed.stdout
    assert "Measuring throughput" in printed.stderr
    assert "Measuring throughput" not in printed.stdout


def test_it_writes_the_schema_that_was_promised(tuned):
    _, output = tuned
    result = json.loads((output / "autotune.json").read_text())
    assert result["schema"] == "cellfeed.autotune/2"
    assert {"machine", "dataset", "configurations", "recommended"} <= result.keys()
    assert len(result["configurations"]) == 4
    for each in result["configurations"]:
        assert {"block_size", "fetch_factor", "num_workers"} == each["configuration"].keys()
        names = {"measured", "expected", "lower_bound", "upper_bound", "random"}
        assert names <= each["entropy_bits"].keys()
        if each["status"] == "measured":
            assert {"value", "low", "high"} == each["cells_per_second"].keys()
            assert each["cells_per_second"]["low"] <= each["cells_per_second"]["high"]
            assert each["peak_memory_bytes"] > 0


def test_every_measured_configuration_is_judged(tuned):
    _, output = tuned
    result = json.loads((output / "autotune.json").read_text())
    for each in result["configurations"]:
        assert_judged_if_timed(each)
        if each["verdict"] is not None:
            assert each["verdict"]["kind"] in {"inside", "outside", "assumptions"}, each
            assert {"bits", "error_bits", "assumptions", "sentence"} <= each["verdict"].keys()
    chosen = AutotuneResult.load(output / "autotune.json").chosen
    assert chosen is not None
    page = html.unescape((output / "autotune.html").read_text(encoding="utf-8"))
    assert chosen.verdict is None or chosen.verdict.sentence in page
    assert "The files are not shuffled" in page


def assert_judged_if_timed(each):
    """A slow machine may have too few whole fetches in the time, and nothing or little to judge."""
    if each["status"] != "not enough samples":
        assert (each["verdict"] is not None) == (each["status"] == "measured")


def test_files_that_are_shuffled_already_or_read_slowly_are_called_so(tmp_path, capfd):
    plates = np.random.default_rng(0).permutation(np.repeat(["p0", "p1", "p2"], 1000))
    obs = pd.DataFrame({"plate": pd.Categorical(plates)}, index=[str(i) for i in range(3000)])
    ad.AnnData(np.eye(3000, 20, dtype=">f4"), obs=obs).write_h5ad(tmp_path / "all.h5ad")
    grid = ["--block-sizes", "256", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(
        tmp_path / "all.h5ad", "--label", "plate", "--output", tmp_path, *grid
    )
    assert printed.exit_code == 0, printed.output
    order = AutotuneResult.load(tmp_path / "autotune.json").storage_order
    assert order is not None
    assert order.already_shuffled
    page = html.unescape((tmp_path / "autotune.html").read_text(encoding="utf-8"))
    assert order.sentence in page
    assert "The theory does not apply because labels are mixed inside blocks" in page
    said = " ".join(printed.stdout.split())
    assert "`X` is read slowly, through h5py: its numbers are big-endian; write it as" in said
    assert "UserWarning" not in capfd.readouterr().err  # of processes that measure


def test_a_loader_that_is_wrong_is_named_as_such(result_of):
    result = result_of("wrong loader")
    said = printed(result).strip()
    assert said.startswith("THE LOADER DELIVERS WRONG DATA: do not train with it.")
    assert f"{result.loader_fault}; please report this." in said


def test_figures_from_few_rounds_are_marked(result_of):
    said = printed(result_of("few rounds"))
    assert "9,000 [8,100, 10,800] cells/s, from only 5 rounds, not compared with others; " in said


def test_of_ranges_what_a_study_proposes_is_measured(small_collection, tmp_path):
    ranges = ["--block-sizes", "1:256", "--fetch-factors", "1:16", "--workers", "0:0"]
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", "0.8"]
    printed = commands.autotune(small_collection, *settings, *ranges, "--budget", "600")
    assert printed.exit_code == 0, printed.output
    result = json.loads((tmp_path / "autotune.json").read_text())
    assert result["ranges"]["block_sizes"] == [1, 256]
    assert result["ranges"]["n_configurations"] == 256 * 16
    assert result["ranges"]["n_considered"] >= len(result["configurations"])
    for each in result["configurations"]:
        assert 1 <= each["configuration"]["block_size"] <= 256
        assert 1 <= each["configuration"]["fetch_factor"] <= 16
        expected = each["entropy_bits"]["expected"]["value"]
        assert expected >= 0.8 * each["entropy_bits"]["random"]
        assert_judged_if_timed(each)
    page = html.unescape((tmp_path / "autotune.html").read_text(encoding="utf-8"))
    assert "Of 4,096 configurations (block size 1 to 256," in page
    assert (tmp_path / "autotune.png").read_bytes().startswith(b"\x89PNG")
    page = html.unescape((tmp_path / "autotune.html").read_text(encoding="utf-8"))
    assert "Of 4,096 configurations (block size 1 to 256," in page
    # What was found is found again.
    again = commands.autotune(small_collection, *settings, *ranges, "--budget", "600", "--json")
    assert json.loads(again.stdout)["earlier"]["use"] != "none"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("4;16", "'4;16' is not a list of integers; write 4,16,64, or 1:4096 for a range"),
        ("1:8,16", "'1:8,16' is not a list of integers"),
        ("0:8", "0 is below 1, the minimum"),
        ("8:4", "'8:4' is an empty range; write the lower end first"),
    ],
)
def test_sizes_that_are_none_are_refused_in_a_line(small_collection, sizes, said):
    printed = commands.autotune(small_collection, "--label", "plate", "--block-sizes", sizes)
    assert printed.exit_code == 2
    assert said in " ".join(printed.stderr.split())


def test_the_picture_is_a_picture(tuned):
    _, output = tuned
    assert (output / "autotune.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_recommendation_and_its_code(tuned):
    printed, output = tuned
    page = html.unescape((output / "autotune.html").read_text(encoding="utf-8"))
    recommended = json.loads((output / "autotune.json").read_text())["recommended"]
    assert recommended["reason"] in page
    chosen = AutotuneResult.load(output / "autotune.json").chosen
    assert chosen is not None
    assert chosen.cells_per_second is not None
    assert interval(chosen.cells_per_second) in printed.stdout
    assert interval(Estimate(**recommended["cells_per_second"])) in printed.stdout
    assert recommended["peak_memory_bytes"] == chosen.peak_memory_bytes
    code = printed.stdout.split("To train with it:")[1].split("Wrote")[0]
    assert textwrap.dedent(code).strip() in page
    assert str(output / "autotune.html") in printed.stdout


@pytest.mark.parametrize(("floor", "exit_code"), [("0.5", 0), ("1", 1)])
def test_with_json_stdout_has_the_result_and_nothing_else(
    small_collection, tmp_path, floor, exit_code
):
    grid = ["--block-sizes", "16", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", floor, *grid]
    printed = commands.autotune(small_collection, *settings, "--json")
    assert printed.exit_code == exit_code, printed.output
    assert json.loads(printed.stdout) == json.loads((tmp_path / "autotune.json").read_text())
    assert "Measuring throughput" in printed.stderr
    assert "Wrote" in printed.stderr
    said = "No configuration is feasible" if exit_code else "Recommended: block size 16"
    assert said in printed.stderr


def test_the_result_is_used(tuned, small_collection):
    _, output = tuned
    sizes = json.loads((output / "autotune.json").read_text())["recommended"]["configuration"]
    collection = open_collection(small_collection, obs=["plate"])
    dataset = CellDataset.from_autotune(collection, output / "autotune.json", seed=0)
    assert dataset.strategy.block_size == sizes["block_size"]  # type: ignore[attr-defined]
    assert dataset.fetch_factor == sizes["fetch_factor"]
    assert dataset.loader().num_workers == sizes["num_workers"]
    rows = np.concatenate([minibatch.rows for minibatch in dataset.loader()])
    assert np.array_equal(np.sort(rows), np.arange(len(collection)))


def test_where_nothing_is_feasible_it_says_so_and_names_the_nearest(small_collection, tmp_path):
    grid = ["--block-sizes", "64", "--fetch-factors", "1", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(small_collection, "--label", "plate", "--output", tmp_path, *grid)
    assert printed.exit_code == 1
    assert "No configuration is feasible" in printed.stdout
    assert "The nearest is block size 64" in printed.stdout
    assert json.loads((tmp_path / "autotune.json").read_text())["recommended"] is None


@pytest.mark.parametrize(
    ("name", "label"), [("scgen_valid.h5ad", "cell_type"), ("pbmc68k_reduced.h5ad", "louvain")]
)
@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not beside this clone")
def test_real_files_of_any_age_are_tuned(name, label, tmp_path):
    grid = ["--block-sizes", "8", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
    printed = commands.autotune(SHARED / name, "--label", label, "--output", tmp_path, *grid)
    assert printed.exit_code == 0, printed.output
    assert "Recommended: block size 8, fetch factor 2, 0 workers" in printed.stdout


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
        (
            ["{folder}/quantities.h5ad"],
            "score",
            "obs column 'score' has 300 values in 300 cells, so that hardly two cells of a",
        ),
        (["{folder}/quantities.h5ad"], "rounded", "'rounded' has 60 values in 300 cells"),
        (["{folder}/quantities.h5ad"], "rounded", "make bins of it (pandas.cut)"),
        (["{folder}/quantities.h5ad"], "barcode", "'barcode' has 300 values in 300 cells"),
        (["{folder}/quantities.h5ad"], "nearly", "'nearly' has 200 values in 300 cells"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(files, paths, label, said):
    printed = commands.autotune(*(path.format(**files) for path in paths), "--label", label)
    assert printed.exit_code == 2
    assert printed.stdout == ""
    assert said in printed.stderr
    assert printed.stderr.count("\n") == 1
    assert "Traceback" not in printed.stderr


@pytest.mark.parametrize(
    "option",
    [
        ["--batch-size", "0"],
        ["--block-sizes", "0,4"],
        ["--block-sizes", "four"],
        ["--fetch-factors", "-1"],
        ["--workers", "-1"],
        ["--budget", "0"],
        ["--entropy-floor", "1.5"],
        ["--seed", "-1"],
        ["--memory", "12 parsecs"],
        ["--memory", "0"],
        ["--memory", "."],
        ["--need", "inf"],
        ["--batch-size", "100000"],
        ["--need", "-5"],
        ["--step-ms", "0"],
        ["--step-ms", "3", "--need", "100"],
        ["--cache", "lukewarm"],
    ],
)
def test_impossible_settings_are_refused_before_any_measuring(small_collection, tmp_path, option):
    printed = commands.autotune(small_collection, "--label", "plate", "--output", tmp_path, *option)
    assert printed.exit_code == 2
    assert "Error:" in printed.stderr
    assert "Measuring" not in printed.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named_before_measuring(small_collection):
    printed = commands.autotune(small_collection, "--label", "plate", "--output", "/proc/nowhere")
    assert printed.exit_code == 2
    assert "/proc/nowhere: not writable (" in printed.stderr
    assert "Measuring" not in printed.stderr


def test_a_module_in_the_current_folder_is_not_taken_for_ours(
    small_collection, tmp_path, monkeypatch
):
    monkeypatch.setattr(_process, "subprocess", subprocess)  # which imports by itself
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    collection = open_collection(small_collection, obs=["plate"])
    with MeasuringProcess(collection) as process:
        process.start()
        assert process._process.poll() is None


def test_a_script_without_a_main_guard_can_call_it(small_collection, tmp_path):
    script = tmp_path / "tune.py"
    script.write_text(
        "from cellfeed import open_collection\n"
        "from cellfeed_tuner import autotune\n"
        f"collection = open_collection({str(small_collection)!r}, obs=['plate'])\n"
        "result = autotune(collection, label='plate', block_sizes=[4], fetch_factors=[2],\n"
        "                  workers=[1], budget=600)\n"
        "print(result.configurations[0].status)\n"
    )
    # As fast as the machine is.
    assert warm.output_of(script) in {"measured\n", "not enough samples\n"}


def test_a_warm_cache_is_measured_as_such(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    result = autotune(
        collection, label="plate", block_sizes=[4], fetch_factors=[8], workers=[0], budget=600.0,
        cache="warm",
    )  # fmt: skip
    assert result.cache == "warm"
    assert result.recommended is not None


def test_a_second_run_knows_of_the_first(small_collection, tmp_path):
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", "0.5"]
    settings += ["--block-sizes", "4", "--fetch-factors", "8", "--workers", "0", "--budget", "600"]

    def use(*more):
        printed = commands.autotune(small_collection, *settings, *more)
        assert printed.exit_code == 0, printed.output
        earlier = json.loads((tmp_path / "autotune.json").read_text())["earlier"]
        page = (tmp_path / "autotune.html").read_text(encoding="utf-8")
        assert earlier["sentence"] in html.unescape(page)
        return earlier["use"]

    assert use() == "none"
    assert use() == "order"
    assert use("--batch-size", "32") == "none"
    assert use("--fresh") == "none"
    shown = json.loads(commands.autotune("show", "--json").stdout)["runs"]
    assert [each["asked"]["batch_size"] for each in shown] == [64, 32]
    assert Path(shown[0]["path"]).parent == small_collection


def test_where_nothing_can_be_kept_the_search_goes_on(
    small_collection, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", "/proc/nowhere")
    printed = commands.autotune(
        small_collection, "--label", "plate", "--output", tmp_path, *SMALL_GRID
    )
    assert printed.exit_code in {0, 1}
    assert [each.name for each in caplog.records] == ["cellfeed_tuner._history"]


def test_the_help_of_autotune_names_its_subcommands():
    printed = commands.autotune("--help")
    assert "Commands:" in printed.stdout
    assert "explain" in printed.stdout


def test_that_a_result_of_other_data_is_replaced_is_said(small_collection, tmp_path):
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", "0.5", *SMALL_GRID]
    first, *others = sorted(small_collection.iterdir())
    said = [
        " ".join(commands.autotune(*paths, *settings).stdout.split())
        for paths in ([small_collection], [small_collection], [first, others[0]])
    ]
    replaced = "this replaced the result of"
    assert [replaced in each for each in said] == [False, False, True]
    assert f"{replaced} {first} (--output chooses another folder)" in said[-1]


def test_without_a_label_it_says_what_there_is(small_collection):
    printed = commands.autotune(small_collection)
    assert printed.exit_code == 2
    said = " ".join(printed.stderr.split())
    assert "Missing option '--label': an obs column to mix minibatches by" in said
    assert said.endswith("obs has: plate, cell_type, constant")


def test_a_path_may_have_the_name_of_a_subcommand(small_collection, tmp_path, monkeypatch):
    (tmp_path / "explain").symlink_to(small_collection)
    monkeypatch.chdir(tmp_path)
    printed = commands.autotune("./explain", "--label", "nope")
    assert printed.exit_code == 2
    assert "has no column 'nope'" in printed.stderr


def test_runs_as_a_module():
    command = [sys.executable, "-m", "cellfeed_tuner", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("Usage: python -m cellfeed_tuner [OPTIONS] PATH...")
    _, _, listed = ran.stdout.partition("Commands:")
    assert "and where the time goes." in " ".join(listed.split())
