from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import open_collection
from cellfeed._reader import Reader


@pytest.fixture(params=["csr", "dense"])
def file(request, write_h5ad):
    counts = np.random.default_rng(0).poisson(1.0, size=(50, 8)).astype(np.float32)
    X = sp.csr_matrix(counts) if request.param == "csr" else counts
    return write_h5ad(X, {"number": np.arange(50.0)})


def buffers(X: Any) -> list[np.ndarray]:
    return [X] if isinstance(X, np.ndarray) else [X.data, X.indices]


def dense(X: Any) -> np.ndarray:
    return np.asarray(X if isinstance(X, np.ndarray) else X.toarray())


def test_memory_is_used_again(file):
    reader = Reader(open_collection(file))
    whole = buffers(reader.read(np.arange(50)).X)
    for rows in (np.arange(45), np.arange(10, 50)):  # SciPy copies what is much smaller
        part = buffers(reader.read(rows).X)
        assert all(map(np.shares_memory, part, whole))


def test_reads_of_growing_and_shrinking_size_are_right(file, in_memory):
    reader = Reader(open_collection(file, obs=["number"]))
    expected = in_memory([file])
    rng = np.random.default_rng(1)
    for n_rows in (3, 40, 1, 0, 50, 20):
        rows = np.sort(rng.permutation(50)[:n_rows])
        cells = reader.read(rows)
        assert np.array_equal(dense(cells.X), expected[rows])
        assert np.array_equal(cells.obs["number"], rows)
        assert np.array_equal(cells.rows, rows)


def test_two_readers_do_not_disturb_each_other(file, in_memory):
    collection, expected = open_collection(file), in_memory([file])
    first = Reader(collection).read(np.arange(10)).X
    Reader(collection).read(np.arange(30, 50))
    assert np.array_equal(dense(first), expected[:10])
