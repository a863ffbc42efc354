"""Genes of several files as those of one collection, and their table."""

import functools
import itertools
import pickle
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.collection.stored import write as write_adata
from tests.loader.matrices import dense, rows_of

from cellfeed import (
    BlockShuffling,
    CellDataset,
    MismatchError,
    ParameterError,
    Streaming,
    open_collection,
)

pytestmark = pytest.mark.filterwarnings("ignore:Variable names are not unique:UserWarning")


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    folder, numbers = tmp_path_factory.mktemp("genes"), itertools.count(1)

    @functools.cache
    def write_(genes: str, copy: int = 0) -> Path:
        """Write three cells in which every value is another, and is no value of another file."""
        number = next(numbers)
        values = 100 * number + np.arange(3 * len(genes), dtype=np.float32).reshape(3, -1)
        obs = pd.DataFrame(index=[f"{number}-{k}" for k in range(3)])
        adata = ad.AnnData(sp.csr_matrix(values), obs=obs, var=pd.DataFrame(index=list(genes)))
        return write_adata(adata, folder / f"{number:04}.h5ad")

    return write_


@pytest.fixture(scope="module")
def store(write):
    return lambda *genes: [write(each, number) for number, each in enumerate(genes)]


class TestTwoFiles:
    @pytest.fixture
    def paths(self, store):
        return store("abcd", "dcxb")

    def test_order_is_that_of_first_appearance(self, paths, store):
        assert open_collection(paths, join_vars="inner").var_names.tolist() == list("bcd")
        assert open_collection(store("abc", "acb", "cba")).var_names.tolist() == list("abc")
        assert open_collection(paths, join_vars="outer").var_names.tolist() == list("abcdx")
        assert open_collection(paths, genes=["d", "b"]).var_names.tolist() == ["d", "b"]

    def test_a_pickle_has_the_same_genes(self, paths):
        collection = open_collection(paths, genes=["d", "b"])
        expected = dense(collection[:].X)
        assert np.array_equal(dense(pickle.loads(pickle.dumps(collection))[:].X), expected)

    def test_less_is_delivered_than_is_read(self, paths):
        collection = open_collection(paths, genes=["d"])
        minibatch = next(iter(CellDataset(collection, Streaming(), 6, seed=0)))
        assert minibatch.X.shape == (6, 1)
        whole = open_collection(paths, join_vars="outer")[:].X
        assert np.array_equal(dense(minibatch.X)[:, 0], dense(whole)[:, 3])
        assert collection.mean_row_bytes(dense=True) == 4

    def test_kept_minibatches_stay_as_they_are(self, paths):
        collection = open_collection(paths, join_vars="outer")
        expected = dense(collection[:].X)
        dataset = CellDataset(collection, BlockShuffling(block_size=1), 3, fetch_factor=2, seed=0)
        assert len(rows_of([each for _ in range(4) for each in dataset], expected)) == 4 * 6


TOLD = "give join_vars='inner' or join_vars='outer'"


NOT_JOINED: list[tuple[tuple[str, str], dict[str, Any], str]] = [
    *[
        (
            ("abc", others),
            {},
            rf"^{{1}}: has other genes than {{0}} \({n} of 3 are shared\); {TOLD}",
        )
        for others, n in (("abd", 2), ("ab", 2), ("abcd", 3))
    ],
    (("abc", "abd"), {"genes": ["a", "c"]}, "^{1}: lacks 'c' of `genes`; leave out these genes, "),
    (("ab", "cd"), {"join_vars": "inner"}, "^{0}: none of its genes is in all other file"),
]


NO_GENES: list[tuple[dict[str, Any], str]] = [
    ({"join_vars": "left"}, "`join_vars` must be one of 'same', 'inner', 'outer', but got 'le"),
    (
        {"genes": "ab"},
        (
            r"`genes` must be a list of names or booleans, but got the text 'ab'; "
            r"write \['ab'\]$"
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
]


class TestRefused:
    @pytest.mark.parametrize(("genes", "options", "message"), NOT_JOINED)
    def test_genes_that_cannot_be_joined(self, store, genes, options, message):
        paths = store(*genes)
        with pytest.raises(MismatchError, match=message.format(*paths)):
            open_collection(paths, **options)

    @pytest.mark.parametrize(("options", "words"), NO_GENES)
    def test_parameters(self, store, options, words):
        paths = store("ab")
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
            (
                [True, False],
                ParameterError,
                r"3 genes, but `genes` is a mask of shape \(2,\); give names, or booleans in a pa",
            ),
            ([False] * 3, ParameterError, "`genes` is empty"),
            (pd.Series([True], index=["d"]), MismatchError, "lacks 'd' of `genes`"),
        ],
    )
    def test_others_are_refused(self, paths, genes, error, message):
        with pytest.raises(error, match=message):
            open_collection(paths, genes=genes)


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
        var = collection.var
        var["number"] = 0
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
    # Genes without a name are read by position, and matter by name only where they are chosen.
    named = [name for name in expected if name is not None][::-1]
    other = ad.AnnData(np.ones((5, 4), np.float32), var=pd.DataFrame(index=names[::-1]))
    for paths in ([path], [path, other]):
        assert open_collection(paths, genes=named).var_names.tolist() == named
    mask = np.arange(4) % 2 == 0
    assert list(open_collection(path, genes=mask).var_names) == expected[::2]
    if missing:
        told = "2 genes have|1 gene has"
        with pytest.raises(MismatchError, match=f"({told}) no name, but genes are matched by name"):
            open_collection([path, other], genes=np.isin(np.arange(4), missing))


@given(data=st.data())
def test_a_mask_applies_by_position_where_names_repeat(data):
    """Of one or more files with the same genes, against anndata; of others, by name."""
    names = data.draw(GENES)
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names))))
    mask[data.draw(st.integers(0, len(names) - 1))] = True
    var = pd.DataFrame({"id": [f"id{k}" for k in range(len(names))]}, index=names)
    X = np.arange(2.0 * len(names)).reshape(2, -1)
    cells = [ad.AnnData(X + 100 * k, var=var) for k in range(data.draw(st.integers(1, 2)))]
    series = pd.Series(mask, names)
    forms = [mask, mask.tolist(), series, series.astype("boolean"), pd.Series(mask)]
    chosen = data.draw(st.sampled_from(forms))
    collection = open_collection(cells, genes=chosen)
    assert collection.var.equals(var[mask])
    assert np.array_equal(dense(collection[:].X), np.vstack([each.X[:, mask] for each in cells]))
    order = [*range(len(names))][::-1]
    other = ad.AnnData(X[:, order], var=var.iloc[order])
    if names[::-1] == names:
        return
    twice = {name for name in var.index[mask] if names.count(name) > 1}
    if twice:
        with pytest.raises(MismatchError, match="several genes have the same name: "):
            open_collection([*cells, other], genes=chosen)
    else:
        both = open_collection([*cells, other], genes=chosen)
        assert np.array_equal(dense(both[-2:].X), X[:, mask])
        assert both.var.equals(var[mask])


def test_a_mask_of_numbers_in_another_order_is_no_mask_by_position():
    cells = ad.AnnData(np.ones((2, 3)), var=pd.DataFrame(index=["a", "b", "c"]))
    with pytest.raises(MismatchError, match="`genes`"):
        open_collection(cells, genes=pd.Series([True, False, False])[::-1])


def test_a_table_whose_names_repeat_in_another_order_has_no_values_for_them():
    var = pd.DataFrame({"id": ["1", "2", "3"]}, index=["a", "b", "a"])
    cells = ad.AnnData(np.ones((2, 3)), var=var)
    cells.raw = ad.AnnData(np.ones((2, 4)), var=pd.DataFrame(index=["a", "c", "b", "a"]))
    found = open_collection(cells, elements=["raw/X"]).var["id"]
    assert found.astype(object).where(found.notna(), None).tolist() == [None, None, "2", None]


JOINS = ("same", "inner", "outer", "genes")
GENES = st.sampled_from(
    [[*each] for each in ("a", "ab", "ba", "aab", "aba", "bcd", "dbca", "abbc")]
)


def genes_wanted(files: list[list[str]], join: str, genes: list[str]) -> list[str] | None:
    """The oracle: the names by which genes are put together; None where they need no names."""
    if join == "genes":
        return genes if any(file != genes for file in files) else None
    if all(file == files[0] for file in files):
        return None
    sets = [set(file) for file in files]
    return sorted(set.intersection(*sets) if join == "inner" else set.union(*sets))


def joined(paths: list[Path], names: list[str]) -> np.ndarray:
    """The oracle: cells by pandas, which takes columns by name."""
    frames = [ad.read_h5ad(path).to_df() for path in paths]
    return np.vstack(
        [frame[[n for n in names if n in frame]].reindex(columns=names) for frame in frames]
    )


@pytest.mark.parametrize("join", JOINS)
@given(data=st.data())
def test_names_that_repeat_are_refused_where_their_names_matter_and_nowhere_else(store, join, data):
    first = data.draw(GENES)
    others = [first]
    if join == "same":
        others = data.draw(st.lists(st.permutations(first), max_size=2))
    elif join != "genes":
        others = data.draw(st.lists(st.just(first) | GENES, max_size=2))
    files, genes = [first, *map(list, others)], []
    if join == "genes":
        genes = data.draw(st.lists(st.sampled_from(sorted(set(first))), min_size=1, unique=True))
    names = genes_wanted(files, join, genes)
    if join == "inner" and names == []:
        return  # files that share none are refused for that
    paths = store(*map("".join, files))
    options = {"genes": genes} if join == "genes" else {"join_vars": join}
    twice = [{n for n, k in Counter(file).items() if k > 1} & set(names or ()) for file in files]
    refused = next((k for k, each in enumerate(twice) if each), None)
    if refused is not None:
        with pytest.raises(MismatchError) as caught:
            open_collection(paths, **options)
        said = str(caught.value)
        assert said.startswith(f"{paths[refused]}: several genes have the same name: ")
        assert [n for n in "abcd" if repr(n) in said] == sorted(twice[refused])
        return
    collection = open_collection(paths, **options)
    if names is None:
        expected = np.vstack([dense(ad.read_h5ad(path).X) for path in paths])
        assert collection.var_names.tolist() == first
    else:
        assert sorted(collection.var_names) == sorted(names)
        expected = np.nan_to_num(joined(paths, collection.var_names.tolist()))
    assert np.array_equal(dense(collection[:].X), expected)


def test_names_that_repeat_are_those_of_each_element(write):
    """Genes of ``raw`` may have one name where those of X have not, and the other way round."""
    path = write("ab", 9)
    adata = ad.read_h5ad(path)
    adata.raw = ad.AnnData(np.arange(9.0).reshape(3, 3), adata.obs, pd.DataFrame(index=list("aab")))
    adata.write_h5ad(path)
    assert open_collection(path, elements=["X"], genes=["b"]).n_vars == 1
    assert open_collection(path, elements=["raw/X"]).var_names.tolist() == list("aab")
    assert np.array_equal(
        open_collection(path, elements=["raw/X"], genes=["b"])[:].X[:, 0], [2, 5, 8]
    )
    told = f"^{path}: several genes have the same name: 'a'; leave "
    with pytest.raises(MismatchError, match=told):
        open_collection(path, elements=["X", "raw/X"], genes=["a"])


def test_many_names_that_repeat_are_shortened(write):
    path = write(2 * "abcdefghi")
    with pytest.raises(MismatchError, match="'a', 'b', 'c', 'd', 'e' and 4 others; leave"):
        open_collection(path, genes=[*"abcdefghi"])
