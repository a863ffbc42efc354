"""A part in memory takes what was planned, wherever the first value lies that is no count."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.convert.test_preshuffle_codecs import cells, check
from tests.loader.matrices import random_csr

from cellfeed import preshuffle
from cellfeed._convert._preshuffle._elements import CsrPart

N_ROWS, N_PIECES = 4_000, 8
INDICES = np.dtype(np.uint16)


def pieces_of(X):
    return [X[rows] for rows in np.array_split(np.arange(X.shape[0]), N_PIECES)]


def counts(dtype="float32", n_rows=N_ROWS):
    rng = np.random.default_rng(0)
    X: Any = random_csr((n_rows, 1_000), 0.25, rng, np.float32)
    return sp.csr_array((rng.integers(0, 65_536, X.nnz).astype(dtype), X.indices, X.indptr))


def part_of(X, n_elements):
    part = CsrPart(X.shape[0], n_elements, X.dtype, INDICES, counts=True)
    for piece in pieces_of(X):
        part.append(piece)
    return part


@pytest.mark.parametrize("first_other", [None, 0, 1 / 2, 1], ids=["none", "first", "half", "last"])
def test_it_takes_no_more_memory_than_is_planned(first_other):
    X = counts()
    if first_other is not None:
        X.data[round(first_other * (X.nnz - 1))] = 0.5
    pieces = pieces_of(X)
    tracemalloc.start()
    try:
        part = CsrPart(N_ROWS, X.nnz, X.dtype, INDICES, counts=True)
        for piece in pieces:
            part.append(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    room = X.nnz + X.nnz // 4 + 1
    planned = room * (X.dtype.itemsize + INDICES.itemsize) + N_ROWS * 8
    assert peak < planned + 1_000_000  # of what is looked at together
    assert room * INDICES.itemsize > 1_000_000  # a second copy would be more


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint16", "bool"])
@pytest.mark.parametrize("first_other", [None, 0, 1 / 2, 1])
@pytest.mark.parametrize("share", [1, 1 / 3], ids=["as many as expected", "more than expected"])
def test_its_rows_come_back(dtype, first_other, share):
    X = counts(dtype, 1_000)
    if first_other is not None and np.dtype(dtype).itemsize > 2:
        X.data[round(first_other * (X.nnz - 1))] = -1
    order = np.random.default_rng(1).permutation(X.shape[0])
    found = part_of(X, round(X.nnz * share)).shuffled(order)
    expected = X[order]
    assert (found.largest_count is None) == (X.data.min() < 0)
    assert found.pointer.tolist() == expected.indptr.tolist()
    for name in ("data", "indices"):
        for start in (0, 12_345):
            elements = found.elements(name, start, X.nnz)
            np.testing.assert_array_equal(elements, getattr(expected, name)[start:])


def test_one_that_comes_late_is_written_as_it_is(write_h5ad, tmp_path):
    X = sp.csr_matrix(sp.vstack([cells([1, 2, 300], "float32")] * 25))
    X.data[-1] = 0.5
    done = preshuffle(write_h5ad(X), tmp_path / "out.zarr", memory=3_000_000)
    assert done.n_parts == 1  # which takes several pieces
    check(tmp_path / "out.zarr", X)
