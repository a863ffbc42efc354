"""Rows with several parts, and transforms that make them or tensors."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    ParameterError,
    Streaming,
)
from cellfeed.scdataset import MultiIndexable, adata_to_mindex, hf_tahoe_to_tensor

X, Y = np.arange(12).reshape(4, 3), np.array([0, 1, 0, 1])
MADE_IN_EACH_WAY = {
    "by name": lambda: MultiIndexable(X=X, y=Y),
    "a dictionary": lambda: MultiIndexable({"X": X, "y": Y}),
    "a dictionary and a name": lambda: MultiIndexable({"X": X}, y=Y),
    "by place with names": lambda: MultiIndexable(X, Y, names=["X", "y"]),
}


@pytest.mark.parametrize("make", MADE_IN_EACH_WAY.values(), ids=MADE_IN_EACH_WAY)
class TestNamed:
    def test_gives_one_by_name_or_place(self, make):
        assert make()["X"] is make()[0] is X
        assert make()["y"] is make()[np.int64(1)] is make()[-1] is Y

    def test_has_names_and_items(self, make):
        assert make().names == ["X", "y"]
        assert make().keys() == ["X", "y"]
        assert make().count == 2
        assert dict(make().items()) == {"X": X, "y": Y}
        for parts in (make().values(), make()):
            assert [id(part) for part in parts] == [id(X), id(Y)]
        assert repr(make()) == "MultiIndexable(X, y; 4 rows)"

    @pytest.mark.parametrize(
        "rows",
        [np.array([3, 1]), [3, 1], slice(1, None), Y == 1, np.array([], dtype=int)],
        ids=["array", "list", "slice", "mask", "none"],
    )
    def test_rows_are_taken_from_all(self, make, rows):
        selected = make()[rows]
        assert isinstance(selected, MultiIndexable)
        assert selected.names == ["X", "y"]
        assert np.array_equal(selected["X"], X[rows])
        assert np.array_equal(selected["y"], Y[rows])
        assert len(selected) == len(Y[rows])

    def test_an_unknown_name(self, make):
        with pytest.raises(KeyError, match=r"no indexable is named 'z'; the names are"):
            make()["z"]


def test_without_names():
    multi = MultiIndexable(X, Y)
    assert multi.names is None
    assert [part.shape for part in multi] == [(4, 3), (4,)]
    assert multi.count == 2
    assert multi.keys() == [0, 1]
    assert dict(multi.items()) == {0: X, 1: Y} == dict(enumerate(multi.values()))
    assert multi[[2]][1].tolist() == [0]
    assert repr(multi) == "MultiIndexable(0, 1; 4 rows)"
    with pytest.raises(KeyError, match="no indexable is named 'X'"):
        multi["X"]


def test_what_is_unstructured_stays_as_it_is():
    multi = MultiIndexable(X=X, unstructured={"genes": ["a", "b", "c"]})
    assert multi[[1]][slice(0, 1)].unstructured == {"genes": ["a", "b", "c"]}
    assert multi.unstructured_keys == ["genes"]
    assert MultiIndexable(X).unstructured_keys == []


def test_takes_whatever_has_rows():
    adata = ad.AnnData(X.astype(np.float32))
    multi = MultiIndexable(a=sp.csr_array(X), b=sp.csr_matrix(X), c=adata, d=MultiIndexable(Y))
    assert len(multi) == 4
    selected = multi[[1, 3]]
    for name in "ab":
        assert np.array_equal(selected[name].toarray(), X[[1, 3]])
    assert np.array_equal(selected["c"].X, X[[1, 3]])
    assert selected["d"][0].tolist() == [1, 1]


NOT_MADE: list[tuple[Callable[[], Any], str]] = [
    (MultiIndexable, "must have the same length, but got lengths of none"),
    (lambda: MultiIndexable(X, Y[:3]), r"must have the same length, but got lengths \[3, 4\]"),
    (lambda: MultiIndexable(X, y=Y), "must all be named or all be unnamed, but got both"),
    (lambda: MultiIndexable(X, Y, names=["X"]), "`names` must name each .* got 1 for 2"),
    (
        lambda: MultiIndexable(X, unstructured=cast("Any", "x")),
        "must be a mapping by name, but got 'x'",
    ),
    (lambda: MultiIndexable(X, unstructured=cast("Any", [1])), "`unstructured` must be a mapping"),
    (lambda: MultiIndexable(X, 5), "must have a length, but got one of type int; give it"),
    (lambda: MultiIndexable(None), "an indexable must have a length, but got None; give it"),
    (lambda: MultiIndexable(X=X, names=["X"]), "`names` must name each .* got 1 for 0"),
]


@pytest.mark.parametrize(("make", "problem"), NOT_MADE)
def test_bad_parameters(make, problem):
    with pytest.raises(ParameterError, match=problem):
        make()


N_ROWS = 24
CELLS: list[dict[str, Any]] = [
    {"genes": [0, 5, 9], "expressions": [1.0, 2.0, 3.0]},
    {"genes": [], "expressions": []},
    {"genes": np.array([4]), "expressions": np.array([7])},
]


@pytest.fixture
def adata():
    X = np.random.default_rng(0).poisson(0.5, (N_ROWS, 7)).astype(np.float32)
    obs = pd.DataFrame(
        {"cell_type": pd.Categorical(["B", "T"] * (N_ROWS // 2)), "number": np.arange(N_ROWS)},
        index=[f"cell{k}" for k in range(N_ROWS)],
    )
    return ad.AnnData(sp.csr_matrix(X), obs=obs)


@pytest.fixture(params=["in memory", "backed", "collection", "dense"])
def stored(request, adata, tmp_path):
    if request.param == "backed":
        adata.write_h5ad(tmp_path / "a.h5ad")
        return ad.read_h5ad(tmp_path / "a.h5ad", backed="r")
    if request.param == "collection":
        return AnnCollection([adata[:10].copy(), adata[10:].copy()])
    if request.param == "dense":
        return ad.AnnData(adata.X.toarray(), obs=adata.obs)
    return adata


class TestAdataToMindex:
    def test_rows_come_with_their_obs(self, stored, adata):
        as_parts = partial(adata_to_mindex, columns=["number", "cell_type"])
        dataset = CellDataset(stored, BlockShuffling(4), 8, 2, fetch_transform=as_parts, seed=0)
        seen = []
        for minibatch in dataset:
            assert isinstance(minibatch, MultiIndexable)
            assert list(minibatch.keys()) == ["X", "number", "cell_type"]
            rows = minibatch["number"]
            assert type(minibatch["X"]) is np.ndarray
            assert np.array_equal(minibatch["X"], adata.X.toarray()[rows])
            assert minibatch["cell_type"].tolist() == adata.obs["cell_type"].iloc[rows].tolist()
            seen += rows.tolist()
        assert sorted(seen) == list(range(N_ROWS))

    def test_without_columns_there_is_x_alone(self, adata):
        found = adata_to_mindex(adata)
        assert list(found.keys()) == ["X"]
        assert np.array_equal(found["X"], adata.X.toarray())

    @pytest.mark.parametrize(
        ("columns", "error", "said"),
        [
            (["donor"], ColumnError, "^obs has no column 'donor'"),
            (["X"], ParameterError, "^an obs column must not be named 'X'"),
            ("cell_type", ParameterError, r"write \['cell_type'\]$"),
        ],
    )
    def test_mistakes(self, adata, columns, error, said):
        with pytest.raises(error, match=said):
            adata_to_mindex(adata, columns)


class TestHfTahoeToTensor:
    @pytest.mark.parametrize("as_dict", [False, True])
    def test_values_are_where_their_genes_are(self, as_dict):
        by_name = {name: [cell[name] for cell in CELLS] for name in ("genes", "expressions")}
        found = hf_tahoe_to_tensor(by_name if as_dict else CELLS, num_genes=10)
        expected = torch.zeros(3, 10)
        expected[0, [0, 5, 9]] = torch.tensor([1.0, 2.0, 3.0])
        expected[2, 4] = 7
        assert found.dtype == torch.float32
        assert torch.equal(found, expected)

    def test_tahoe_has_62713_genes(self):
        assert hf_tahoe_to_tensor(CELLS[:1]).shape == (1, 62_713)

    @pytest.mark.slow  # imports datasets
    def test_a_dataset_of_huggingface_is_read_so(self):
        datasets = pytest.importorskip("datasets")
        columns = {"genes": [[0, 2], [1], [2]], "expressions": [[1.0, 2.0], [3.0], [4.0]]}
        dataset = CellDataset(
            datasets.Dataset.from_dict(columns),
            Streaming(),
            batch_size=2,
            fetch_transform=partial(hf_tahoe_to_tensor, num_genes=3),
        )
        assert torch.cat(list(dataset)).tolist() == [[1, 0, 2], [0, 3, 0], [0, 0, 4]]

    @pytest.mark.parametrize(
        ("batch", "error", "said"),
        [
            ("cells", ParameterError, "must be a dictionary or a list of dictionaries"),
            ({"genes": [[0]], "expressions": [[1, 2]]}, FormatError, "differ in length"),
            ({"genes": [[10]], "expressions": [[1]]}, FormatError, "does not fit num_genes=10"),
            ({"genes": [[-1]], "expressions": [[1]]}, FormatError, "does not fit num_genes=10"),
        ],
    )
    def test_mistakes(self, batch, error, said):
        with pytest.raises(error, match=said):
            hf_tahoe_to_tensor(batch, num_genes=10)
