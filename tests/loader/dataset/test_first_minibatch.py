"""The first minibatch leaves before chunks that it does not need are decoded."""

import threading
from typing import Any

import h5py
import numpy as np
import pytest
from tests.loader.matrices import dense, random_csr
from tests.loader.read_options import parameters_of

from cellfeed import BlockShuffling, CellDataset, FormatError, ReadOptions, open_collection
from cellfeed.fetch._reader import divide_reads
from cellfeed.transforms import Log1p, NormalizeTotal

N_CELLS, BATCH, FACTOR = 400, 16, 10
CHUNK = 64


@pytest.fixture(scope="module")
def matrix():
    counts = random_csr((N_CELLS, 200), 0.3, np.random.default_rng(0), np.float32)
    counts.data = np.ceil(9 * np.abs(counts.data))
    return counts


@pytest.fixture
def path(write_h5ad, matrix):
    return write_h5ad(matrix, chunks={"X/data": CHUNK, "X/indices": CHUNK})


def dataset(path, **options):
    return CellDataset(
        open_collection(path), BlockShuffling(1), BATCH, FACTOR, seed=0, **parameters_of(options)
    )


def chunks_of(matrix, rows):
    """Which chunks the elements of rows lie in."""
    elements = [np.arange(matrix.indptr[row], matrix.indptr[row + 1]) for row in rows]
    return set((np.concatenate(elements) // CHUNK).tolist())


def damage(path, name, chunk):
    with h5py.File(path) as file:
        stored = file["X"][name].id.get_chunk_info_by_coord((chunk * CHUNK,))
    with path.open("r+b") as file:
        file.seek(stored.byte_offset)
        file.write(bytes(stored.size))


def planned(path):
    rows = dataset(path).plan(epoch=0).delivered_rows(0)[0]
    return rows[:BATCH], rows[BATCH:]


@pytest.fixture
def others_wait(monkeypatch):
    """Let chunks that the first minibatch does not need wait; an event, and whether it came."""
    may_go_on, waited = threading.Event(), list[bool]()

    class Held:
        def __init__(self, reads):
            self.reads = reads

        def run(self, *given):
            waited.append(may_go_on.wait(600))
            return self.reads.run(*given)

    def divided(*given):
        first, others = divide_reads(*given)
        return first, Held(others)

    monkeypatch.setattr("cellfeed.fetch._reader.divide_reads", divided)
    return may_go_on, waited


LOGARITHMS = [NormalizeTotal(100.0), Log1p()]
IN_THREADS = {"batch_transform": lambda minibatch: minibatch, "transform_threads": 2}


WAYS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"dense": True},
    "transformed": {"transform": LOGARITHMS},
    "dense and transformed": {"transform": LOGARITHMS, "dense": True},
    "by a function in threads": IN_THREADS,
    "dense by a function in threads": {"dense": True, **IN_THREADS},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_no_other_chunk_is_decoded_before_it(path, matrix, options, others_wait):
    may_go_on, waited = others_wait
    first, _ = planned(path)
    own = dataset(path, num_threads=2, **options)
    minibatches = iter(own)
    minibatch = next(minibatches)
    assert own.statistics().n_chunks == 2 * len(chunks_of(matrix, first))
    may_go_on.set()
    found = np.full(matrix.shape, np.nan, np.float32)
    found[np.asarray(minibatch.rows)] = dense(minibatch.X)
    for each in minibatches:
        found[np.asarray(each.rows)] = dense(each.X)
    assert waited == [True]
    expected = matrix.toarray().astype(np.float64)
    if "transform" in options:
        expected = np.log1p(expected / expected.sum(axis=1, keepdims=True) * 100)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", ["data", "indices"])
def test_what_only_others_need_is_not_waited_for(path, matrix, name, num_threads):
    first, others = planned(path)
    damage(path, name, min(chunks_of(matrix, others) - chunks_of(matrix, first)))
    own = dataset(path, num_threads=num_threads)
    minibatches = iter(own)
    minibatch = next(minibatches)
    assert minibatch.rows.tolist() == first.tolist()
    assert np.array_equal(dense(minibatch.X), matrix[first].toarray())
    assert own.state_dict()["epoch"] == 0
    with pytest.raises(FormatError, match=f"X/{name}"):
        next(minibatches)


@pytest.mark.parametrize("name", ["data", "indices"])
def test_what_it_needs_is(path, matrix, name):
    damage(path, name, max(chunks_of(matrix, planned(path)[0])))
    with pytest.raises(FormatError, match=f"X/{name}"):
        next(iter(dataset(path)))


@pytest.mark.parametrize("dense", [False, True])
def test_every_chunk_is_decoded_once(path, matrix, dense):
    collection = open_collection(path)
    whole = CellDataset(collection, BlockShuffling(1), BATCH, N_CELLS // BATCH, seed=0, dense=dense)
    assert sum(map(len, whole)) == N_CELLS
    assert whole.statistics().n_chunks == 2 * -(-matrix.nnz // CHUNK)


def test_it_is_dropped_while_others_are_decoded(path):
    """Nothing waits for ever for threads that are gone."""
    collection = open_collection(path)
    for seed in range(40):
        options = ReadOptions(num_threads=8)
        own = CellDataset(
            collection, BlockShuffling(1), 4, N_CELLS // 4, seed=seed, read_options=options
        )
        minibatches = iter(own)
        assert len(next(minibatches)) == 4
        del minibatches
