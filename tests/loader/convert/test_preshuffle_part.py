"""The matrix of a part in memory: its values, their order, and the memory that it takes."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.convert.test_preshuffle_codecs import cells, check
from tests.loader.matrices import random_csr

from cellfeed import preshuffle
from cellfeed._convert._preshuffle._dataset import CsrPart

N_ROWS, N_PIECES = 4_000, 8
INDICES = np.dtype(np.uint16)


def pieces_of(X):
    return [X[rows] for rows in np.array_split(np.arange(X.shape[0]), N_PIECES)]


def counts(dtype="float32", n_rows=N_ROWS):
    rng = np.random.default_rng(0)
    X: Any = random_csr((n_rows, 1_000), 0.25, rng, np.float32)
    return sp.csr_array((rng.integers(0, 65_536, X.nnz).astype(dtype), X.indices, X.indptr))


def part_of(pieces, n_elements):
    n_rows = sum(each.shape[0] for each in pieces)
    part = CsrPart(n_rows, n_elements, pieces[0].dtype, INDICES)
    for piece in pieces:
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
        part_of(pieces, X.nnz)
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
    found = part_of(pieces_of(X), round(X.nnz * share))
    found.shuffle(order)
    expected = X[order]
    assert (found.largest_count is None) == (X.data.min() < 0)
    assert found.pointer.tolist() == expected.indptr.tolist()
    for name in ("data", "indices"):
        for start in (0, 12_345):
            elements = found.elements(name, start, X.nnz)
            np.testing.assert_array_equal(elements, getattr(expected, name)[start:])


COUNTS = [0.0, 1.0, 2.0, 255.0, 65_535.0]
OTHERS = [-0.0, -1.0, 0.5, 65_536.0, np.nan, np.inf]


def few(values: list[float], dtype: str, rng: np.random.Generator) -> Any:
    rows: Any = random_csr((4, 7), 0.5, rng, np.float64)
    rows.sort_indices()
    rows.data = rng.choice(np.array(values, dtype), rows.nnz)
    return rows


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@given(
    seed=st.integers(0, 1 << 30),
    are_counts=st.lists(st.booleans(), min_size=1, max_size=4),
    n_expected=st.integers(0, 80),
)
def test_values_are_those_that_went_in(dtype, seed, are_counts, n_expected):
    rng = np.random.default_rng(seed)
    others = [-1.0, 65_536.0] if dtype == "int32" else OTHERS
    pieces = [few(COUNTS if each else COUNTS + others, dtype, rng) for each in are_counts]
    X = sp.vstack(pieces, format="csr")
    order = rng.permutation(X.shape[0])
    found = part_of(pieces, n_expected)
    found.shuffle(order)
    expected = X[order]
    assert found.pointer.tolist() == expected.indptr.tolist()
    data = found.elements("data", 0, found.n_elements)
    assert data.dtype == (X.dtype if found.largest_count is None else np.uint16)
    data = data.astype(X.dtype)
    assert data.tobytes() == expected.data.tobytes()  # also the sign of 0
    indices = found.elements("indices", 0, found.n_elements)
    assert indices.tolist() == expected.indices.tolist()
    are_all = bool(np.isin(X.data, COUNTS).all() and not np.copysign(1, X.data).min(initial=1) < 0)
    largest = int(X.data.max(initial=0)) if are_all else None
    assert found.largest_count == largest


def test_one_that_comes_late_is_written_as_it_is(write_h5ad, tmp_path):
    X = sp.csr_matrix(sp.vstack([cells([1, 2, 300], "float32")] * 25))
    X.data[-1] = 0.5
    done = preshuffle(write_h5ad(X), tmp_path / "out.zarr", memory=3_000_000)
    assert done.n_parts == 1  # which takes several pieces
    check(tmp_path / "out.zarr", X)
