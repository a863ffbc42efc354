"""What another layout would give, against counting and arithmetic."""

from dataclasses import replace

import numpy as np
import pytest

from cellfeed_tuner import Configuration, Estimate
from cellfeed_tuner._explain._bottleneck import Bottleneck, Stage
from cellfeed_tuner._explain._stage_model import StageModel, StageName
from cellfeed_tuner._explain._storage_advice import StorageLayout, amplification, storage_advice
from cellfeed_tuner._explain._store_sample import StoreSample

LAYOUT = StorageLayout(
    n_cells=1_000_000, rows_per_chunk=100.0, batch_size=64, already_shuffled=False
)
BLOCKS_OF_16 = Configuration(block_size=16, fetch_factor=64)
STORE = StoreSample(encode_seconds=10e-6, decode_seconds=4e-6, stored_bytes=3_000.0)
SIZES = (1, 16, 1024, 65_536)


def bound_by_decompression(decompression, others, *, amplified):
    """One thread on one core, so that stages add up; so many bytes are decompressed in vain."""
    costs: dict[StageName, float] = {"decompression": decompression * 1e-6, "memory": others * 1e-6}
    return Bottleneck(
        kind="decompression",
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
    assert rechunk.speedup.value == pytest.approx(80 / (70 * then / now + 10), rel=0.01)
    assert "4 cells per chunk may be read about 3.7 times (3.7 to 3.7) as fast" in rechunk.sentence


def test_a_shuffled_copy_is_read_in_the_largest_blocks_that_fit_a_fetch():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    (advice,) = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    assert (advice.action, advice.block_size) == ("preshuffle", 1024)
    assert advice.speedup.value == pytest.approx(80 / (4 * (1 + 63 / 1024) + 10), rel=0.01)
    # Reading all in long blocks, encoding it and decoding it once more.
    cost = 3 * 1_000_000 * (70 * 9 / 8 + 10 + 10 + 4) * 1e-6
    assert advice.cost_seconds == pytest.approx(cost, rel=0.01)
    gained = 1_000_000 * 80e-6 * (1 - 1 / advice.speedup.value)
    assert advice.epochs_to_repay == pytest.approx(cost / gained, rel=0.01)
    assert "5 min to write, repaid after 5 epochs" in advice.sentence


def test_where_stages_were_measured_badly_nothing_is_said():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    decompression, memory = found.stages
    wide = replace(decompression, seconds_per_cell=Estimate(70e-6, 2e-6, 138e-6))
    assert storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    found = replace(found, stages=(wide, memory))
    assert storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES) == ()


def test_the_interval_is_what_comes_of_the_ends_of_stages():
    found = bound_by_decompression(70.0, 10.0, amplified=1.0)
    decompression, memory = (
        replace(each, seconds_per_cell=Estimate(value, low, high))
        for each, (value, low, high) in zip(
            found.stages, [(70e-6, 60e-6, 80e-6), (10e-6, 8e-6, 12e-6)], strict=True
        )
    )
    found = replace(found, stages=(decompression, memory))
    (advice,) = storage_advice(found, BLOCKS_OF_16, LAYOUT, STORE, SIZES)
    then = 4 * (1 + 63 / 1024)
    assert advice.speedup.low == pytest.approx((60 + 12) / (then + 12))
    assert advice.speedup.high == pytest.approx((80 + 8) / (then + 8))


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


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "1 s"), (40.0, "40 s"), (720.0, "12 min"), (9_000.0, "2.5 hours")]
)
def test_times_are_said_as_people_say_them(seconds, said):
    (advice,) = storage_advice(
        bound_by_decompression(70.0, 10.0, amplified=1.0), BLOCKS_OF_16, LAYOUT, STORE, SIZES
    )
    assert f"about {said} to write" in replace(advice, cost_seconds=seconds).sentence
