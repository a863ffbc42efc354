"""What another layout would give, against counting and arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed_tuner import Bottleneck, Configuration, Estimate, Stage, StageModel, epochs_until_paid
from cellfeed_tuner._bottleneck import StageName
from cellfeed_tuner._explain import (
    StorageLayout,
    StoreSample,
    amplification,
    storage_advice,
)

LAYOUT = StorageLayout(
    n_cells=1_000_000, rows_per_chunk=100.0, batch_size=64, already_shuffled=False
)
BLOCKS_OF_16 = Configuration(block_size=16, fetch_factor=64)
STORE = StoreSample(encode_seconds=20e-6, decode_seconds=4e-6, stored_bytes=3_000.0)
SIZES = (1, 16, 1024, 65_536)


def bound_by_decompression(decompression, others, *, amplified):
    """One thread on one core, so that stages add up; so many bytes are decompressed in vain."""
    costs: dict[StageName, float] = {
        "decompressing": decompression * 1e-6,
        "placing": others * 1e-6,
    }
    return Bottleneck(
        kind="decompressing",
        confidence=1.0,
        stages=tuple(
            Stage(name=name, seconds_per_cell=Estimate(cost, cost, cost), saving=0.5)
            for name, cost in costs.items()
        ),
        model=StageModel(cores=1.0, n_workers=0, n_threads=1),
        measured_seconds_per_cell=sum(costs.values()),
        accounted=1.0,
        n_rounds=8,
        stored_bytes=6_000.0,
        decoded_bytes=amplified * 18_000.0,
        useful_bytes=18_000.0,
    )


@pytest.mark.parametrize(
    ("chunk", "block", "fetch"), [(10, 1, 640), (10, 16, 1024), (100, 16, 64), (7, 50, 3200)]
)
def test_amplification_is_what_counting_gives(chunk, block, fetch):
    n_cells = 70_000
    rng = np.random.default_rng(0)
    n_chunks = []
    for _ in range(200):
        starts = rng.permutation(n_cells // block)[: max(1, fetch // block)] * block
        # Chunks begin anywhere between rows, as those of a list of elements do.
        first = (starts + rng.random()) // chunk
        last = (starts + block - 1 + rng.random()) // chunk
        touched = [np.arange(a, b + 1) for a, b in zip(first, last, strict=True)]
        n_chunks.append(np.unique(np.concatenate(touched)).size)
    counted = np.mean(n_chunks) * chunk / fetch
    assert amplification(n_cells, chunk, block, fetch) == pytest.approx(counted, rel=0.06)


def test_no_cell_is_decompressed_less_than_once():
    assert amplification(1_000, 1.0, 1, 1_000) == 1.0


def test_smaller_chunks_save_what_is_decompressed_in_vain():
    # In chunks of 4, blocks of 16 touch (16 + 4 - 1) / 4 of them; the fetch is but a few rows.
    now, then = 7.0, 19 / 16
    found = bound_by_decompression(70.0, 10.0, amplified=now)
    advice = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    rechunk = next(each for each in advice if each.action == "rechunk")
    assert rechunk.rows_per_chunk == 4
    assert rechunk.least_speedup == pytest.approx(80 / (70 * then / now + 10), rel=0.01)
    assert rechunk.sentence.startswith(
        "Files with about 4 cells per chunk would give at least 3.6x the throughput"
    )


def test_a_shuffled_copy_is_read_in_the_largest_blocks_that_fit_a_fetch():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    (advice,) = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    assert (advice.action, advice.block_size) == ("preshuffle", 1024)
    assert advice.least_speedup == pytest.approx(80 / (4 * (1 + 63 / 1024) + 10), rel=0.01)
    assert "in blocks of 1,024 and give at least 5.6x the throughput" in advice.sentence
    # Written in three times what an epoch and encoding take, of which 4.6 of 5.6 is then saved.
    assert advice.epochs_until_paid == 5 == np.ceil(3 * (80 + 20) / (80 - 80 / 5.6))
    assert advice.sentence.endswith("Writing it pays off within 5 epochs.")


@given(conversion=st.floats(0.1, 1e4), now=st.floats(0.1, 1e3), share=st.floats(0.01, 0.99))
def test_epochs_until_a_conversion_is_paid(conversion, now, share):
    times = {"conversion_seconds": conversion, "epoch_seconds": now}
    n = epochs_until_paid(**times, epoch_seconds_then=now * share)
    assert n is not None
    assert conversion + n * now * share <= n * now * (1 + 1e-9)
    assert n == 1 or conversion + (n - 1) * now * share > (n - 1) * now * (1 - 1e-9)
    assert epochs_until_paid(**times, epoch_seconds_then=now) is None


@pytest.mark.parametrize(
    ("measured", "least"),
    [
        # Of 100 us, 20 that no stage explains stay.
        (100e-6, 100 / (4 * (1 + 63 / 1024) + 10 + 20)),
        # Stages that threads waited in are as slow in the copy.
        (40e-6, 80 / (4 * (1 + 63 / 1024) + 10)),
    ],
)
def test_time_that_no_stage_explains_is_not_saved(measured, least):
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    found = replace(found, measured_seconds_per_cell=measured)
    (advice,) = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    assert advice.least_speedup == pytest.approx(least)


microseconds = st.floats(0.01, 1_000.0)


@given(
    seconds=st.fixed_dictionaries(
        dict.fromkeys(
            ("planning", "reading", "decompressing", "placing", "making_tensors"), microseconds
        )
    ),
    measured=microseconds,
    stored=st.floats(1.0, 10_000.0),
    model=st.builds(
        StageModel,
        cores=st.floats(0.5, 64.0),
        n_workers=st.integers(0, 16),
        n_threads=st.integers(1, 64),
    ),
)
def test_no_promise_exceeds_what_the_changed_stages_take(seconds, measured, stored, model):
    found = bound_by_decompression(1.0, 1.0, amplified=3.0)
    found = replace(
        found,
        stages=tuple(
            Stage(name=name, seconds_per_cell=Estimate(each, each, each), saving=0.0)
            for name, each in seconds.items()
        ),
        model=model,
        measured_seconds_per_cell=measured,
    )
    changed = sum(
        model.seconds_per_cell({name: seconds[name]}) for name in ("reading", "decompressing")
    )
    whole = max(measured, model.seconds_per_cell(seconds))
    for advice in storage_advice(
        found, BLOCKS_OF_16, LAYOUT, replace(STORE, stored_bytes=stored), SIZES
    ):
        assert advice.least_speedup >= 1.2
        if changed < whole:
            assert advice.least_speedup <= whole / (whole - changed) * (1 + 1e-9)


def test_where_stages_differ_from_round_to_round_nothing_is_said():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    decompression, memory = found.stages
    wide = replace(decompression, seconds_per_cell=Estimate(70e-6, 2e-6, 138e-6))
    assert storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    found = replace(found, stages=(wide, memory))
    assert storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES) == ()


def test_stages_count_with_the_end_of_their_interval_that_promises_less():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    decompression, memory = (
        replace(each, seconds_per_cell=Estimate(value, low, high))
        for each, (value, low, high) in zip(
            found.stages, [(70e-6, 60e-6, 80e-6), (10e-6, 8e-6, 12e-6)], strict=True
        )
    )
    found = replace(found, stages=(decompression, memory))
    (advice,) = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    rest = 80 - (60 + 12)  # of what was measured
    assert advice.least_speedup == pytest.approx(80 / (4 * (1 + 63 / 1024) + 12 + rest))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"already_shuffled": True, "rows_per_chunk": 2.0}, {}),
        ({"rows_per_chunk": 2.0}, {"decompression": 5.0, "others": 75.0}),
    ],
    ids=["already shuffled, in small chunks", "bound by something else"],
)
def test_where_it_does_not_matter_nothing_is_said(changes, found):
    bound = bound_by_decompression(
        found.get("decompression", 70.0), found.get("others", 10.0), amplified=1.1
    )
    layout = replace(LAYOUT, **changes)
    assert storage_advice(bound, BLOCKS_OF_16, layout, STORE, SIZES) == ()


def test_of_what_the_library_reads_nothing_is_said():
    found = bound_by_decompression(70.0, 10.0, amplified=4.0)
    found = replace(found, decoded_bytes=0.0, useful_bytes=0.0)
    assert storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES) == ()
