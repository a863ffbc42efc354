"""Where the time goes, of stages whose cost is known, and what another layout would give."""

from dataclasses import fields, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import CellDataset, Cells, Statistics, open_collection
from cellfeed_tuner import (
    Configuration,
    Estimate,
    Stage,
    StageModel,
    autotune,
    epochs_until_paid,
    measure,
)
from cellfeed_tuner._bottleneck import bottleneck, with_training_step
from cellfeed_tuner._explain import StoreRequest, explain_throughput, sample_store
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._storage_advice import StoreSample, storage_advice

N_CELLS = 100
MODEL = StageModel(cores=2.0, num_workers=0, num_threads=2)
COSTS = {
    "planning": 1e-6,
    "reading": 3e-6,
    "decompressing": 6e-6,
    "placing": 4e-6,
    "making_tensors": 1e-6,
}
MODELS = st.builds(
    StageModel,
    cores=st.floats(0.5, 64.0),
    num_workers=st.integers(0, 16),
    num_threads=st.integers(1, 64),
)


def rounds_of(costs, *, noise=0.0, n_rounds=8, bytes_used=4_000):
    """Make rounds from seconds per cell of each stage, as a dataset would count them."""
    rng = np.random.default_rng(0)
    nothing = Statistics(**{field.name: 0 for field in fields(Statistics)})
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
    one = rounds_of(COSTS, n_rounds=1)  # which is not enough
    assert bottleneck(one, model=MODEL, cells_per_round=N_CELLS, cells_per_second=1.0) is None


@pytest.mark.parametrize("name", [*COSTS, "sending"])
def test_the_stage_that_decides_is_named(name):
    num_workers = 4 if name == "sending" else 0
    model = replace(MODEL, num_workers=num_workers, cores=4.0 * num_workers or 2.0)
    found = found_in(COSTS | {name: 80e-6}, model=model, noise=0.05)
    assert found.kind == name
    assert found.is_certain
    (stage,) = [each for each in found.stages if each.name == name]
    assert stage.saving > 0.7
    assert found.sentence.startswith("Bound by ")
    others = [each.saving for each in found.stages if each.name != name]
    assert max(others) < stage.saving


def test_planning_that_is_hidden_behind_decompression_saves_nothing():
    model = StageModel(cores=8.0, num_workers=0, num_threads=2)
    found = found_in(COSTS | {"decompressing": 60e-6, "planning": 25e-6}, model=model)
    (planning,) = [each for each in found.stages if each.name == "planning"]
    assert (found.kind, planning.saving) == ("decompressing", 0.0)


def test_nothing_is_named_where_nothing_stands_out():
    model = StageModel(cores=1000.0, num_workers=0, num_threads=1)
    costs = {"planning": 6.5e-6, "reading": 1e-6, "decompressing": 3e-6, "placing": 3e-6,
             "making_tensors": 7e-6}  # fmt: skip
    found = found_in(costs, model=model)
    assert found.kind == "nothing"
    assert "No stage dominates" in found.sentence
    # Of two that are alike, neither is named with confidence.
    found = found_in(COSTS | {"decompressing": 40e-6, "placing": 40e-6}, noise=0.3, n_rounds=4)
    assert not found.is_certain
    assert not found.sentence.startswith("Bound")


def test_stages_that_do_not_add_up_to_the_time_are_no_certainty():
    found = found_in(COSTS | {"decompressing": 80e-6}, share=0.5)
    assert found.accounted == pytest.approx(0.5)
    assert found.sentence.startswith("Possibly bound")
    assert "The stages explain only 50% of the time." in found.sentence
    # Threads that wait for processors take more than all of the time.
    found = found_in(COSTS | {"decompressing": 80e-6}, share=2.0)
    assert found.measured_seconds_per_cell < 40e-6
    assert "decompression: 40.0 us per cell." in found.sentence
    assert "threads waited for the CPU" in found.sentence
    # In two workers side by side, half of it for each cell that comes out.
    model = StageModel(cores=4.0, num_workers=2, num_threads=2)
    found = found_in(COSTS | {"decompressing": 80e-6}, model=model)
    assert "decompression: 20.0 of " in found.sentence


@given(
    costs=st.fixed_dictionaries(dict.fromkeys(COSTS, st.floats(1e-8, 1e-3))),
    step=st.floats(1e-8, 1e-3),
    share=st.floats(0.1, 10.0),
    model=MODELS,
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


def test_a_training_step_that_is_slower_than_the_loader_is_the_bottleneck():
    found = found_in(COSTS | {"decompressing": 80e-6})
    slow = with_training_step(found, 100e-6)
    assert slow.kind == "training"
    assert slow.measured_seconds_per_cell == found.measured_seconds_per_cell
    # A step that was slower leaves no trace.
    assert with_training_step(slow, 1e-6) == with_training_step(found, 1e-6)
    fast = with_training_step(found, 1e-6)
    assert (fast.kind, fast.is_certain) == ("decompressing", found.is_certain)
    assert fast.measured_seconds_per_cell == found.measured_seconds_per_cell
    # Another step takes the place of the one before.
    assert [each.name for each in with_training_step(slow, 1e-6).stages].count("training") == 1


STORE = StoreSample(encode_seconds=20e-6, decode_seconds=4e-6, stored_bytes=3_000.0)


@cache
def bound(*, decompression=70.0, others=10.0, amplified=1.0):
    """One thread on one core, so that stages add up; so many bytes are decompressed in vain."""
    found = found_in(
        {"decompressing": 1e-6 * decompression, "placing": 1e-6 * others},
        model=StageModel(cores=1.0, num_workers=0, num_threads=1),
    )
    return replace(
        found, stored_bytes=6_000.0, decoded_bytes=amplified * 18_000.0, useful_bytes=18_000.0
    )


def advice_on(found, store=STORE):
    return storage_advice(found, store, SETTINGS, 1024, n_cells=1_000_000)


def test_loading_is_advised_first_if_there_is_memory_and_it_pays():
    store = replace(STORE, loaded_seconds=8e-6, loaded_bytes=9_000.0, available_bytes=9_040_000_000)
    others = advice_on(bound())
    assert others
    first, *also = advice_on(bound(), store=store)
    assert tuple(also) == others
    assert first.sentence == (
        "Loaded cells (9.0 GB of 9.0 GB of available memory) would be at least 10.0x as fast: "
        "`collection.load()`"
    )
    assert advice_on(bound(), store=replace(store, available_bytes=8_999_999_999)) == others
    assert advice_on(bound(), store=replace(store, loaded_seconds=70e-6)) == others
    # Read in turns with loaded cells, files were faster than when they were timed.
    (quiet, *_) = advice_on(bound(), store=replace(store, read_seconds=32e-6))
    assert quiet.least_speedup == pytest.approx(4)
    assert advice_on(bound(), store=replace(store, read_seconds=8e-6)) == others
    unknown = replace(bound(), decoded_bytes=0.0, useful_bytes=0.0)
    assert [each.action for each in advice_on(unknown, store=store)] == ["load"]


def with_stages(found, **stages):
    """Replace what stages take, in microseconds: the mean and the ends of its interval."""
    names: Any = stages
    made = (
        Stage(name=name, seconds_per_cell=Estimate(*(1e-6 * each for each in ends)), saving=0.5)
        for name, ends in names.items()
    )
    return replace(found, stages=tuple(made))


def test_what_a_shuffled_copy_gives_at_least():
    (advice,) = advice_on(bound())
    assert advice.least_speedup == pytest.approx(80 / (4 * (1 + 63 / 1024) + 10), rel=0.01)
    assert "in blocks of 1,024, would be at least 5.6x as fast" in advice.sentence
    # Written in three times what an epoch and encoding take, of which 4.6 of 5.6 is then saved.
    assert advice.epochs_until_paid == 5 == np.ceil(3 * (80 + 20) / (80 - 80 / 5.6))
    assert advice.sentence.endswith("worth writing for 5 epochs or more.")


@given(conversion=st.floats(0.1, 1e4), now=st.floats(0.1, 1e3), share=st.floats(0.01, 0.99))
def test_epochs_until_a_conversion_is_paid(conversion, now, share):
    times = {"conversion_seconds": conversion, "epoch_seconds": now}
    n = epochs_until_paid(**times, epoch_seconds_then=now * share)
    assert n is not None
    assert conversion + n * now * share <= n * now * (1 + 1e-9)
    assert n == 1 or conversion + (n - 1) * now * share > (n - 1) * now * (1 - 1e-9)
    assert epochs_until_paid(**times, epoch_seconds_then=now) is None


THEN = 4 * (1 + 63 / 1024)  # decompression of a shuffled copy, in microseconds


@pytest.mark.parametrize(
    ("measured", "stages", "least"),
    [
        # Of 100 us, 20 that no stage explains stay.
        (100, {}, 100 / (THEN + 10 + 20)),
        # Stages that threads waited in are as slow in the copy.
        (40, {}, 80 / (THEN + 10)),
        # Stages count with the end of their interval that promises less.
        (80, {"decompressing": (70, 60, 80), "placing": (10, 8, 12)}, 80 / (THEN + 12 + 8)),
    ],
)
def test_what_is_not_explained_is_not_saved(measured, stages, least):
    found = replace(bound(), measured_seconds_per_cell=1e-6 * measured)
    (advice,) = advice_on(with_stages(found, **stages) if stages else found)
    assert advice.least_speedup == pytest.approx(least)


MICROSECONDS = st.floats(0.01, 1_000.0)


@given(
    seconds=st.fixed_dictionaries(dict.fromkeys(COSTS, MICROSECONDS)),
    measured=MICROSECONDS,
    stored=st.floats(1.0, 10_000.0),
    model=MODELS,
)
def test_no_promise_exceeds_what_the_changed_stages_take(seconds, measured, stored, model):
    found = replace(
        with_stages(bound(amplified=3.0), **{name: (each,) * 3 for name, each in seconds.items()}),
        model=model,
        measured_seconds_per_cell=1e-6 * measured,
    )
    changed = sum(
        model.seconds_per_cell({name: seconds[name]}) for name in ("reading", "decompressing")
    )
    whole = max(measured, model.seconds_per_cell(seconds))
    for advice in advice_on(found, store=replace(STORE, stored_bytes=stored)):
        assert advice.least_speedup >= 1.2
        if changed < whole:
            assert advice.least_speedup <= whole / (whole - changed) * (1 + 1e-9)


@pytest.mark.parametrize(
    "found",
    [
        bound(decompression=5.0, others=75.0),
        # Stages that differ from round to round.
        with_stages(bound(), decompressing=(70, 2, 138), placing=(10, 10, 10)),
        # What the library of a format reads.
        replace(bound(), decoded_bytes=0.0, useful_bytes=0.0),
    ],
    ids=["bound by something else", "uncertain", "library"],
)
def test_where_it_does_not_matter_nothing_is_said(found):
    assert advice_on(bound())
    assert advice_on(found) == ()


BATCH_SIZE = 32
SETTINGS = Configuration(block_size=16, fetch_factor=4)


@pytest.mark.parametrize(
    ("layout", "column_bytes"), [(np.asarray, 0), (sp.csr_array, 2)], ids=["dense", "sparse"]
)
def test_a_sample_of_noise_takes_as_many_bytes_as_it_has(layout, column_bytes):
    """Values that cannot be compressed are stored as they are; columns can, and take no more."""
    n_cells, n_vars = 64, 1_000
    noise = np.random.default_rng(0).integers(1, 2**31, (n_cells, n_vars)).astype(np.int32)
    minibatch = Cells({"X": layout(noise)}, {}, np.arange(n_cells)).to_torch()
    sample = sample_store([minibatch], n_vars)
    most = (noise.itemsize + column_bytes) * n_vars
    assert noise.itemsize * n_vars < sample.stored_bytes < 1.01 * most
    assert sample.decode_seconds > 0


def explained(process, measured, *, step_seconds=None, seconds=600.0):
    return explain_throughput(
        process,
        measured,
        batch_size=BATCH_SIZE,
        cells_per_second=10_000.0,
        step_seconds=step_seconds,
        n_cells=N_CELLS,
        block_sizes=(1, 16, 65_536),
        seconds=seconds,
        seed=0,
    )


def test_a_choice_is_explained_by_a_sample_read_with_all_its_settings(
    small_collection, monkeypatch
):
    made, sampled = list[tuple[Any, Any]](), list[StoreSample]()

    def make(*arguments, **settings):
        made.append((arguments, settings))
        return CellDataset(*arguments, **settings)

    class Here:
        """A process that measures in this one."""

        def run(self, request, limit_seconds):
            request.run(collection, sampled.append)
            assert limit_seconds == 600.0
            fast = [replace(each, decode_seconds=1e-6) for each in sampled]  # on any machine
            return SimpleNamespace(events=fast)

    monkeypatch.setattr("cellfeed_tuner._explain.CellDataset", make)
    collection = open_collection(small_collection)
    measured = SimpleNamespace(
        configuration=SETTINGS.changed(align="chunks", num_threads=1),
        num_threads=1,
        num_function_threads=0,
        cells_per_round=N_CELLS,
        round_statistics=rounds_of(COSTS | {"decompressing": 80e-6}),
    )
    found, advice = explained(Here(), measured)
    assert found is not None
    assert found.measured_seconds_per_cell == pytest.approx(1e-4)
    assert (found.kind, found.model.num_workers) == ("decompressing", 0)
    assert [type(each) for each in sampled] == [StoreSample]
    assert [each.block_size for each in advice if each.action == "preshuffle"] == [16]
    (arguments, options), (of_files, same), (of_loaded, as_before) = made
    assert arguments[1].align == "chunks"
    assert options["read_options"].num_threads == 1
    assert not of_files[0].loaded_bytes
    assert of_loaded[0].loaded_bytes > 0
    assert of_files[1] is of_loaded[1]
    assert same == as_before == options
    assert sampled[0].loaded_seconds is not None
    assert sampled[0].loaded_seconds > 0
    n_values = collection.mean_row_lengths["X"]
    assert sampled[0].loaded_bytes == pytest.approx(3 * n_values + 8, rel=0.5)
    slow, advice = explained(Here(), measured, step_seconds=10.0, seconds=0.0)
    assert slow is not None
    assert (slow.kind, advice) == ("training", ())
    measured.round_statistics = ()
    assert explained(Here(), measured) == (None, ())


@pytest.mark.slow
@pytest.mark.process
def test_every_measured_round_has_counted_a_fetch(small_collection):
    collection = open_collection(small_collection)
    measured = measure(collection, SETTINGS, batch_size=BATCH_SIZE, seconds=0.1)
    rounds = measured.round_statistics
    assert len(rounds) == len(measured.round_seconds) >= 8
    for each in rounds:
        assert each.n_minibatches == 4
        assert each.n_cells == 4 * BATCH_SIZE
    together = sum(rounds[1:], rounds[0])
    assert 0 < together.bytes_used <= together.bytes_decompressed
    for stage in COSTS:
        assert getattr(together, stage) > 0
    # What the dataset counts as waiting lies within what the loop waited for its minibatches.
    assert 0 < together.waiting <= sum(measured.round_waiting_seconds)
    with MeasuringProcess(collection) as process:
        process.start()
        found, _ = explained(process, measured)
        request = StoreRequest(configuration=SETTINGS, batch_size=BATCH_SIZE, seed=0)
        outcome = process.run(request, limit_seconds=600.0)
    assert found is not None
    assert [type(each) for each in outcome.events] == [StoreSample]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("short_replicates")
def test_autotune_explains_its_choice(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    result = autotune(
        collection, label="plate", batch_size=BATCH_SIZE, block_sizes=[1], fetch_factors=[4],
        workers=[0], budget=600.0, entropy_floor=0.0,
    )  # fmt: skip
    assert result.recommended is not None
    assert result.bottleneck is not None
    assert result.recommended.cells_per_second is not None
    assert result.bottleneck.measured_seconds_per_cell == pytest.approx(
        1 / result.recommended.cells_per_second.value
    )
    assert {each.name for each in result.bottleneck.stages} >= {"planning", "decompressing"}
    assert result.dataset.elements == ("X",)
