"""The ``autotune explain`` command."""

import json
from dataclasses import replace

import pytest
from tests import commands

from cellfeed_tuner import Configuration, theory


@pytest.fixture
def explain(result_of, tmp_path):
    """Runs the command on a saved result of a kind, or on a result."""

    def run(of, *options):
        path = tmp_path / "autotune.json"
        (result_of(of) if isinstance(of, str) else of).save(path)
        ran = commands.autotune("explain", path, *options)
        assert ran.exit_code == 0, ran.output
        return " ".join(ran.stdout.split())

    return run


def test_the_choice_and_the_bottleneck_are_explained(explain):
    said = explain("explained")
    assert "block size 64, fetch factor 64, 0 workers" in said
    assert "It is the fastest of the 4 measured configurations" in said
    assert "Bound by decompression: 80.0 [72.0, 88.0] us" in said
    assert "decompressing 160.0 [144.0, 176.0] █" in said
    assert "1.67 bytes are decompressed for each byte used." in said
    assert "A training step longer than 7.2 ms hides" in said  # 64 x 113 us
    assert "would mix equally well in blocks of 1,024 and give at least 2.5x the throughput" in said


def test_without_a_bottleneck_it_says_so(explain):
    assert "Where the time goes: Not known: there is no recommendation" in explain("recommended")


def test_without_a_choice_the_nearest_is_named(explain):
    assert "No configuration is feasible. The nearest is block size 64" in explain(
        "nothing feasible"
    )


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (64.0, "The loader is fast enough: the training step takes longer, 1,000.0 us per cell."),
        (1.0, "Bound by decompression: 80.0 [72.0, 88.0] us"),
    ],
)
def test_a_training_step_may_be_the_bottleneck(explain, step, said):
    assert said in explain("explained", "--step-ms", step)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        # What the grid in conftest says of each.
        (
            (4, 4, 1),
            "It is slower: 3,000 [2,700, 3,600] cells/s, 0.34x [0.29x, 0.40x] the recommended",
        ),
        (
            (64, 64, 1),
            "It is slower: 8,000 [7,200, 9,600] cells/s, 0.89x [0.83x, 0.95x] the recommended",
        ),
        ((64, 4, 0), "It mixes too little: 1.800 bits are 50.0% of random sampling's 3.600"),
        ((4, 64, 1), "It exceeds the memory limit: its buffers alone take 9,000 MB."),
        ((64, 4, 1), "It failed: no workers here."),
        ((1024, 4, 1), "It was not timed (budget exhausted; see --budget)."),
        ((1024, 64, 0), "too few cells to time it: whole fetches need 32,768 cells."),
        ((1024, 64, 1), "It was not timed because it is predicted to be slower than the best."),
        ((64, 64, 0), "It is the recommended one."),
    ],
)
def test_each_configuration_has_its_reason(explain, options, reason):
    block_size, fetch_factor, num_workers = options
    said = explain(
        "recommended", "--block-size", block_size, "--fetch-factor", fetch_factor,
        "--num-workers", num_workers,
    )  # fmt: skip
    assert reason in said
    assert (
        Configuration(
            block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers
        ).__str__()
        in said
    )


def test_figures_from_few_rounds_are_called_so(explain):
    assert "9,000 [8,100, 10,800] cells/s, from only 5 rounds, not compared with others" in explain(
        "few rounds"
    )
    said = explain("few rounds", "--block-size", 64, "--num-workers", 1)
    assert "- Its throughput rests on only 5 rounds, which is not enough samples." in said
    assert "8,000 [7,200, 9,600] cells/s (from only 5 rounds)" in said


@pytest.mark.parametrize(
    ("options", "best"),
    [
        # Feasible and the fastest; the fastest of what mixes; the best mixed if nothing does.
        (("--block-size", 4), "Of the 4 configurations with block size 4, the best is block size"),
        (("--num-workers", 1), "the best is block size 64, fetch factor 64, 1 worker."),
        (("--block-size", 1024), "the best is block size 1024, fetch factor 64, 0 workers."),
    ],
)  # fmt: skip
def test_of_several_the_best_is_explained(explain, options, best):
    assert best in explain("recommended", *options)


def test_too_much_memory_is_a_reason(explain, result_of):
    result = result_of("recommended")
    greedy = replace(result.configurations[1], peak_memory_bytes=9 * 10**9)
    grid = (result.configurations[0], greedy, *result.configurations[2:])
    said = explain(
        replace(result, configurations=grid), "--block-size", 4, "--fetch-factor", 4,
        "--num-workers", 1,
    )  # fmt: skip
    assert "It takes 9,000 MB, over the limit of 8,000 MB." in said


def test_with_a_need_what_mixes_less_is_not_chosen(explain, result_of):
    result = result_of("recommended")
    need = replace(result.constraints, need_cells_per_second=1_000.0)
    chosen = replace(result.recommended, configuration=result.configurations[2].configuration)
    said = explain(
        replace(result, constraints=need, recommended=chosen),
        "--block-size", 64, "--fetch-factor", 64, "--num-workers", 0,
    )  # fmt: skip
    assert (
        "It is fast enough but mixes less: 96.0% of random sampling's entropy, against 100" in said
    )


def test_outside_of_the_grid_there_is_theory_and_the_nearest(explain):
    said = explain("explained", "--block-size", 32, "--fetch-factor", 64)
    bits = theory.expected_entropy_bits([2_000] * 14, 64, 32, 64)
    assert "block size 32, fetch factor 64 is not in the grid." in said
    assert f"would have {bits:.3f} bits" in said
    assert "The cost model predicts" in said
    assert (
        "The nearest measured configuration, in block size and fetch factor together, is "
        "block size 64, fetch factor 64, 0 workers: It is the recommended one."
    ) in said


def test_without_label_counts_there_is_no_theory(explain):
    said = explain("recommended", "--block-size", 32, "--fetch-factor", 64)
    assert "is not in the grid" in said
    assert "If every block held a single label" not in said


@pytest.mark.parametrize(
    ("options", "meant", "nearest"),
    [
        # Of block size 1,024 only fetch factor 4 was measured, four doublings from the
        # recommended 64, and as many as lie between block sizes 64 and 1,024.
        (("--block-size", 4096), "block size 4096, fetch factor 64, 0 workers", "block size 64"),
        (("--block-size", 2), "block size 2, fetch factor 64, 0 workers", "block size 4"),
        (("--fetch-factor", 8), "block size 64, fetch factor 8, 0 workers", "block size 64"),
        (("--num-workers", 9), "block size 64, fetch factor 64, 9 workers", "block size 64"),
        (("--block-size", 8192, "--fetch-factor", 2), "fetch factor 2, 0", "block size 1024"),
    ],
)
def test_the_nearest_is_near_in_both_sizes_and_was_measured(explain, options, meant, nearest):
    said = explain("explained", *options)
    assert meant in said
    assert f"measured configuration, in block size and fetch factor together, is {nearest}" in said
    answer = json.loads(explain("explained", *options, "--json"))["answer"]
    assert answer["about"]["cells_per_second"]["value"] is not None


def test_workers_decide_only_between_equal_sizes(explain):
    said = explain("explained", "--num-workers", 9)
    assert "together, is block size 64, fetch factor 64, 1 worker:" in said


def test_without_a_choice_the_size_that_was_asked_for_decides(explain):
    said = explain("not enough samples", "--block-size", 700)
    assert "block size 700 is not in the grid." in said
    assert "The nearest is block size 1024" in said
    assert "The cost model" not in said


def test_json_says_the_same(explain):
    found = json.loads(explain("explained", "--block-size", 4, "--json"))
    assert found["schema"] == "cellfeed.explain/2"
    assert found["bottleneck"]["kind"] == "decompressing"
    assert found["recommended"]["configuration"]["block_size"] == 64
    answer = found["answer"]
    assert (answer["n_matching"], answer["is_chosen"]) == (4, False)
    assert answer["about"]["configuration"]["num_workers"] == 1
    assert answer["speed_ratio"] == pytest.approx(3_000 / 8_800)
    # The model is fitted to that very throughput.
    predicted = answer["predicted"]
    assert predicted["low"] < 3_000 < predicted["high"]
    assert answer["reasons"][0].startswith("It is slower")
    assert json.loads(explain("recommended", "--json"))["answer"] is None


@pytest.mark.parametrize("text", ["", "{}", '{"schema": "cellfeed.other/1"}'])
def test_a_foreign_file_is_one_line_and_code_2(tmp_path, text):
    path = tmp_path / "foreign.json"
    path.write_text(text)
    ran = commands.autotune("explain", path)
    assert ran.exit_code == 2
    assert ran.stderr.count("\n") == 1
    assert "foreign.json" in ran.stderr


def test_without_a_file_the_one_in_this_folder_is_read(tmp_path, monkeypatch, result_of):
    monkeypatch.chdir(tmp_path)
    ran = commands.autotune("explain")
    assert ran.exit_code == 2
    assert "autotune.json: no such file" in ran.stderr
    result_of("recommended").save(tmp_path / "autotune.json")
    assert commands.autotune("explain").exit_code == 0
