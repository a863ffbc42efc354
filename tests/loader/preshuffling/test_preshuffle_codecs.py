"""How `preshuffle` encodes sparse rows: zarr and cellfeed give back what went in."""

import json
import tracemalloc
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import random_csr

from cellfeed import open_collection, preshuffle
from cellfeed.preshuffling import _dataset

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
]

VALUES: dict[str, tuple[list[float], str, str | None]] = {
    "counts": ([1, 2, 3, 255], "float32", "|u1"),
    "large counts": ([1, 2, 256, 65_535], "float32", "<u2"),
    "counts as integers": ([1, 2, 256], "int64", "<u2"),
    "counts as doubles": ([1, 2], "float64", "|u1"),
    "counts that are narrow": ([1, 2], "uint8", None),
    "counts that an int8 holds": ([1, 2], "int8", None),
    "larger counts": ([1, 65_536], "float32", None),
    "negative": ([1, -1], "float32", None),
    "fractions": ([1, 0.5], "float32", None),
    "zeros": ([1, 0, 0], "float32", "|u1"),
    "negative zeros": ([1, -0.0], "float32", None),
    "NaN": ([1, np.nan], "float32", None),
    "infinite": ([1, np.inf], "float32", None),
    "true": ([1], "bool", None),
}


def cells(values: list[float], dtype: str, n_vars: int = 300) -> Any:
    rng = np.random.default_rng(0)
    X: Any = sp.random(60, n_vars, 0.2, "csr", np.float32, random_state=rng)
    X.sort_indices()
    X.data = rng.choice(np.array(values, dtype), X.nnz)
    return X


def filters_of(store: Path, name: str) -> list[dict[str, Any]]:
    metadata = json.loads((store / "dataset_0" / "X" / name / "zarr.json").read_text())
    codecs = metadata["codecs"][0]["configuration"]["codecs"]
    return [each for each in codecs if each["name"].startswith("numcodecs")]


def check(store: Path, X: Any) -> None:
    """Compare what anndata and cellfeed read, bit by bit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that names are not unique
        parts = [ad.read_zarr(part) for part in sorted(store.glob("dataset_*"))]
    collection, first = open_collection(store), 0
    assert collection.describe()["is_fast"].all()
    assert collection.dtype == X.dtype
    for part in parts:
        rows = part.obs["source_row"].to_numpy()
        own = collection[np.arange(first, first + part.n_obs)].X
        for found in (part.X, own):
            assert found.data.dtype == X.dtype
            np.testing.assert_array_equal(found.indptr, X[rows].indptr)
            np.testing.assert_array_equal(found.indices, X[rows].indices)
            assert found.data.tobytes() == X[rows].data.tobytes()
        first += part.n_obs
    assert first == X.shape[0]


@pytest.mark.parametrize("kind", VALUES)
def test_values_come_back(write_h5ad, tmp_path, kind):
    values, dtype, narrow = VALUES[kind]
    X = cells(values, dtype)
    preshuffle(write_h5ad(X), tmp_path / "out.zarr")
    check(tmp_path / "out.zarr", X)
    (delta,) = filters_of(tmp_path / "out.zarr", "indices")
    assert delta["name"] == "numcodecs.delta"
    found = [each["configuration"] for each in filters_of(tmp_path / "out.zarr", "data")]
    stored = np.dtype(dtype).str
    expected = [] if narrow is None else [{"encode_dtype": narrow, "decode_dtype": stored}]
    assert found == expected


def test_large_chunks(write_h5ad, tmp_path):
    rng = np.random.default_rng(1)
    X = sp.csr_matrix((rng.random((400, 300)) < 0.5) * (1.0 + rng.poisson(0.6, (400, 300))))
    X = X.astype(np.float32)
    preshuffle(write_h5ad(X), tmp_path / "out.zarr", cells_per_chunk=150)
    check(tmp_path / "out.zarr", X)


@pytest.mark.parametrize("n_vars", [200, 300, pytest.param(70_000, marks=pytest.mark.slow)])
def test_chunks_of_few_cells_in_several_parts_and_shards(write_h5ad, tmp_path, n_vars):
    X = cells([1, 2, 300], "float32", n_vars)
    X = sp.csr_matrix(sp.vstack([X[:59], sp.csr_matrix(np.zeros((1, n_vars), X.dtype))]))
    memory = 200_000 if n_vars < 1000 else 20_000_000
    done = preshuffle(
        write_h5ad(X), tmp_path / "out.zarr", cells_per_chunk=1, memory=memory, block_size=4
    )
    assert done.n_cells == 60
    check(tmp_path / "out.zarr", X)
    assert filters_of(tmp_path / "out.zarr", "indices")


def test_annbatchs_has_no_filters(write_h5ad, tmp_path):
    X = cells([1, 2, 3], "float32")
    preshuffle(write_h5ad(X), tmp_path / "out.zarr", codec="annbatch")
    check(tmp_path / "out.zarr", X)
    for name in ("indices", "data"):
        assert filters_of(tmp_path / "out.zarr", name) == []


def test_no_cell_has_a_value(write_h5ad, tmp_path):
    X = sp.csr_matrix(np.zeros((5, 7), "float32"))
    preshuffle(write_h5ad(X), tmp_path / "out.zarr")
    assert open_collection(tmp_path / "out.zarr")[np.arange(5)].X.nnz == 0


# The matrix of a part in memory

COUNTS = [0.0, 1.0, 2.0, 255.0, 65_535.0]
OTHERS = [-0.0, -1.0, 0.5, 65_536.0, np.nan, np.inf]
INDICES = np.dtype(np.uint16)


def few(values: list[float], dtype: str, rng: np.random.Generator) -> Any:
    rows: Any = random_csr((4, 7), 0.5, rng, np.float64)
    rows.sort_indices()
    rows.data = rng.choice(np.array(values, dtype), rows.nnz)
    return rows


def part_of(pieces: list[Any], n_elements: int) -> _dataset.CsrPart:
    n_rows = sum(each.shape[0] for each in pieces)
    part = _dataset.CsrPart(n_rows, n_elements, pieces[0].dtype, INDICES)
    for piece in pieces:
        part.append(piece)
    return part


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint16", "bool"])
@given(
    seed=st.integers(0, 1 << 30),
    are_counts=st.lists(st.booleans(), min_size=1, max_size=6),
    n_expected=st.integers(0, 80),
    n_at_once=st.sampled_from([1, 3, 1 << 16]),
    bounds=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted),
)
def test_values_are_those_that_went_in(dtype, seed, are_counts, n_expected, n_at_once, bounds):
    """Whatever the pieces are, whether or not as many elements come as were expected."""
    rng = np.random.default_rng(seed)
    others = {"int32": [-1.0, 65_536.0], "uint16": [], "bool": []}.get(dtype, OTHERS)
    pieces = [few(COUNTS if each else COUNTS + others, dtype, rng) for each in are_counts]
    X = sp.vstack(pieces, format="csr")
    order = rng.permutation(X.shape[0])
    with mock.patch.object(_dataset, "_PIECE", n_at_once):
        found = part_of(pieces, n_expected)
    found.shuffle(order)
    expected = X[order]
    assert found.pointer.tolist() == expected.indptr.tolist()
    for start, stop in ((0, X.nnz), [round(each * X.nnz) for each in bounds]):
        data = found.elements("data", start, stop)
        assert data.dtype == X.dtype
        assert data.tobytes() == expected.data[start:stop].tobytes()  # also the sign of 0
        indices = found.elements("indices", start, stop)
        assert indices.tolist() == expected.indices[start:stop].tolist()
    is_signed = X.dtype.kind == "f" and np.signbit(X.data).any()
    are_all = bool(np.isin(X.data, COUNTS).all()) and not is_signed
    assert found.largest_count == (int(X.data.max(initial=0)) if are_all else None)


@pytest.mark.parametrize("other_at", [None, 0, 1 / 2, 1], ids=["none", "first", "half", "last"])
def test_a_part_takes_no_more_memory_than_is_planned(other_at):
    n_rows, n_values = 400, 1_500
    data = np.ones(n_rows * n_values, np.float32)
    if other_at is not None:
        data[round(other_at * (data.size - 1))] = 0.5
    pieces = [
        sp.csr_array(
            (values, np.tile(np.arange(n_values, dtype=np.int32), 50), np.arange(51) * n_values)
        )
        for values in np.split(data, 8)
    ]
    tracemalloc.start()
    try:
        part_of(pieces, data.size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    room = data.size + data.size // 4 + 1
    planned = room * (data.itemsize + INDICES.itemsize) + n_rows * 8
    assert peak < planned + 1_000_000  # of what is looked at together
    assert room * INDICES.itemsize > 1_000_000  # a second copy would be more


def test_one_that_comes_late_is_written_as_it_is(write_h5ad, tmp_path):
    X = sp.csr_matrix(sp.vstack([cells([1, 2, 300], "float32")] * 25))
    X.data[-1] = 0.5
    done = preshuffle(write_h5ad(X), tmp_path / "out.zarr", memory=3_000_000)
    assert done.n_parts == 1  # which takes several pieces
    check(tmp_path / "out.zarr", X)
