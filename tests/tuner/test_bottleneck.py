"""Naming the bottleneck, of stages whose cost is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import Statistics
from cellfeed._decode import Counter
from cellfeed_tuner import StageModel
from cellfeed_tuner._bottleneck import bottleneck, with_training_step

N_CELLS = 100
MODEL = StageModel(cores=2.0, n_workers=0, n_threads=2)
COSTS = {
    "planning": 1e-6,
    "reading": 3e-6,
    "decompressing": 6e-6,
    "placing": 4e-6,
    "making_tensors": 1e-6,
}


def rounds_of(costs, *, noise=0.0, n_rounds=8, bytes_used=4_000):
    """Make rounds from seconds per cell of each stage, as a dataset would count them."""
    rng = np.random.default_rng(0)
    nothing = Statistics.of(np.zeros(len(Counter), np.int64))
    rounds = []
    for _ in range(n_rounds):
        counted = {
            name: N_CELLS * cost * (1 + noise * rng.standard_normal())
            for name, cost in costs.items()
        }
        some_bytes = {"bytes_read": 1_000, "bytes_decompressed": 6_000, "bytes_used": bytes_used}
        rounds.append(replace(nothing, **(counted | (some_bytes if bytes_used else {}))))
    return rounds


def found_in(costs, *, model=MODEL, share=1.0, **options):
    found = bottleneck(
        rounds_of(costs, **options),
        model=model,
        cells_per_round=N_CELLS,
        cells_per_second=share / model.seconds_per_cell(costs),
    )
    assert found is not None
    return found


def test_stages_are_what_threads_were_busy_with():
    found = found_in(COSTS)
    assert found.seconds == pytest.approx(COSTS)
    assert found.accounted == pytest.approx(1.0)
    assert found.read_amplification == pytest.approx(1.5)
    assert (found.stored_bytes, found.n_rounds) == (10.0, 8)


@pytest.mark.parametrize("name", list(COSTS))
def test_the_stage_that_decides_is_named(name):
    found = found_in(COSTS | {name: 80e-6}, noise=0.05)
    assert found.kind == name
    assert found.confidence == 1.0
    (stage,) = [each for each in found.stages if each.name == name]
    assert stage.saving > 0.7
    assert found.sentence.startswith("Bound by ")
    others = [each.saving for each in found.stages if each.name != name]
    assert max(others) < stage.saving


def test_planning_that_is_hidden_behind_decompression_saves_nothing():
    model = StageModel(cores=8.0, n_workers=0, n_threads=2)
    found = found_in(COSTS | {"decompressing": 60e-6, "planning": 25e-6}, model=model)
    (planning,) = [each for each in found.stages if each.name == "planning"]
    assert (found.kind, planning.saving) == ("decompressing", 0.0)


def test_sending_is_named_where_workers_are_busy_with_it():
    model = StageModel(cores=16.0, n_workers=4, n_threads=4)
    found = found_in(COSTS | {"sending": 30e-6}, model=model)
    assert found.kind == "sending"
    assert found.seconds["sending"] == pytest.approx(30e-6)


def test_nothing_is_named_where_nothing_stands_out():
    model = StageModel(cores=1000.0, n_workers=0, n_threads=1)
    costs = {"planning": 6.5e-6, "reading": 1e-6, "decompressing": 3e-6, "placing": 3e-6,
             "making_tensors": 7e-6}  # fmt: skip
    found = found_in(costs, model=model)
    assert found.kind == "nothing"
    assert "No stage dominates" in found.sentence


def test_two_that_are_alike_are_not_told_apart_with_confidence():
    found = found_in(COSTS | {"decompressing": 40e-6, "placing": 40e-6}, noise=0.3, n_rounds=4)
    assert found.confidence < 0.95
    assert not found.sentence.startswith("Bound")


def test_stages_that_explain_half_of_the_time_are_no_certainty():
    found = found_in(COSTS | {"decompressing": 80e-6}, share=0.5)
    assert found.accounted == pytest.approx(0.5)
    assert found.sentence.startswith("Possibly bound")
    assert "The stages explain only 50% of the time." in found.sentence


def test_threads_that_wait_for_processors_take_more_than_all_of_the_time():
    found = found_in(COSTS | {"decompressing": 80e-6}, share=2.0)
    assert found.measured_seconds_per_cell < 40e-6
    assert "decompression: 40.0 [40.0, 40.0] us per cell." in found.sentence
    assert "threads waited for the CPU" in found.sentence
    # In two workers side by side, half of it for each cell that comes out.
    model = StageModel(cores=4.0, n_workers=2, n_threads=2)
    found = found_in(COSTS | {"decompressing": 80e-6}, model=model)
    assert "decompression: 20.0 [20.0, 20.0] us of the " in found.sentence
    assert " us per cell (80.0 us summed over threads)" in found.sentence


@given(
    costs=st.fixed_dictionaries(dict.fromkeys(COSTS, st.floats(1e-8, 1e-3))),
    step=st.floats(1e-8, 1e-3),
    share=st.floats(0.1, 10.0),
    model=st.builds(
        StageModel,
        cores=st.floats(0.5, 64.0),
        n_workers=st.integers(0, 16),
        n_threads=st.integers(1, 64),
    ),
)
def test_no_stage_saves_more_than_it_takes(costs, step, share, model):
    """If a stage takes t of T, cells come T / (T - t) times as fast without it at most."""
    found = found_in(costs, model=model, share=share, n_rounds=2)
    for each in (found, with_training_step(found, step)):
        for stage in each.stages:
            part = model.seconds_per_cell({stage.name: stage.seconds_per_cell.value})
            assert 0 <= stage.saving <= min(1.0, part / each.measured_seconds_per_cell) + 1e-9


def test_what_the_library_reads_is_not_told_apart():
    costs = {"planning": 1e-6, "library": 50e-6, "making_tensors": 1e-6}
    found = found_in(costs, bytes_used=0)
    assert found.kind == "library"
    assert found.seconds == pytest.approx(costs)
    assert found.read_amplification is None
    assert "not separated" in found.sentence


def test_one_round_is_not_enough():
    one = rounds_of(COSTS, n_rounds=1)
    assert bottleneck(one, model=MODEL, cells_per_round=N_CELLS, cells_per_second=1.0) is None


def test_a_training_step_that_is_slower_than_the_loader_is_the_bottleneck():
    found = found_in(COSTS | {"decompressing": 80e-6})
    slow = with_training_step(found, 100e-6)
    assert slow.kind == "training"
    assert slow.measured_seconds_per_cell == found.measured_seconds_per_cell
    # A step that was slower leaves no trace.
    assert with_training_step(slow, 1e-6) == with_training_step(found, 1e-6)
    fast = with_training_step(found, 1e-6)
    assert (fast.kind, fast.confidence) == ("decompressing", found.confidence)
    assert fast.measured_seconds_per_cell == found.measured_seconds_per_cell
    # Another step takes the place of the one before.
    assert [each.name for each in with_training_step(slow, 1e-6).stages].count("training") == 1
