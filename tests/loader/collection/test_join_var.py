"""Genes of several files as those of one collection, against anndata's `concat`."""

import itertools
import pickle
import warnings
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.zarr_stores import written_at_once

from cellfeed import (
    BlockShuffling,
    CellDataset,
    MismatchError,
    ParameterError,
    Streaming,
    open_collection,
)

GENES = [f"gene{k}" for k in range(12)]
JOINS = ("same", "inner", "outer", "genes")


@st.composite
def files(draw: st.DrawFn, join: str) -> list[dict[str, Any]]:
    """Draw files that can be joined so."""
    shared = draw(st.lists(st.sampled_from(GENES), min_size=1, unique=True))
    made = []
    for k in range(draw(st.integers(1, 3))):
        own = [] if join == "same" else [gene for gene in GENES if gene not in shared]
        more = draw(st.lists(st.sampled_from(own), unique=True)) if own else []
        made.append(
            {
                "genes": draw(st.permutations([*shared, *more])),
                "n_rows": draw(st.integers(1, 20)),
                "layout": draw(st.sampled_from(["csr", "csr", "dense"])),
                "dtype": draw(st.sampled_from(["float32", "float64", "uint8", "int64"])),
                "format": draw(st.sampled_from(["h5ad", "h5ad", "zarr"])),
                "compression": draw(st.sampled_from(["gzip", None])),
                "disordered": draw(st.booleans()),
                "repeated": draw(st.sampled_from([False, False, True])),
                "chunks": draw(st.sampled_from([None, (7, 5), (4, 11)])),
                "seed": 10 * draw(st.integers(0, 9)) + k,
            }
        )
    return made


def write(path: Path, file: dict[str, Any]) -> ad.AnnData:
    rng = np.random.default_rng(file["seed"])
    shape = (file["n_rows"], len(file["genes"]))
    X: Any = np.where(rng.random(shape) < 0.5, rng.integers(1, 60, shape), 0).astype(file["dtype"])
    if file["layout"] == "csr":
        X = sp.csr_matrix(X)
        if file["repeated"]:  # each element twice, which counts as their sum
            twice = (np.repeat(X.data, 2), np.repeat(X.indices, 2), 2 * X.indptr)
            X = sp.csr_matrix(twice, shape=shape)
        if file["disordered"]:
            for start, stop in itertools.pairwise(X.indptr):
                X.indices[start:stop] = X.indices[start:stop][::-1]
                X.data[start:stop] = X.data[start:stop][::-1]
    obs = pd.DataFrame(index=[f"{file['seed']}-{k}" for k in range(shape[0])])
    adata = ad.AnnData(X, obs=obs, var=pd.DataFrame(index=list(file["genes"])))
    adata.layers["twice"] = X * 2
    adata.obsm["first"] = np.arange(2.0 * shape[0]).reshape(-1, 2)
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=3):
        warnings.simplefilter("ignore")  # anndata's and zarr's own
        if file["format"] == "zarr":
            with written_at_once(path) as memory:
                adata.write_zarr(memory)
        else:
            adata.write_h5ad(path, compression=file["compression"])
            if file["layout"] == "csr" and file["chunks"]:
                _rechunk(path, file["chunks"], file["compression"])
    return adata


def _rechunk(path: Path, chunks: tuple[int, int], compression: str | None) -> None:
    """Write column indices and values in chunks of their own."""
    with h5py.File(path, "r+") as file:
        for name, size in zip(("indices", "data"), chunks, strict=True):
            for element in ("X", "layers/twice"):
                values = file[element][name][:]
                del file[element][name]
                file[element].create_dataset(
                    name,
                    data=values,
                    maxshape=(None,),
                    chunks=(max(1, min(size, values.size)),),
                    compression=compression,
                )


def in_memory(adatas: list[ad.AnnData], join: str, genes: list[str] | None) -> pd.DataFrame:
    """The oracle: all cells, with the genes as `anndata.concat` joins them."""
    tables = [ad.AnnData(dense(each.X), each.obs, each.var) for each in adatas]
    both = ad.concat(tables, join="outer" if join == "outer" else "inner", fill_value=0)
    frame: pd.DataFrame = both.to_df()
    return frame[genes] if genes else frame


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder, numbers = tmp_path_factory.mktemp("joins"), itertools.count()

    def store_(some: list[dict[str, Any]]) -> tuple[list[Path], list[ad.AnnData]]:
        paths = [folder / f"{next(numbers):05}.{file['format']}" for file in some]
        return paths, [write(path, file) for path, file in zip(paths, some, strict=True)]

    return store_


def simple(genes: list[str], **options: Any) -> dict[str, Any]:
    defaults = {
        "n_rows": 6,
        "layout": "csr",
        "dtype": "float32",
        "format": "h5ad",
        "compression": "gzip",
        "disordered": False,
        "repeated": False,
        "chunks": None,
        "seed": 0,
    }
    return {"genes": genes, **defaults, **options}


@pytest.mark.parametrize("join", JOINS)
def test_cells_are_those_of_anndata(store, join):
    @settings(
        max_examples=25,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(some=files(join), data=st.data())
    def check(some: list[dict[str, Any]], data: st.DataObject) -> None:
        paths, adatas = store(some)
        shared = sorted(set.intersection(*(set(file["genes"]) for file in some)))
        genes = None
        if join == "genes":
            genes = data.draw(st.lists(st.sampled_from(shared), min_size=1, unique=True))
        collection = open_collection(
            paths,
            elements=["X", "obsm/first", "layers/twice"],
            **({"genes": genes} if genes else {"join_vars": join}),
        )
        expected = in_memory(adatas, join, genes)
        assert set(collection.var_names) == set(expected.columns)
        if join in ("same", "genes"):
            assert collection.var_names.tolist() == (genes or list(some[0]["genes"]))
        values = expected[collection.var_names.tolist()].to_numpy()
        rows = np.array(data.draw(st.lists(st.integers(0, len(collection) - 1))), np.int64)
        cells = collection[rows]
        assert sp.issparse(cells.X) == any(file["layout"] == "csr" for file in some)
        assert cells.X.dtype == np.result_type(*(file["dtype"] for file in some))
        assert np.array_equal(dense(cells.X), values[rows])
        if isinstance(cells.X, sp.csr_array):
            assert cells.X.has_canonical_format
            assert cells.X.nnz == np.count_nonzero(values[rows])
        first = np.concatenate([adata.obsm["first"] for adata in adatas])
        assert np.array_equal(cells["obsm/first"], first[rows])
        dataset = CellDataset(
            collection,
            BlockShuffling(block_size=data.draw(st.integers(1, 4))),
            batch_size=data.draw(st.integers(1, 9)),
            fetch_factor=data.draw(st.integers(1, 3)),
            seed=0,
            dense=data.draw(st.booleans()),
            dtype="float64",
        )
        seen = []
        for minibatch in dataset:
            here = np.asarray(minibatch.rows)
            seen += here.tolist()
            assert np.array_equal(dense(minibatch.X), values[here])
            assert np.array_equal(dense(minibatch["layers/twice"]), 2 * values[here])
            assert np.array_equal(dense(minibatch["obsm/first"]), first[here])
        assert sorted(seen) == list(range(len(collection)))

    check()


class TestTwoFiles:
    @pytest.fixture
    def paths(self, store):
        return store([simple(list("abcd")), simple(list("dcxb"), seed=1)])[0]

    def test_order_is_that_of_first_appearance(self, paths):
        assert open_collection(paths, join_vars="inner").var_names.tolist() == list("bcd")
        assert open_collection(paths, join_vars="outer").var_names.tolist() == list("abcdx")
        assert open_collection(paths, genes=["d", "b"]).var_names.tolist() == ["d", "b"]

    def test_through_worker_processes_and_a_pickle(self, paths):
        collection = open_collection(paths, genes=["d", "b"])
        expected = dense(collection[:].X)
        copy = pickle.loads(pickle.dumps(collection))
        assert np.array_equal(dense(copy[:].X), expected)
        dataset = CellDataset(collection, BlockShuffling(block_size=2), 4, fetch_factor=1, seed=0)
        n_cells = 0
        for minibatch in dataset.loader(num_workers=2):
            n_cells += len(minibatch)
            assert np.array_equal(dense(minibatch.X), expected[np.asarray(minibatch.rows)])
        assert n_cells == 12

    def test_rows_that_are_asked_for_twice(self, paths):
        collection = open_collection(paths, join_vars="outer")
        rows = [7, 0, 7, 11, 0]
        assert np.array_equal(dense(collection[rows].X), dense(collection[:].X)[rows])

    def test_less_is_delivered_than_is_read(self, paths):
        collection = open_collection(paths, genes=["d"])
        minibatch = next(iter(CellDataset(collection, Streaming(), 12, seed=0)))
        assert minibatch.X.shape == (12, 1)
        whole = open_collection(paths, join_vars="outer")[:].X
        assert np.count_nonzero(dense(minibatch.X)) == np.count_nonzero(whole.toarray()[:, 3])
        assert collection.mean_row_bytes(dense=True) == 4

    def test_kept_minibatches_stay_as_they_are(self, paths):
        collection = open_collection(paths, join_vars="outer")
        expected = dense(collection[:].X)
        dataset = CellDataset(collection, BlockShuffling(block_size=1), 3, fetch_factor=2, seed=0)
        for minibatch in [each for _ in range(4) for each in dataset]:
            assert np.array_equal(dense(minibatch.X), expected[np.asarray(minibatch.rows)])


class TestRefused:
    def test_genes_that_others_do_not_have(self, store):
        (first, second), _ = store([simple(list("abc")), simple(list("abd"))])
        expected = (
            rf"^{second}: has other genes than {first} \(2 of 3 are shared\); "
            "give join_vars='inner' or 'outer', or `genes`$"
        )
        with pytest.raises(MismatchError, match=expected):
            open_collection([first, second])

    def test_genes_that_a_file_lacks(self, store):
        (first, second), _ = store([simple(list("abc")), simple(list("abd"))])
        with pytest.raises(
            MismatchError, match=f"^{second}: lacks 'c' of `genes`; leave out these genes, "
        ):
            open_collection([first, second], genes=["a", "c"])

    def test_files_that_share_none(self, store):
        paths, _ = store([simple(list("ab")), simple(list("cd"))])
        with pytest.raises(
            MismatchError, match=f"^{paths[0]}: none of its genes is in all other file"
        ):
            open_collection(paths, join_vars="inner")

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"join_vars": "left"}, "`join_vars` must be 'same', 'inner' or 'outer', but got 'le"),
            (
                {"genes": "ab"},
                (
                    r"`genes` must be a list of names or booleans, but got the text 'ab'; "
                    r"write \['ab'\] for one gene, or adata\.var\['ab'\] for such a column"
                ),
            ),
            ({"genes": []}, "`genes` is empty; give"),
            (
                {"genes": pd.Series([True, None, False], list("abc"), dtype="boolean")},
                "`genes` has 1 missing values; leave them out, or write False",
            ),
            ({"genes": ["a", "b", "a"]}, "`genes` names 'a' twice; give each gene once"),
            (
                {"genes": ["a"], "join_vars": "outer"},
                "`genes` and `join_vars` cannot be combined; leave out join_vars='outer'",
            ),
        ],
    )
    def test_parameters(self, store, options, words):
        paths, _ = store([simple(list("ab"))])
        with pytest.raises(ParameterError, match=f"^{words}"):
            open_collection(paths, **options)


class TestChosenByBooleans:
    @pytest.fixture
    def paths(self, write_h5ad):
        X = np.arange(6, dtype=np.float32).reshape(2, 3)
        return [write_h5ad(X, genes=["a", "b", "c"]), write_h5ad(X[:, ::-1], genes=["c", "b", "a"])]

    @pytest.mark.parametrize(
        "genes",
        [
            np.array([True, False, True]),
            [True, False, True],
            pd.Series([True, True, False], index=["c", "a", "b"]).sort_index(),
            pd.DataFrame({"highly_variable": [True, False, True]}, index=list("abc"))[
                "highly_variable"
            ],
        ],
        ids=["mask", "list", "series", "column"],
    )
    def test_they_are_those_genes(self, paths, genes):
        collection = open_collection(paths, genes=genes)
        assert collection.var_names.tolist() == ["a", "c"]
        assert dense(collection[:].X).tolist() == [[0, 2], [3, 5]] * 2

    def test_a_series_has_its_own_order(self, paths):
        genes = pd.Series([True, False, True], index=["c", "b", "a"])
        assert open_collection(paths, genes=genes).var_names.tolist() == ["c", "a"]

    @pytest.mark.parametrize(
        ("genes", "error", "message"),
        [
            ([True, False], ParameterError, r"has 3 genes, but `genes` is a mask of shape \(2,\)"),
            ([False] * 3, ParameterError, "`genes` is empty"),
            (pd.Series([True], index=["d"]), MismatchError, "lacks 'd' of `genes`"),
        ],
    )
    def test_others_are_refused(self, paths, genes, error, message):
        with pytest.raises(error, match=message):
            open_collection(paths, genes=genes)

    def test_with_a_join(self, paths):
        with pytest.raises(ParameterError, match="`genes` and `join_vars` cannot be combined"):
            open_collection(paths, genes=np.array([True, False, True]), join_vars="inner")


class TestTableOfGenes:
    """`Collection.var`, against what anndata's `concat` merges."""

    def test_columns_in_which_files_agree(self, tmp_path):
        var = pd.DataFrame(
            {
                "kind": pd.Categorical(["x", "y", "x"]),
                "length": [1, 2, 3],
                "score": [0.5, np.nan, 1.5],
                "own": [1, 1, 1],
            },
            index=list("abc"),
        )
        other = var.iloc[::-1].assign(own=[1, 2, 3])
        for name, table in (("1", var), ("2", other), ("3", var.drop(columns="score"))):
            ad.AnnData(np.ones((2, 3), np.float32), var=table).write_h5ad(tmp_path / f"{name}.h5ad")
        one = open_collection(tmp_path / "1.h5ad").var
        assert one.astype(object).equals(var.astype(object))
        found = open_collection([tmp_path / "1.h5ad", tmp_path / "2.h5ad"], genes=["c", "a"]).var
        assert found.index.tolist() == ["c", "a"]
        assert found.to_dict("list") == {"kind": ["x"] * 2, "length": [3, 1], "score": [1.5, 0.5]}
        assert [*open_collection(tmp_path).var] == ["kind", "length"]

    def test_genes_that_some_files_have(self, tmp_path):
        for k, genes in enumerate(("ab", "bc")):
            var = pd.DataFrame({"upper": [each.upper() for each in genes]}, index=[*genes])
            ad.AnnData(np.ones((2, 2), np.float32), var=var).write_h5ad(tmp_path / f"{k}.h5ad")
        found = open_collection(tmp_path, join_vars="outer").var
        assert found["upper"].to_dict() == {"a": "A", "b": "B", "c": "C"}

    def test_names_that_repeat(self, tmp_path):
        var = pd.DataFrame({"number": [1, 2]}, index=["a", "a"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for k in range(2):
                ad.AnnData(np.ones((2, 2)), var=var).write_h5ad(tmp_path / f"{k}.h5ad")
        found = open_collection(tmp_path).var
        assert found.index.tolist() == ["a", "a"]
        assert found["number"].tolist() == [1, 2]

    def test_a_copy_for_each_access(self):
        adata = ad.AnnData(np.eye(2), var=pd.DataFrame({"number": [1, 2]}, index=["a", "b"]))
        collection = open_collection(adata)
        collection.var["number"] = 0
        assert adata.var["number"].tolist() == [1, 2]


@pytest.mark.parametrize("missing", [(), (2,), (0, 3)])
def test_names_as_pandas_3_writes_them(tmp_path, missing):
    """An array of text and a mask, against anndata."""
    path, names = tmp_path / "cells.h5ad", ["a", "b", "c", "d\u00e9"]
    ad.AnnData(np.ones((5, 4), np.float32)).write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file["var/_index"]
        index = file.create_group("var/_index")
        index.attrs.update({"encoding-type": "nullable-string-array", "encoding-version": "0.1.0"})
        index["values"] = np.array(names, object)
        index["values"].attrs.update({"encoding-type": "string-array", "encoding-version": "0.2.0"})
        index["mask"] = np.isin(np.arange(4), missing)
        index["mask"].attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        read = ad.io.read_elem(file["var/_index"])
    expected = [None if pd.isna(name) else name for name in read]
    assert expected == [None if k in missing else name for k, name in enumerate(names)]
    assert list(open_collection(path).var_names) == expected
