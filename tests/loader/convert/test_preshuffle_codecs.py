"""How `preshuffle` encodes sparse rows: zarr and cellfeed give back what went in."""

import json
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import ParameterError, open_collection, preshuffle

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings(
        "ignore:Numcodecs codecs are not in the Zarr version 3 specification"
    ),
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


@pytest.mark.parametrize("n_vars", [200, 300, 70_000])
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


def test_another_codec_is_another_job(write_h5ad, tmp_path):
    unknown: Any = "zip"
    path = write_h5ad(cells([1, 2], "float32"))
    preshuffle(path, tmp_path / "out.zarr")
    with pytest.raises(ParameterError, match="was begun with codec delta, not with codec annb"):
        preshuffle(path, tmp_path / "out.zarr", codec="annbatch")
    with pytest.raises(ParameterError, match="`codec` must be one of 'delta', 'annbatch'"):
        preshuffle(path, tmp_path / "other.zarr", codec=unknown)
    with pytest.raises(ParameterError, match="cells_per_chunk"):
        preshuffle(path, tmp_path / "other.zarr", cells_per_chunk=0)
