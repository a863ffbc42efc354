"""Elements and genes of any files, against what anndata and pandas have in memory."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.collection.stored import (
    COLUMNS,
    DTYPES,
    File,
    Storage,
    named,
    some_of,
    write_file,
    write_files,
)
from tests.loader.matrices import dense

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


@pytest.fixture(scope="module")
def files(tmp_path_factory, replace) -> list[File]:
    return write_files(tmp_path_factory.mktemp("files"), replace)


@pytest.fixture(scope="module")
def two(tmp_path_factory, replace):
    """Two files of 40 and 25 cells, each element stored in its own way, and what is in them."""
    folder, both = tmp_path_factory.mktemp("two"), list[File]()
    for n_rows, suffix in ((40, "h5ad"), (25, "zarr")):
        storages = {
            "X": Storage(n_rows, "float32", "csr"),
            "layers/counts": Storage(n_rows, "uint8", "csr"),
            "raw/X": Storage(n_rows, "int64", "dense"),
            "obsm/X_pca": Storage(n_rows, "float64", "dense"),
            "obsm/sparse": Storage(n_rows, "float32", "csr"),
        }
        compression = "gzip" if suffix == "h5ad" else None
        path = folder / f"{n_rows}.{suffix}"
        both.append(write_file(path, named("gene", 7), storages, replace, compression))
    values = {name: np.vstack([each.arrays[name] for each in both]) for name in COLUMNS}
    return sorted(each.path for each in both)[::-1], values


def joined(some: list[File], name: str, join: str, genes: list[str] | None) -> pd.DataFrame:
    """The oracle: all rows of an element, whose columns pandas joins by name."""
    if COLUMNS[name] is not None:
        return pd.DataFrame(np.vstack([each.arrays[name] for each in some]))
    frames = [pd.DataFrame(each.arrays[name], columns=each.genes) for each in some]
    both = pd.concat(frames, join="outer" if join == "outer" else "inner").fillna(0)
    return both[genes] if genes else both


@pytest.mark.filterwarnings("ignore:.* is read slowly")
@pytest.mark.parametrize("join", ["same", "inner", "outer", "genes"])
@settings(max_examples=max(1, settings().max_examples // 2))
@given(data=st.data())
def test_any_elements_and_genes_of_any_files(files, join, data):
    some = data.draw(some_of(files, join))
    names = ["X", "layers/counts", *([] if join == "genes" else ["raw/X"])]
    elements = data.draw(
        st.lists(
            st.sampled_from([*names, "obsm/X_pca", "obsm/sparse"]), min_size=1, unique=True
        ).filter(lambda drawn: join != "genes" or {*drawn} & {*names})
    )
    genes = None
    if join == "genes":
        shared = sorted(set.intersection(*(set(each.genes) for each in some)))
        genes = data.draw(st.lists(st.sampled_from(shared), min_size=1, unique=True))
    collection = open_collection(
        [each.path for each in some],
        elements=elements,
        obs=["number"],
        **({"genes": genes} if genes else {"join_vars": join}),
    )
    expected = {name: joined(some, name, join, genes) for name in elements}
    rows = np.array(data.draw(st.lists(st.integers(0, len(collection) - 1))), np.int64)
    cells = collection[rows]
    assert list(collection.elements) == list(cells.keys()) == elements
    assert cells.X is cells[elements[0]]
    assert cells.rows.tolist() == rows.tolist()
    for name, element in collection.elements.items():
        stored = [each.storages[name] for each in some]
        found, values = cells[name], expected[name].to_numpy()
        is_sparse = "csr" in {each.layout for each in stored}
        assert element.layout == ("csr" if is_sparse else "dense")
        assert element.dtype == found.dtype == np.result_type(*(each.dtype for each in stored))
        assert element.n_columns == values.shape[1]
        if COLUMNS[name] is None:
            assert element.column_names.tolist() == expected[name].columns.tolist()
        assert np.array_equal(dense(found), values[rows])
        assert sp.issparse(found) == is_sparse
        if is_sparse:
            assert found.has_canonical_format
            assert found.nnz == np.count_nonzero(values[rows])
    by_name = st.dictionaries(st.sampled_from(elements), st.sampled_from(DTYPES))
    dtype = data.draw(st.none() | st.sampled_from(["float32", "float64"]) | by_name)
    is_dense = data.draw(st.booleans())
    dataset = CellDataset(
        collection,
        BlockShuffling(block_size=data.draw(st.integers(1, 5))),
        batch_size=data.draw(st.integers(1, 9)),
        fetch_factor=data.draw(st.integers(1, 4)),
        seed=0,
        dense=is_dense,
        dtype=dtype,
    )
    seen = []
    for minibatch in dataset:
        here = minibatch.rows.numpy()
        seen += here.tolist()
        assert list(minibatch.keys()) == elements
        for name, element in dataset.collection.elements.items():
            asked = dtype.get(name) if isinstance(dtype, dict) else dtype
            values = dense(minibatch[name])
            assert values.dtype == (asked or element.dtype)
            assert np.array_equal(values, expected[name].to_numpy()[here].astype(values.dtype))
            is_sparse = minibatch[name].layout == torch.sparse_csr
            assert is_sparse == (element.layout == "csr" and not is_dense)
    assert sorted(seen) == list(range(len(dataset.collection)))


class TestRows:
    def test_whose_columns_are_in_any_order_in_one_of_them(self, tmp_path):
        ordered = sp.csr_matrix(np.array([[1, 2, 0], [0, 3, 4]], np.float32))
        disordered = sp.csr_matrix(
            (np.arange(1, 5, dtype=np.float32), np.array([2, 0, 1, 0]), np.array([0, 2, 4])), (2, 3)
        )
        adata = ad.AnnData(ordered, layers={"other": disordered})
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
            adata.obsm["X_pca"] = np.ones((4, n_columns))
            adata.write_h5ad(tmp_path / f"{n_columns}.h5ad")
        first, second = tmp_path / "2.h5ad", tmp_path / "3.h5ad"
        expected = f"^{second}: `obsm/X_pca` has 3 columns, but 2 columns in {first}; write"
        with pytest.raises(MismatchError, match=expected):
            open_collection(tmp_path, elements=["obsm/X_pca"])
        assert len(open_collection(tmp_path)) == 8

    @pytest.mark.parametrize("kind", ["of text", "by gene"])
    def test_arrays_that_cannot_be_read_by_cell(self, tmp_path, kind):
        adata = ad.AnnData(np.eye(4, dtype=np.float32))
        made, words = {
            "of text": (
                pd.DataFrame({"a": 1.0, "b": "x", "c": "y"}, index=adata.obs_names),
                "is neither dense nor CSR .*'dataframe'.*; write it as an array",
            ),
            "by gene": (sp.csc_matrix(np.eye(4)), r"\(CSC\).*; make it CSR with anndata"),
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
