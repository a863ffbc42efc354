"""Recording a grid: on a model of a disk, and once on a real one."""

import csv
import json
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from bench.backtest.__main__ import main
from bench.backtest.record import Recorder, Recording
from bench.backtest.recorded_grid import SCHEMA, answered, read_grid
from tests import commands

from cellfeed import FormatError, ParameterError
from cellfeed_tuner import Configuration

GRID = [Configuration(block_size=b, fetch_factor=f) for b in (1, 4, 16) for f in (1, 4)]
BATCH_SIZE, LEAST_ROUNDS = 64, 3
SECONDS = (0.1, 0.3)  # of the rounds, in turns: mean 0.2, relative spread 0.1 sqrt(2) / 0.2
run = partial(commands.run, main, "record")
RANGES = ["--block-sizes", "1:4096", "--fetch-factors", "1:512", "--workers", "0,2"]
COMMON = {
    "batch_size": BATCH_SIZE,
    "labels": ("plate",),
    "cache": "cold",
    "seed": 0,
    "least_rounds": LEAST_ROUNDS,
}
FACTS = {"schema": SCHEMA, "label": "plate", "seed": 0}


@dataclass
class ModelProcess:
    """Answers at once; its clock goes on as if it had worked. May be interrupted, or fail."""

    interrupted_at: int = -1
    failing: Configuration | None = None
    slow: Configuration | None = None
    now: float = 0.0
    asked: list[Any] = field(default_factory=list)

    def clock(self) -> float:
        return self.now

    def run(self, request: Any, *, limit_seconds: float) -> Any:
        if len(self.asked) == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append(request)
        configuration = request.configuration
        n_rounds = request.least_rounds + (1 if configuration != self.slow else -1)
        self.now += 1.0
        return answered(
            [9.0, *(SECONDS[number % 2] for number in range(n_rounds))],
            peak_memory_bytes=configuration.fetch_factor,
            failure="no memory" if configuration == self.failing else None,
        )


@pytest.fixture
def record_with(tmp_path):
    """Records with a process, and returns what the files say."""

    def record(process, *, n_runs=2, facts=FACTS):
        files = Recording.open(tmp_path / "grid.csv", facts, ["label", "seed"])
        recorder = Recorder(
            process=process,
            recording=files,
            entropies={(each.block_size, each.fetch_factor): each.block_size / 8 for each in GRID},
            common=COMMON,
            clock=process.clock,
        )
        try:
            recorder.measure(GRID, n_runs)
        finally:
            rows = list(csv.DictReader((tmp_path / "grid.csv").read_text().splitlines()))
            beside = json.loads((tmp_path / "grid.json").read_text())
        return files, rows, beside

    return record


def settings_of(row):
    return Configuration(block_size=int(row["block_size"]), fetch_factor=int(row["fetch_factor"]))


def test_every_configuration_is_measured_in_every_run(record_with):
    process = ModelProcess()
    files, rows, beside = record_with(process)
    assert Counter((int(row["run"]), settings_of(row)) for row in rows) == Counter(
        (run, each) for run in range(2) for each in GRID
    )
    for row in rows:
        each = settings_of(row)
        assert float(row["cells_per_second"]) == each.fetch_factor * BATCH_SIZE / 0.2
        assert float(row["entropy_bits"]) == each.block_size / 8
        assert int(row["n_rounds"]) == 4
        # Of 0.1, 0.3, 0.1, 0.3 s.
        assert float(row["round_spread"]) == pytest.approx(math.sqrt(4 / 3) * 0.5, abs=1e-4)
        assert int(row["peak_memory_bytes"]) == each.fetch_factor
    assert files.seconds == len(rows) == beside["sittings"][0]["seconds"]


def test_runs_are_in_other_orders_and_read_other_rows(record_with):
    process = ModelProcess()
    record_with(process)
    first, second = process.asked[: len(GRID)], process.asked[len(GRID) :]
    orders = [[each.configuration for each in run] for run in (first, second)]
    assert orders[0] != orders[1] != GRID != orders[0]
    assert len({each.first_epoch for each in process.asked}) == 2 * len(GRID)


@pytest.mark.parametrize("n_measured", [0, 4, len(GRID) + 1])
def test_what_was_interrupted_is_taken_up(record_with, tmp_path, n_measured):
    with pytest.raises(KeyboardInterrupt):
        record_with(ModelProcess(interrupted_at=n_measured))
    kept = (tmp_path / "grid.csv").read_text()
    assert len(kept.splitlines()) == 1 + n_measured
    process = ModelProcess()
    files, rows, beside = record_with(process)
    assert (tmp_path / "grid.csv").read_text().startswith(kept)
    assert len(process.asked) == 2 * len(GRID) - n_measured
    assert len({(row["run"], settings_of(row)) for row in rows}) == len(rows) == 2 * len(GRID)
    assert [each["n_measured"] for each in beside["sittings"]] == [n_measured, len(process.asked)]
    assert files.seconds == 2 * len(GRID)


def test_more_runs_are_added_to_what_there_is(record_with):
    record_with(ModelProcess(), n_runs=1)
    process = ModelProcess()
    _, rows, _ = record_with(process, n_runs=3)
    assert len(process.asked) == 2 * len(GRID)
    assert Counter(row["run"] for row in rows) == dict.fromkeys("012", len(GRID))


@pytest.mark.parametrize(
    ("process", "why"),
    [
        (ModelProcess(failing=GRID[2]), "no memory"),
        (ModelProcess(slow=GRID[2]), "not enough samples"),
    ],
)
def test_what_fails_is_left_out_and_named_and_not_tried_again(record_with, process, why):
    _, rows, beside = record_with(process)
    assert GRID[2] not in {settings_of(row) for row in rows}
    assert [each.configuration for each in process.asked].count(GRID[2]) == 1
    (left_out,) = beside["left_out"]
    assert why in left_out["why"]
    assert (left_out["block_size"], left_out["fetch_factor"]) == (4, 1)


def test_a_recording_of_something_else_is_not_taken_up(record_with):
    record_with(ModelProcess())
    with pytest.raises(ParameterError, match=r"another label \(plate, now drug\); delete it"):
        record_with(ModelProcess(), facts=FACTS | {"label": "drug"})


def test_a_file_of_another_kind_is_left_alone(record_with, tmp_path):
    (tmp_path / "grid.csv").write_text("mine\n")
    with pytest.raises(ParameterError, match=r"no grid\.json beside it"):
        record_with(ModelProcess())
    assert (tmp_path / "grid.csv").read_text() == "mine\n"


def test_a_damaged_recording_is_refused(record_with, tmp_path):
    record_with(ModelProcess())
    (tmp_path / "grid.csv").write_text("run,block_size\n0,one\n")
    with pytest.raises(FormatError, match="not a recording"):
        record_with(ModelProcess())
    (tmp_path / "grid.json").write_text("{}")
    with pytest.raises(FormatError, match=f"its schema is not {SCHEMA}"):
        record_with(ModelProcess())


@pytest.mark.process
@pytest.mark.smoke
def test_the_command_records_a_collection_that_can_be_replayed(small_collection, tmp_path):
    output = tmp_path / "grid.csv"
    grid = ["--block-sizes", "1,4", "--fetch-factors", "2,128", "--workers", "0:0", "--runs", "2"]
    printed = run(small_collection, "--label", "plate", "--out", output, *grid)
    assert printed.exit_code == 0, printed.output
    assert "Measured 2 of 4 configurations, 2 times each, in " in printed.stdout
    assert "Left out: 2 (too few cells)" in printed.stdout
    assert "Run 2 of 2" in printed.stderr
    facts = json.loads(output.with_suffix(".json").read_text())
    assert facts["dataset"]["codecs"] == ["gzip 4"]
    assert facts["dataset"]["n_files"] == 3
    assert facts["machine"]["cpu"]["usable_cores"] > 0
    assert str(small_collection) not in output.with_suffix(".json").read_text()
    recorded = read_grid(output)
    assert recorded.n_cells == facts["dataset"]["n_cells"]
    assert [each.block_size for each in recorded.configurations] == [1, 4]
    assert [each.size for each in recorded.runs] == [2, 2]
    # Random rows of three plates of one size.
    assert recorded.entropies[0] == pytest.approx(recorded.random_entropy, abs=0.02)
    again = run(small_collection, "--label", "plate", "--out", output, *grid)
    assert again.exit_code == 0
    assert read_grid(output).runs[0].tolist() == recorded.runs[0].tolist()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--label", "plate"], "Missing option '--out'"),
        (["--label", "nope", "--out", "{folder}/grid.csv"], "has no column 'nope'"),
        (["--label", "plate", "--out", "{folder}/no/grid.csv"], "No such file"),
        (["--label", "plate", "--out", "{folder}/grid.csv", "--runs", "0"], "Invalid value"),
        (
            ["--label", "plate", "--out", "{folder}/grid.csv", "--fetch-factors", "4096"],
            "even the smallest configuration needs",
        ),
        (
            ["--label", "plate", "--out", "{folder}/grid.csv", *RANGES],
            "every configuration is measured, 2,000 at most, but these are 4,194,304; give fewer",
        ),
    ],
)
def test_mistakes_are_one_error_and_exit_code_2(small_collection, tmp_path, arguments, said):
    printed = run(small_collection, *(each.format(folder=tmp_path) for each in arguments))
    assert printed.exit_code == 2
    assert said in printed.stderr
    assert "Traceback" not in printed.stderr
