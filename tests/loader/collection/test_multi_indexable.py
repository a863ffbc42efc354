from typing import Any, cast

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import MultiIndexable, ParameterError

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
        assert [part is whole for part, whole in zip(make().values(), (X, Y), strict=True)] == [
            True,
            True,
        ]
        assert make().count == 2
        assert dict(make().items()) == {"X": X, "y": Y}
        assert [part is whole for part, whole in zip(make(), (X, Y), strict=True)] == [True, True]
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


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (MultiIndexable, "must have the same length, but got lengths of none"),
        (lambda: MultiIndexable(X, Y[:3]), r"must have the same length, but got lengths \[3, 4\]"),
        (lambda: MultiIndexable(X, y=Y), "must all be named or all be unnamed, but got both"),
        (lambda: MultiIndexable(X, Y, names=["X"]), "`names` must name each .* got 1 for 2"),
        (
            lambda: MultiIndexable(X, unstructured=cast("Any", "x")),
            "must be a mapping by name, but got 'x'",
        ),
        (
            lambda: MultiIndexable(X, unstructured=cast("Any", [1])),
            "`unstructured` must be a mapping",
        ),
        (lambda: MultiIndexable(X, 5), "must have a length, but got one of type int; give it"),
        (lambda: MultiIndexable(None), "an indexable must have a length, but got None; give it"),
        (lambda: MultiIndexable(X=X, names=["X"]), "`names` must name each .* got 1 for 0"),
    ],
)
def test_bad_parameters(make, problem):
    with pytest.raises(ParameterError, match=problem):
        make()
