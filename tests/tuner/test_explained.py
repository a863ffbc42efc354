"""Where the time goes is counted while a choice is measured, and stands in the result."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import CellDataset, Cells, open_collection
from cellfeed_tuner import Configuration, _explain, autotune, measure
from cellfeed_tuner._explain import (
    StorageLayout,
    StoreRequest,
    StoreSample,
    explain_throughput,
    sample_store,
)
from cellfeed_tuner._measuring._process import MeasuringProcess

pytestmark = pytest.mark.usefixtures("short_replicates")

BATCH_SIZE = 32
SETTINGS = Configuration(block_size=16, fetch_factor=4)


@pytest.fixture(scope="module")
def measured(small_collection):
    collection = open_collection(small_collection)
    return measure(collection, SETTINGS, batch_size=BATCH_SIZE, seconds=0.1)


def test_every_round_has_counted_a_fetch(measured):
    rounds = measured.round_statistics
    assert len(rounds) == len(measured.round_seconds) >= 8
    for each in rounds:
        assert each.n_minibatches == 4
        assert each.n_cells == 4 * BATCH_SIZE
    together = sum(rounds[1:], rounds[0])
    assert 0 < together.bytes_used <= together.bytes_decompressed
    for stage in ("planning", "reading", "decompressing", "placing", "making_tensors"):
        assert getattr(together, stage) > 0
    # What the dataset counts as waiting lies within what the loop waited for its minibatches.
    assert 0 < together.waiting <= sum(measured.round_waiting_seconds)


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


def explained(collection, measured, *, step_seconds=None, seconds=1.0):
    with MeasuringProcess(collection) as process:
        process.start()
        return explain_throughput(
            process,
            measured,
            StorageLayout(
                n_cells=len(collection),
                rows_per_chunk=collection.rows_per_chunk,
                batch_size=BATCH_SIZE,
                already_shuffled=False,
            ),
            cells_per_second=10_000.0,
            step_seconds=step_seconds,
            block_sizes=(16,),
            seconds=seconds,
            seed=0,
        )


def test_a_sample_is_read_with_all_settings(small_collection, monkeypatch):
    made, reported = list[tuple[Any, Any]](), list[object]()

    def make(*arguments, **settings):
        made.append((arguments, settings))
        return CellDataset(*arguments, **settings)

    monkeypatch.setattr(_explain, "CellDataset", make)
    settings = Configuration(block_size=16, fetch_factor=4, align="chunks", num_threads=1)
    request = StoreRequest(configuration=settings, batch_size=BATCH_SIZE, seed=0)
    request.run(open_collection(small_collection), reported.append)
    ((arguments, options),) = made
    assert arguments[1].align == "chunks"
    assert options["num_threads"] == 1
    assert [type(each) for each in reported] == [StoreSample]


def test_a_sample_is_taken_in_the_process(small_collection):
    with MeasuringProcess(open_collection(small_collection)) as process:
        process.start()
        request = StoreRequest(configuration=SETTINGS, batch_size=BATCH_SIZE, seed=0)
        outcome = process.run(request, limit_seconds=600.0)
    assert [type(each) for each in outcome.events] == [StoreSample]


def test_what_was_counted_is_explained(small_collection, measured):
    collection = open_collection(small_collection)
    found, _ = explained(collection, measured)
    assert found is not None
    assert found.measured_seconds_per_cell == pytest.approx(1e-4)
    assert found.model.n_workers == 0
    slow, advice = explained(collection, measured, step_seconds=10.0, seconds=0.0)
    assert slow is not None
    assert (slow.kind, advice) == ("training", ())
    uncounted = replace(measured, round_statistics=())
    assert explained(collection, uncounted) == (None, ())


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
    assert result.dataset.label_counts == (1500, 1500, 1500)
    assert result.dataset.elements == ("X",)
