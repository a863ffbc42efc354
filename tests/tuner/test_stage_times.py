"""Stages are timed in a process of its own, and what follows from them stands in the result."""

import h5py
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import Cells, open_collection
from cellfeed_tuner import Configuration, autotune
from cellfeed_tuner._explain._explained import Explained, explain_throughput
from cellfeed_tuner._explain._stage_times import StageRequest, StageRound, Transferred
from cellfeed_tuner._explain._storage_advice import StorageLayout
from cellfeed_tuner._explain._store_sample import StoreSample, sample_store
from cellfeed_tuner._measuring._measuring_process import MeasuringProcess

BATCH_SIZE = 32
SETTINGS = Configuration(block_size=16, fetch_factor=4)


def events_of(collection, configuration=SETTINGS, *, cache="cold"):
    with MeasuringProcess(collection) as process:
        process.start()
        outcome = process.run(
            StageRequest(
                configuration=configuration,
                batch_size=BATCH_SIZE,
                cache=cache,
                seconds=0.05,
                least_rounds=3,
                most_rounds=50,
                seed=0,
                first_epoch=5,
            ),
            limit_seconds=60.0,
        )
    assert outcome.failure is None
    return outcome.events


def rounds_in(events):
    found = [each for each in events if isinstance(each, StageRound)]
    assert len(found) >= 3
    return found


def test_every_round_is_a_whole_fetch_with_all_its_stages(small_collection):
    events = events_of(open_collection(small_collection))
    for each in rounds_in(events):
        assert each.n_cells == 4 * BATCH_SIZE
        times = each.planned, each.cold_bytes, each.cached_bytes, each.decompressed, each.read
        assert all(time is not None and time > 0 for time in (*times, each.to_minibatches))
        assert each.cold_read is None
        assert 0 < each.useful_bytes <= each.decoded_bytes
        assert each.stored_bytes > 0
    assert [type(each) for each in events if not isinstance(each, StageRound)] == [StoreSample]


def test_a_cached_collection_is_not_read_from_disk(small_collection):
    events = events_of(open_collection(small_collection), cache="warm")
    assert {each.cold_bytes for each in rounds_in(events)} == {None}


def test_workers_hand_minibatches_over(small_collection):
    configuration = Configuration(block_size=16, fetch_factor=4, num_workers=1)
    events = events_of(open_collection(small_collection), configuration)
    (transferred,) = [each for each in events if isinstance(each, Transferred)]
    assert len(transferred.seconds) > 1
    assert min(transferred.seconds) > 0


def test_what_the_library_reads_is_timed_as_a_whole(small_collection, tmp_path):
    path = tmp_path / "big_endian.h5ad"
    path.write_bytes((small_collection / "plate0.h5ad").read_bytes())
    with h5py.File(path, "r+") as file:
        attributes, data = dict(file["X/data"].attrs), file["X/data"][:]
        del file["X/data"]
        file["X/data"] = data.astype(">f4")
        file["X/data"].attrs.update(attributes)
    for each in rounds_in(events_of(open_collection(path))):
        assert (each.cold_bytes, each.cached_bytes, each.decompressed) == (None, None, None)
        assert each.cold_read is not None
        assert each.decoded_bytes == 0


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


def explained(collection, *, most_seconds):
    with MeasuringProcess(collection) as process:
        process.start()
        return explain_throughput(
            process,
            SETTINGS,
            StorageLayout(
                n_cells=len(collection),
                rows_per_chunk=collection.rows_per_chunk,
                batch_size=BATCH_SIZE,
                already_shuffled=True,
            ),
            cells_per_second=10_000.0,
            step_seconds=None,
            block_sizes=(16,),
            cache="cold",
            seconds=0.05,
            most_seconds=most_seconds,
            seed=0,
        )


def test_where_there_is_no_time_nothing_is_timed(small_collection):
    collection = open_collection(small_collection)
    # Rounds of 128 cells, four of them, take longer than one of those fetches does at least.
    assert explained(collection, most_seconds=128 / 10_000) == Explained()
    found = explained(collection, most_seconds=10.0).bottleneck
    assert found is not None
    assert found.measured_seconds_per_cell == pytest.approx(1e-4)
    assert found.model.n_workers == 0


def test_autotune_explains_its_choice(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    result = autotune(
        collection, label="plate", batch_size=BATCH_SIZE, block_sizes=[1], fetch_factors=[4],
        workers=[0], budget=40.0, entropy_floor=0.0,
    )  # fmt: skip
    assert result.recommended is not None
    assert result.bottleneck is not None
    assert result.bottleneck.measured_seconds_per_cell == pytest.approx(
        1 / result.recommended.cells_per_second.value
    )
    assert {each.name for each in result.bottleneck.stages} >= {"planning", "decompression"}
    assert result.dataset.label_counts == (1500, 1500, 1500)
