"""Naming the bottleneck, of stages whose cost is known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed_tuner._explain._bottleneck import bottleneck, with_training_step
from cellfeed_tuner._explain._stage_model import StageModel
from cellfeed_tuner._explain._stage_times import StageRound

N_CELLS = 100
MODEL = StageModel(cores=2.0, n_workers=0, n_threads=2)
COSTS = {
    "planning": 1e-6,
    "disk": 2e-6,
    "page cache": 1e-6,
    "decompression": 3e-6,
    "memory": 2e-6,
    "transform": 1e-6,
}


def rounds_of(costs, *, noise=0.0, n_rounds=8, library=False, warm=False):
    """Make rounds from seconds per cell of each stage, as clocks would show them."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(n_rounds):
        took = {
            name: N_CELLS * cost * (1 + noise * rng.standard_normal())
            for name, cost in costs.items()
        }
        cached = took.get("page cache", 0.0)
        decompressed = cached + took.get("decompression", 0.0)
        read = took["reading"] if library else decompressed + took["memory"]
        made.append(
            StageRound(
                n_cells=N_CELLS,
                planned=took["planning"],
                cold_bytes=None if library or warm else cached + took["disk"],
                cached_bytes=None if library else cached,
                decompressed=None if library else decompressed,
                cold_read=read + took["disk"] if library and not warm else None,
                read=read,
                to_minibatches=took["transform"],
                stored_bytes=0 if library else 1_000,
                decoded_bytes=0 if library else 6_000,
                useful_bytes=0 if library else 4_000,
            )
        )
    return made


def found_in(costs, *, model=MODEL, share=1.0, transfer=(), **options):
    speed = share / model.seconds_per_cell(costs)
    found = bottleneck(
        rounds_of(costs, **options), model=model, cells_per_second=speed, transfer_seconds=transfer
    )
    assert found is not None
    return found


def test_stages_are_what_one_takes_longer_than_the_one_before():
    found = found_in(COSTS)
    assert found.seconds == pytest.approx(COSTS)
    assert found.accounted == pytest.approx(1.0)
    assert found.read_amplification == pytest.approx(1.5)
    assert (found.stored_bytes, found.n_rounds) == (10.0, 8)


@pytest.mark.parametrize(
    ("name", "seconds", "share"),
    [
        ("planning", 40e-6, 0.8),
        ("disk", 40e-6, 0.8),
        ("page cache", 40e-6, 0.8),
        ("decompression", 40e-6, 0.8),
        ("memory", 40e-6, 0.8),
        ("transform", 40e-6, 0.8),
    ],
)
def test_the_stage_that_decides_is_named(name, seconds, share):
    found = found_in(COSTS | {name: seconds}, noise=0.05)
    assert found.kind == name
    assert found.confidence == 1.0
    (stage,) = [each for each in found.stages if each.name == name]
    assert stage.saving > share - 0.1
    assert found.sentence.startswith("Clearly bound by ")
    others = [each.saving for each in found.stages if each.name != name]
    assert max(others) < stage.saving


def test_a_disk_that_is_hidden_behind_decompression_saves_nothing():
    found = found_in(COSTS | {"decompression": 30e-6, "disk": 25e-6})
    (disk,) = [each for each in found.stages if each.name == "disk"]
    assert (found.kind, disk.saving) == ("decompression", 0.0)


def test_transfer_is_named_where_workers_wait_for_it():
    model = StageModel(cores=16.0, n_workers=4, n_threads=4)
    costs = COSTS | {"transfer": 30e-6}
    found = found_in(costs, model=model, transfer=[29e-6, 31e-6])
    assert found.kind == "transfer"
    assert found.seconds["transfer"] == pytest.approx(30e-6)


def test_nothing_is_named_where_nothing_stands_out():
    model = StageModel(cores=1000.0, n_workers=0, n_threads=1)
    costs = {"planning": 5e-6, "disk": 1e-6, "page cache": 1e-6, "decompression": 3e-6,
             "memory": 2e-6, "transform": 7e-6}  # fmt: skip
    found = found_in(costs, model=model)
    assert found.kind == "nothing"
    assert "No stage stands out" in found.sentence


def test_two_that_are_alike_are_not_told_apart_with_confidence():
    found = found_in(COSTS | {"decompression": 20e-6, "memory": 20e-6}, noise=0.3, n_rounds=4)
    assert found.confidence < 0.95
    assert not found.sentence.startswith("Clearly")


def test_stages_that_explain_half_of_the_time_are_no_certainty():
    found = found_in(COSTS | {"decompression": 40e-6}, share=0.5)
    assert found.accounted == pytest.approx(0.5)
    assert found.sentence.startswith("Perhaps")
    assert "the stages explain 50% of the time only" in found.sentence


def test_a_stage_takes_no_more_than_all_of_the_time():
    found = found_in(COSTS | {"decompression": 40e-6}, share=2.0)
    assert found.measured_seconds_per_cell < 40e-6
    assert "timed alone, it takes 40.0 [40.0, 40.0] us for each cell." in found.sentence
    assert "the machine was busier when they were timed" in found.sentence
    # In two workers side by side, half of it for each cell that comes out.
    model = StageModel(cores=4.0, n_workers=2, n_threads=2)
    found = found_in(COSTS | {"decompression": 40e-6}, model=model, transfer=[1e-6, 1e-6])
    assert "it takes 20.0 [20.0, 20.0] us of the " in found.sentence


@given(
    costs=st.fixed_dictionaries(dict.fromkeys(COSTS, st.floats(1e-8, 1e-3))),
    transfer=st.floats(1e-8, 1e-3),
    step=st.floats(1e-8, 1e-3),
    share=st.floats(0.1, 10.0),
    model=st.builds(
        StageModel,
        cores=st.floats(0.5, 64.0),
        n_workers=st.integers(0, 16),
        n_threads=st.integers(1, 64),
    ),
)
@settings(max_examples=50, deadline=None)
def test_no_stage_saves_more_than_it_takes(costs, transfer, step, share, model):
    """If a stage takes t of T, cells come T / (T - t) times as fast without it at most."""
    found = found_in(
        costs, model=model, share=share, n_rounds=2,
        transfer=[transfer, transfer] if model.n_workers else (),
    )  # fmt: skip
    for each in (found, with_training_step(found, step)):
        for stage in each.stages:
            part = model.seconds_per_cell({stage.name: stage.seconds_per_cell.value})
            assert 0 <= stage.saving <= min(1.0, part / each.measured_seconds_per_cell) + 1e-9


def test_cached_files_have_no_disk():
    assert "disk" not in found_in(COSTS, warm=True).seconds


def test_what_the_library_reads_is_not_told_apart():
    costs = {"planning": 1e-6, "disk": 2e-6, "reading": 50e-6, "transform": 1e-6}
    found = found_in(costs, library=True)
    assert found.kind == "reading"
    assert found.seconds == pytest.approx(costs)
    assert found.read_amplification is None
    assert "not told apart" in found.sentence


def test_one_round_is_not_enough():
    one = rounds_of(COSTS, n_rounds=1)
    assert bottleneck(one, model=MODEL, cells_per_second=1.0) is None


def test_a_training_step_that_is_slower_than_the_loader_is_the_bottleneck():
    found = found_in(COSTS | {"decompression": 40e-6})
    slow = with_training_step(found, 100e-6)
    assert slow.kind == "consumer"
    assert slow.measured_seconds_per_cell == 100e-6
    fast = with_training_step(found, 1e-6)
    assert (fast.kind, fast.confidence) == ("decompression", found.confidence)
    assert fast.measured_seconds_per_cell == found.measured_seconds_per_cell
    # Another step takes the place of the one before.
    assert [each.name for each in with_training_step(slow, 1e-6).stages].count("consumer") == 1
