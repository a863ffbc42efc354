from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import open_collection
from cellfeed._fetch import Reader


@pytest.fixture(params=["csr", "dense"])
def file(request, write_h5ad):
    counts = np.random.default_rng(0).poisson(1.0, size=(50, 8)).astype(np.float32)
    X = sp.csr_matrix(counts) if request.param == "csr" else counts
    return write_h5ad(X, {"number": np.arange(50.0)})


def address(X: Any) -> int:
    values = X if isinstance(X, np.ndarray) else X.data
    return int(values.ctypes.data)


def test_memory_is_used_again_once_nobody_has_it(file):
    with Reader(open_collection(file)) as reader:
        first = address(reader.read(np.arange(50)).X)
        assert address(reader.read(np.arange(50)).X) == first


def test_what_is_kept_stays_as_it_was(file, in_memory):
    expected = in_memory([file])
    with Reader(open_collection(file)) as reader:
        kept = [reader.read(np.arange(start, start + 10)) for start in range(40)]
    for start, cells in enumerate(kept):
        assert np.array_equal(dense(cells.X), expected[start : start + 10])


def test_reads_of_growing_and_shrinking_size_are_right(file, in_memory):
    expected = in_memory([file])
    rng = np.random.default_rng(1)
    with Reader(open_collection(file, obs=["number"])) as reader:
        for n_rows in (3, 40, 1, 0, 50, 20):
            rows = np.sort(rng.permutation(50)[:n_rows])
            cells = reader.read(rows)
            assert np.array_equal(dense(cells.X), expected[rows])
            assert np.array_equal(cells.obs["number"], rows)
            assert np.array_equal(cells.rows, rows)


@pytest.mark.parametrize("group_size", [1, 7, 20, 100])
def test_groups_are_the_rows_in_the_order_asked_for(file, in_memory, group_size):
    expected = in_memory([file])
    rng = np.random.default_rng(2)
    rows = np.sort(rng.permutation(50)[:30])
    order = np.concatenate([rng.permutation(30), rng.integers(0, 30, size=10)])
    with Reader(open_collection(file, obs=["number"]), num_threads=3) as reader:
        groups = list(reader.read_groups(rows, order, group_size))
        sizes = [len(group) for group in groups]
        assert sizes[:-1] == [group_size] * (len(groups) - 1)
        assert sum(sizes) == 40
        X = np.concatenate([dense(group.to_scipy().X) for group in groups])
    assert np.array_equal(X, expected[rows[order]])
    assert np.array_equal(np.concatenate([group.obs["number"] for group in groups]), rows[order])


def test_two_readers_do_not_disturb_each_other(file, in_memory):
    collection, expected = open_collection(file), in_memory([file])
    with Reader(collection) as one, Reader(collection) as other:
        first = one.read(np.arange(10)).X
        other.read(np.arange(30, 50))
    assert np.array_equal(dense(first), expected[:10])
