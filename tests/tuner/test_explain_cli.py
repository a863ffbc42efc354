"""``autotune explain`` and ``autotune show``, which read what was stored."""

import json
from dataclasses import replace

import pytest
from tests import commands

from cellfeed_tuner import Configuration

FAST = Configuration(block_size=64, fetch_factor=16)


@pytest.fixture
def explain(result_of, tmp_path):
    """Runs the command on a saved result of a kind, or on a result; options are given as text."""

    def run(of, options=""):
        path = tmp_path / "autotune.json"
        (result_of(of) if isinstance(of, str) else of).save(path)
        ran = commands.autotune("explain", path, *options.split())
        assert ran.exit_code == 0, ran.output
        return " ".join(ran.stdout.split())

    return run


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("explained", "", "block size 64, fetch factor 64, 0 workers"),
        ("explained", "", "The fastest of the 4 timed configurations"),
        ("explained", "", "Bound by decompression: 80.0 of 113.0 us per cell"),
        ("explained", "", "decompressing 160.0 [144.0, 176.0] █"),
        ("explained", "", "1.67 bytes are decompressed for each byte used."),
        ("explained", "", "A training step longer than 7.2 ms hides"),  # 64 x 113 us
        ("explained", "", "in blocks of 1,024, would be at least 2.5x as fast"),
        ("explained", "--step-ms 64", "the training step takes longer, 1,000.0 us per cell."),
        ("explained", "--step-ms 1", "Bound by decompression: 80.0 of 113.0 us per cell"),
        ("recommended", "", "Where the time goes: Not known: too few rounds were timed"),
        ("nothing feasible", "", "No configuration is feasible. The nearest is block size 64"),
        ("not compared", "", "timed, but not compared"),
        ("too long", "--block-size 700", "block size 700 is not in the grid;"),
        ("too long", "--block-size 700", "The nearest: block size 1024"),
        # Feasible and the fastest; the fastest of what mixes; the best mixed if nothing does.
        ("recommended", "--block-size 4", "The best of 4 configurations with block size 4: "),
        (
            "recommended",
            "--workers 1",
            "in question recommended block size 64 64 fetch factor 64 64 workers 1 0 ",
        ),
        ("recommended", "--block-size 1024", "block size 1024 64 fetch factor 64 64 workers 0 0 "),
        ("recommended", "--workers 0", "workers 0 cells/s [95 % interval] 8,800 [8,500, 9,100] en"),
    ],
)
def test_what_is_asked_is_explained(explain, kind, options, said):
    assert said in explain(kind, options)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        # What the grid in conftest says of each, beside the recommended one.
        (
            (4, 4, 1),
            "3,000 [2,700, 3,600] 8,800 [8,500, 9,100] entropy of plate / random 3.492 bits, 97.0%",
        ),
        ((4, 4, 1), "0.34x [0.29x, 0.40x] 1.00x [1.00x, 1.00x] verdict outside inside"),
        ((4, 4, 1), "Outcome: slower. Required: 95% of random sampling's entropy"),
        ((4, 4, 1), "Measured as planned, outside the paper's bounds."),
        ((64, 64, 1), "times recommended 0.89x [0.83x, 0.95x]"),
        ((64, 4, 0), "cells/s [95 % interval] 7,040 [3,5"),
        ((64, 4, 0), "Outcome: not timed: it mixes too little."),
        ((4, 64, 1), "not timed: over the memory limit: its buffers alone take 9,000 MB."),
        ((64, 4, 1), "Outcome: failed: no workers here."),
        ((1024, 4, 1), "not timed: the run ended before; see --budget"),
        ((1024, 64, 0), "too few cells in the collection: whole fetches need 32,768 cells"),
        ((1024, 64, 1), "not timed: predicted slower than the best"),
        ((64, 64, 0), "Outcome: recommended. Required"),
    ],
)
def test_each_configuration_has_its_reason(explain, sizes, said):
    options = dict(zip(("--block-size", "--fetch-factor", "--workers"), sizes, strict=True))
    asked = " ".join(f"{option} {value}" for option, value in options.items())
    assert said in explain("recommended", asked)


def test_limits_are_reasons(explain, result_of):
    result = result_of("recommended")
    greedy = replace(result.configurations[1], peak_memory_bytes=9 * 10**9)
    grid = (result.configurations[0], greedy, *result.configurations[2:])
    said = explain(
        replace(result, configurations=grid), "--block-size 4 --fetch-factor 4 --workers 1"
    )
    assert "memory 9,000 MB 400 MB" in said
    assert "Outcome: over the memory limit." in said
    assert "at most 8,000 MB of memory." in said
    # With a need, what mixes less is not chosen.
    need = replace(result.constraints, need_cells_per_second=1_000.0)
    chosen = replace(result.recommended, configuration=result.configurations[2].configuration)
    said = explain(
        replace(result, constraints=need, recommended=chosen),
        "--block-size 64 --fetch-factor 64 --workers 0",
    )
    assert "Outcome: mixes less." in said


@pytest.mark.parametrize(
    ("options", "nearest"),
    [
        # Of block size 1,024 only fetch factor 4 was timed, four doublings from the
        # recommended 64, and as many as lie between block sizes 64 and 1,024.
        ("--block-size 4096", (64, 64, 0)),
        ("--block-size 2", (4, 64, 0)),
        ("--fetch-factor 8", (64, 64, 0)),
        ("--block-size 8192 --fetch-factor 2", (1024, 4, 0)),
        # Workers decide only between equal sizes.
        ("--workers 9", (64, 64, 1)),
    ],
)
def test_outside_of_the_grid_is_the_nearest_that_was_timed(explain, options, nearest):
    said = explain("explained", options)
    assert "is not in the grid; autotune can be given it. The nearest timed configuration:" in said
    answer = json.loads(explain("explained", f"{options} --json"))["answer"]
    assert answer["n_matching"] == 0
    assert tuple(answer["about"]["configuration"].values()) == nearest
    assert answer["about"]["cells_per_second"]["value"] is not None


def test_json_says_the_same(explain):
    found = json.loads(explain("explained", "--block-size 4 --json"))
    assert found["schema"] == "cellfeed.explain/3"
    assert found["bottleneck"]["kind"] == "decompressing"
    assert found["recommended"]["configuration"]["block_size"] == 64
    answer = found["answer"]
    assert (answer["n_matching"], answer["outcome"]) == (4, "slower")
    assert answer["about"]["configuration"]["num_workers"] == 1
    assert answer["about"]["relative"]["value"] == pytest.approx(3_000 / 8_800)
    assert json.loads(explain("recommended", "--json"))["answer"] is None


@pytest.mark.parametrize("text", [None, "", "{}", '{"schema": "cellfeed.other/1"}'])
def test_the_file_in_this_folder_is_read_and_a_foreign_one_is_one_line(
    tmp_path, monkeypatch, result_of, text
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "autotune.json"
    if text is not None:
        path.write_text(text)
    ran = commands.autotune("explain")
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert "autotune.json" in ran.stderr
    assert ("no such file" in ran.stderr) == (text is None)
    result_of("recommended").save(path)
    assert commands.autotune("explain").exit_code == 0


def show(*arguments):
    shown = commands.autotune("show", *arguments)
    assert shown.exit_code == 0, shown.output
    return " ".join(shown.stdout.split())


def test_nothing_known_is_a_plain_line(cache_folder):
    said = commands.autotune("show").stdout
    assert said.startswith("No earlier runs; results of autotune are stored in ")
    assert str(cache_folder) in said
    assert json.loads(show("--json"))["runs"] == []
    assert commands.autotune("show", "plates").exit_code == 2


def test_the_last_run_of_each_kind_is_listed(stored):
    stored({FAST: 1e-4})
    stored({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00")
    stored({FAST: 1e-3}, machine="elsewhere")
    shown = show()
    assert "100,000 [90,000, 110,000]" in shown
    assert "1,000 [900, 1,100]" in shown
    assert "10,000 [9,000" not in shown
    assert shown.index("2026-11-21") < shown.index("2026-11-20")
    found = json.loads(show("--json"))
    assert found["schema"] == "cellfeed.known/1"
    last, other = found["runs"]
    assert last["choice"] == {"block_size": 64, "fetch_factor": 16, "num_workers": 0}
    assert round(last["cells_per_second"]["value"]) == 100_000
    assert other["machine"]["cpu"] == "cpu of elsewhere"
    assert last["settings"]["labels"] == ["plate"]
    assert {"digest", "n_cells"} <= last["data"].keys()


def test_says_how_fast_it_is_compared_with_the_run_before(stored):
    stored({FAST: 1e-4}, began="2026-11-19T00:00:00.000+00:00")
    for other in ({"machine": "elsewhere"}, {"data": "others"}, {"batch_size": 8}):
        stored({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00", **other)
    assert "than before" not in show()
    stored({FAST: 2e-4}, began="2026-11-22T00:00:00.000+00:00", versions="2")
    assert "slower: 0.50x" in show()
    last = json.loads(show("--json"))["runs"][0]["before"]
    assert last["began"].startswith("2026-11-19")
    assert last["ratio"]["value"] == pytest.approx(0.5)
    slow = Configuration(block_size=1, fetch_factor=1)
    stored({slow: 2e-4}, began="2026-11-23T00:00:00.000+00:00", versions="2")
    for words in ("equally", "1.00x", "2026-11-22", "another", "configuration"):
        assert words in show()


def test_runs_for_other_numbers_of_ranks_or_without_a_choice_are_listed(stored):
    kinds = [(1, 1), (2, 2), (1, 2)]
    for n_ranks, world_size in kinds:
        stored({FAST: 1e-4}, n_ranks=n_ranks, world_size=world_size)
    ranks = [each["settings"]["ranks"] for each in json.loads(show("--json"))["runs"]]
    assert [(each["n_local"], each["n_total"]) for each in ranks] == kinds
    assert show().count("ranks") == 2
    assert "none" not in show()
    stored({FAST: 1e-4}, data="without a choice", cells_per_second=None)
    assert "none" in show()
