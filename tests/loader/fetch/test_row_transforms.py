"""What a user's own row transform returns is checked before it is delivered."""

from dataclasses import dataclass
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection
from cellfeed.fetch import RowTransform
from cellfeed.sources import CsrRows

COUNTS = sp.csr_array(np.random.default_rng(0).poisson(0.5, (40, 6)).astype(np.float32))


@dataclass(frozen=True)
class Returning(RowTransform):
    """Returns what a function makes of rows."""

    kind: str
    row_bytes = 8

    def bind(self, element, counters):
        return lambda rows, numbers, key, pool: MADE[self.kind](rows)


MADE: dict[str, Any] = {
    "sums": lambda rows: {"sums": np.diff(rows.indptr)},
    "one row less": lambda rows: {"sums": np.diff(rows.indptr)[1:]},
    "a sum of all": lambda rows: {"sums": rows.data.sum()},
    "a list": lambda rows: {"sums": np.diff(rows.indptr).tolist()},
    "an obs column": lambda rows: {"plate": np.diff(rows.indptr)},
    "an array": lambda rows: np.diff(rows.indptr),
    "nothing": lambda rows: None,
}


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    path = tmp_path_factory.mktemp("cells") / "cells.h5ad"
    ad.AnnData(COUNTS, obs={"plate": ["a", "b"] * 20}).write_h5ad(path)
    return open_collection(path, obs=["plate"])


def dataset(collection, *transforms):
    options: dict[str, Any] = {"seed": 0, "as_torch": False, "transform": transforms}
    return CellDataset(collection, BlockShuffling(1), 8, 2, **options)


def test_what_it_returns_is_in_the_minibatch(collection):
    for cells in dataset(collection, Returning("sums")):
        assert np.array_equal(cells["sums"], np.diff(COUNTS.indptr)[cells.rows])
        assert "X" not in cells.elements


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("one row less", "a row for each of 8 cells, but 'sums' is 7 rows$"),
        ("a sum of all", "a row for each of 8 cells, but 'sums' is float32$"),
        ("a list", "a row for each of 8 cells, but 'sums' is list$"),
        ("an obs column", "returns 'plate', which is an obs column; choose another name$"),
        ("an array", "must return a dictionary of arrays, .*, but returned ndarray$"),
        ("nothing", "must return a dictionary of arrays, .*, but returned NoneType$"),
    ],
)
def test_anything_else_is_one_line_that_names_it(collection, kind, said):
    with pytest.raises(ParameterError, match=rf"^Returning\(kind='{kind}'\) .*{said}"):
        list(dataset(collection, Returning(kind)))


def test_none_may_follow(collection):
    with pytest.raises(ParameterError, match=r"at most one of rows, such as a tokenizer, but got"):
        dataset(collection, Returning("sums"), Returning("nothing"))


def test_rows_may_be_sparse(collection):
    MADE["halves"] = lambda rows: {
        "halves": CsrRows(rows.indptr, rows.indices, rows.data / 2, n_vars=rows.shape[1])
    }
    for cells in dataset(collection, Returning("halves")):
        assert (cells["halves"] != COUNTS[cells.rows] / 2).nnz == 0
