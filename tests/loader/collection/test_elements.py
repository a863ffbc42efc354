"""Several elements of the same cells, against what anndata has in memory."""

import itertools
import pickle
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.zarr_stores import written_at_once

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    FormatError,
    Minibatch,
    MismatchError,
    ParameterError,
    Streaming,
    open_collection,
)

COLUMNS = {"X": 7, "layers/counts": 7, "raw/X": 11, "obsm/X_pca": 3, "obsm/sparse": 5}
DTYPES = ("float32", "float64", "uint8", "int64")


@dataclass(frozen=True)
class File:
    """How a file is stored: format, compression, and dtype and layout of each element."""

    n_rows: int
    format: str
    compression: str | None
    elements: dict[str, tuple[str, str]]
    seed: int


@st.composite
def files(draw: st.DrawFn) -> list[File]:
    kinds = st.tuples(st.sampled_from(DTYPES), st.sampled_from(["csr", "csr", "dense"]))
    return draw(
        st.lists(
            st.builds(
                File,
                n_rows=st.integers(1, 25),
                format=st.sampled_from(["h5ad", "h5ad", "zarr"]),
                compression=st.sampled_from(["gzip", None]),
                elements=st.fixed_dictionaries(dict.fromkeys(COLUMNS, kinds)),
                seed=st.integers(0, 99),
            ),
            min_size=1,
            max_size=3,
        )
    )


def matrix(shape: tuple[int, int], dtype: str, layout: str, rng: np.random.Generator) -> Any:
    dense = np.where(rng.random(shape) < 0.4, rng.integers(1, 99, shape), 0).astype(dtype)
    return sp.csr_matrix(dense) if layout == "csr" else dense


def write(path: Path, file: File) -> ad.AnnData:
    rng = np.random.default_rng(file.seed)
    made = {
        name: matrix((file.n_rows, COLUMNS[name]), *kind, rng)
        for name, kind in file.elements.items()
    }
    obs = pd.DataFrame({"number": rng.random(file.n_rows)}, index=_names("cell", file.n_rows))
    adata = ad.AnnData(made["X"], obs=obs, var=pd.DataFrame(index=_names("gene", COLUMNS["X"])))
    raw_var = pd.DataFrame(index=_names("raw", COLUMNS["raw/X"]))
    adata.raw = ad.AnnData(made["raw/X"], obs=obs, var=raw_var)
    adata.layers["counts"] = made["layers/counts"]
    adata.obsm["X_pca"], adata.obsm["sparse"] = made["obsm/X_pca"], made["obsm/sparse"]
    if file.format == "zarr":
        with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # anndata's and zarr's own
            with written_at_once(path) as store:
                adata.write_zarr(store)
    else:
        adata.write_h5ad(path, compression=file.compression)
    return adata


def _names(what: str, n: int) -> list[str]:
    return [f"{what}{k}" for k in range(n)]


def in_memory(adatas: list[ad.AnnData]) -> dict[str, np.ndarray]:
    """The oracle: every element, dense."""
    parts = {
        "X": [adata.X for adata in adatas],
        "raw/X": [adata.raw.X for adata in adatas],
        "layers/counts": [adata.layers["counts"] for adata in adatas],
        "obsm/X_pca": [adata.obsm["X_pca"] for adata in adatas],
        "obsm/sparse": [adata.obsm["sparse"] for adata in adatas],
    }
    return {name: np.vstack([dense(part) for part in some]) for name, some in parts.items()}


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Callable[[list[File]], tuple[list[Path], dict[str, np.ndarray]]]:
    """Write files; return their paths and what is in them."""
    folder, numbers = tmp_path_factory.mktemp("elements"), itertools.count()

    def store_(some: list[File]) -> tuple[list[Path], dict[str, np.ndarray]]:
        paths = [folder / f"{next(numbers):05}.{file.format}" for file in some]
        adatas = [write(path, file) for path, file in zip(paths, some, strict=True)]
        return paths, in_memory(adatas)

    return store_


@pytest.fixture(scope="module")
def two(store):
    """Two files of 40 and 25 cells, each element stored in its own way."""
    kinds = {
        "X": ("float32", "csr"),
        "layers/counts": ("uint8", "csr"),
        "raw/X": ("int64", "dense"),
        "obsm/X_pca": ("float64", "dense"),
        "obsm/sparse": ("float32", "csr"),
    }
    return store([File(40, "h5ad", "gzip", kinds, 0), File(25, "zarr", None, kinds, 1)])


names = st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True)
slowly = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


class TestRows:
    @slowly
    @given(some=files(), elements=names, data=st.data())
    def test_of_all_elements_are_those_of_the_same_cells(self, store, some, elements, data):
        paths, expected = store(some)
        collection = open_collection(paths, elements=elements, obs=["number"])
        assert list(collection.elements) == elements
        rows = np.array(data.draw(st.lists(st.integers(0, len(collection) - 1))), np.int64)
        cells = collection[rows]
        assert list(cells.keys()) == elements
        assert cells.X is cells[elements[0]]
        assert cells.rows.tolist() == rows.tolist()
        for name, element in collection.elements.items():
            stored = [file.elements[name] for file in some]
            assert element.layout == ("csr" if "csr" in {kind for _, kind in stored} else "dense")
            assert element.dtype == np.result_type(*(dtype for dtype, _ in stored))
            assert element.n_columns == COLUMNS[name]
            assert sp.issparse(cells[name]) == (element.layout == "csr")
            assert cells[name].dtype == element.dtype
            assert np.array_equal(dense(cells[name]), expected[name][rows])

    @slowly
    @given(some=files(), elements=names, data=st.data())
    def test_of_an_epoch(self, store, some, elements, data):
        paths, expected = store(some)
        named = data.draw(st.dictionaries(st.sampled_from(elements), st.sampled_from(DTYPES)))
        dtype = data.draw(st.sampled_from([None, "float32", named]))
        is_dense = data.draw(st.booleans())
        dataset = CellDataset(
            open_collection(paths, elements=elements, obs=["number"]),
            BlockShuffling(block_size=data.draw(st.integers(1, 5))),
            batch_size=data.draw(st.integers(1, 9)),
            fetch_factor=data.draw(st.integers(1, 4)),
            seed=0,
            dense=is_dense,
            dtype=dtype,
        )
        seen = []
        for minibatch in dataset:
            rows = minibatch.rows.numpy()
            seen += rows.tolist()
            assert list(minibatch.keys()) == elements
            for name, element in dataset.collection.elements.items():
                asked = dtype.get(name) if isinstance(dtype, dict) else dtype
                values = dense(minibatch[name])
                assert values.dtype == (asked or element.dtype)
                assert np.array_equal(values, expected[name][rows].astype(values.dtype))
                is_sparse = minibatch[name].layout == torch.sparse_csr
                assert is_sparse == (element.layout == "csr" and not is_dense)
        assert sorted(seen) == list(range(len(dataset.collection)))

    def test_through_worker_processes(self, two):
        paths, expected = two
        collection = open_collection(paths, elements=list(COLUMNS), obs=["number"])
        dataset = CellDataset(collection, BlockShuffling(block_size=3), 8, fetch_factor=2, seed=0)
        n_cells = 0
        for minibatch in dataset.loader(num_workers=2):
            n_cells += len(minibatch)
            for name, rows in minibatch.items():
                assert np.array_equal(dense(rows), expected[name][minibatch.rows.numpy()])
        assert n_cells == len(collection) == 65

    def test_whose_columns_are_in_any_order_in_one_of_them(self, tmp_path):
        ordered = sp.csr_matrix(np.array([[1, 2, 0], [0, 3, 4]], np.float32))
        disordered = sp.csr_matrix(
            (np.arange(1, 5, dtype=np.float32), np.array([2, 0, 1, 0]), np.array([0, 2, 4])), (2, 3)
        )
        adata = ad.AnnData(ordered, layers={"other": disordered})
        adata.obs_names, adata.var_names = _names("cell", 2), _names("gene", 3)
        adata.write_h5ad(tmp_path / "cells.h5ad")
        cells = open_collection(tmp_path, elements=["X", "layers/other"])[[1, 0]]
        assert cells.X.toarray().tolist() == [[0, 3, 4], [1, 2, 0]]
        assert cells["layers/other"].toarray().tolist() == [[4, 3, 0], [2, 0, 1]]
        assert cells["layers/other"].indices.tolist() == [0, 1, 0, 2]

    def test_that_a_transform_works_on(self, two):
        paths, expected = two
        collection = open_collection(paths, elements=["X", "obsm/X_pca"])

        def halves(cells: Cells) -> Cells:
            return Cells({**cells.elements, "half": cells["obsm/X_pca"] / 2}, {}, cells.rows)

        dataset = CellDataset(collection, Streaming(), 16, seed=0, fetch_transform=halves)
        for minibatch in dataset:
            assert list(minibatch.keys()) == ["X", "obsm/X_pca", "half"]
            half = expected["obsm/X_pca"][minibatch.rows.numpy()] / 2
            assert np.array_equal(minibatch["half"].numpy(), half)
            assert np.array_equal(dense(minibatch.X), expected["X"][minibatch.rows.numpy()])


class TestMinibatch:
    @pytest.fixture
    def minibatch(self, two) -> Minibatch:
        collection = open_collection(two[0], elements=list(COLUMNS), obs=["number"])
        minibatch: Minibatch = next(iter(CellDataset(collection, Streaming(), 20, seed=0)))
        return minibatch

    def test_is_a_mapping_whose_length_is_cells(self, minibatch):
        assert len(minibatch) == 20
        assert list(minibatch.keys()) == list(COLUMNS)
        assert dict(minibatch) == dict(minibatch.items()) == minibatch.elements
        assert next(iter(minibatch.values())) is minibatch.X is minibatch["X"]
        assert "raw/X" in minibatch
        assert "obsm/other" not in minibatch
        with pytest.raises(KeyError):
            minibatch["obsm/other"]

    def test_is_the_same_when_it_was_pickled(self, minibatch):
        copy = pickle.loads(pickle.dumps(minibatch))
        assert list(copy.keys()) == list(COLUMNS)
        for name, rows in minibatch.items():
            assert copy[name].layout == rows.layout
            assert copy[name].dtype == rows.dtype
            assert np.array_equal(dense(copy[name]), dense(rows))
        assert torch.equal(copy.obs["number"], minibatch.obs["number"])
        assert torch.equal(copy.rows, minibatch.rows)

    def test_moves_and_is_pinned_with_all_elements(self, minibatch, monkeypatch):
        pinned = list[torch.Tensor]()

        def on_device(tensor, *, pin_memory):
            assert pin_memory
            pinned.append(torch.zeros_like(tensor))
            return pinned[-1]

        with monkeypatch.context() as patched:
            patched.setattr(torch, "empty_like", on_device)
            same = minibatch.pin_memory()
        assert torch.equal(same.rows, minibatch.rows)
        assert list(same.keys()) == list(COLUMNS)
        assert len(pinned) == 3 * 3 + 2 + 2
        on_meta = minibatch.to("meta")
        assert {rows.device.type for rows in on_meta.values()} == {"meta"}
        made_dense = minibatch.to("cpu", dense=True)
        assert {rows.layout for rows in made_dense.values()} == {torch.strided}
        assert np.array_equal(dense(made_dense["obsm/sparse"]), dense(minibatch["obsm/sparse"]))


class TestSizes:
    def test_are_summed(self, two):
        paths, expected = two
        parts = {name: open_collection(paths, elements=[name]) for name in COLUMNS}
        both = open_collection(paths, elements=list(COLUMNS))
        for size in (
            lambda each: each.mean_row_bytes(),
            lambda each: each.mean_row_bytes(np.dtype("float64")),
            lambda each: each.stored_row_bytes(),
        ):
            assert size(both) == pytest.approx(sum(size(part) for part in parts.values()))
        assert parts["raw/X"].mean_row_bytes() == 11 * 8
        per_cell = np.count_nonzero(expected["X"]) / 65
        assert parts["X"].mean_row_bytes() == pytest.approx(per_cell * 8)
        assert both.mean_row_bytes(dense=True) == 7 * 4 + 7 + 11 * 8 + 3 * 8 + 5 * 4
        dataset = CellDataset(both, Streaming(), 8, fetch_factor=2, seed=0)
        assert dataset.buffer_bytes == int(2 * 8 * 2 * both.mean_row_bytes())


class TestRefused:
    @pytest.mark.parametrize(
        ("elements", "words"),
        [
            ("X", r"list of names, but got the text 'X'; write \['X'\]"),
            ([], r"at least one element, each once, but got \[\]"),
            (["X", "X"], r"at least one element, each once, but got \['X', 'X'\]"),
            (["counts"], r"'X', .*, but got 'counts'; give its path in the file"),
            (["layers/"], "but got 'layers/'"),
            (["raw"], "but got 'raw'"),
            ([None], "but got None"),
        ],
    )
    def test_names_that_are_none(self, two, elements, words):
        with pytest.raises(ParameterError, match=f"^`elements` must .*{words}"):
            open_collection(two[0], elements=elements)

    def test_arrays_that_are_absent(self, two):
        path = two[0][0]
        expected = f"^{path}: has no `obsm/X_umap`; its obsm has: X_pca, sparse$"
        with pytest.raises(FormatError, match=expected):
            open_collection(two[0], elements=["X", "obsm/X_umap"])

    def test_arrays_of_other_widths(self, tmp_path):
        for n_columns in (2, 3):
            adata = ad.AnnData(np.eye(4, dtype=np.float32))
            adata.obs_names, adata.var_names = _names("cell", 4), _names("gene", 4)
            adata.obsm["X_pca"] = np.ones((4, n_columns))
            adata.write_h5ad(tmp_path / f"{n_columns}.h5ad")
        first, second = tmp_path / "2.h5ad", tmp_path / "3.h5ad"
        expected = f"^{second}: `obsm/X_pca` has 3 columns, but 2 in {first}; write the sa"
        with pytest.raises(MismatchError, match=expected):
            open_collection(tmp_path, elements=["obsm/X_pca"])
        assert len(open_collection(tmp_path)) == 8

    @pytest.mark.parametrize("kind", ["of text", "by gene"])
    def test_arrays_that_cannot_be_read_by_cell(self, tmp_path, kind):
        adata = ad.AnnData(np.eye(4, dtype=np.float32))
        adata.obs_names, adata.var_names = _names("cell", 4), _names("gene", 4)
        made, words = {
            "of text": (
                pd.DataFrame({"a": 1.0, "b": "x", "c": "y"}, index=adata.obs_names),
                "has columns that are neither numbers nor booleans: 'b', 'c'; write it without",
            ),
            "by gene": (sp.csc_matrix(np.eye(4)), r"\(CSC\).*`cellfeed preshuffle --in-order "),
        }[kind]
        adata.obsm["it"] = made
        adata.write_h5ad(tmp_path / "cells.h5ad")
        path = tmp_path / "cells.h5ad"
        with pytest.raises(FormatError, match=f"^{path}: .*`obsm/it` .*{words}"):
            open_collection(tmp_path, elements=["X", "obsm/it"])

    def test_dtypes_of_what_is_not_read(self, two):
        collection = open_collection(two[0], elements=["X", "obsm/X_pca"])
        expected = "^`dtype` names 'raw/X', which is not among the elements read: 'X', 'obsm/X_pca'"
        with pytest.raises(ParameterError, match=expected):
            CellDataset(collection, Streaming(), 8, seed=0, dtype={"raw/X": "float32"})
