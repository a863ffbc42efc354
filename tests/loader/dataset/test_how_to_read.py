"""`dense`, `dtype`, `num_threads` and `transform` are refused where they would be ignored."""

import operator
import re

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch

from cellfeed import BlockShuffling, CellDataset, MultiIndexable, ParameterError, open_collection
from cellfeed.transforms import Log1p

TABLE = np.ones((20, 3), np.float32)
INDEXABLES = {
    "NumPy": TABLE,
    "torch": torch.from_numpy(TABLE),
    "CSR": sp.csr_matrix(TABLE),
    "AnnData": ad.AnnData(TABLE),
    "MultiIndexable": MultiIndexable(X=TABLE, y=np.arange(20)),
}


@pytest.mark.parametrize(
    "ignored",
    [{"dense": True}, {"dtype": "float64"}, {"num_threads": 2}, {"transform": Log1p()}],
    ids=str,
)
@pytest.mark.parametrize("indexable", INDEXABLES.values(), ids=INDEXABLES)
def test_by_an_indexable(indexable, ignored):
    ((name, value),) = ignored.items()
    kind = type(indexable).__name__
    given = re.escape(f"got {name}={value!r} with an ")
    with pytest.raises(ParameterError, match=f"{given}.* type {kind};"):
        CellDataset(indexable, BlockShuffling(4), 10, **ignored)


@pytest.mark.parametrize(
    "ignored", [{"dtype": "float64"}, {"num_threads": 2}, {"transform": [Log1p()]}], ids=str
)
def test_by_a_fetch_callback(plates, ignored):
    collection, ((name, value),) = open_collection(plates), ignored.items()
    given = re.escape(f"got {name}={value!r} with a `fetch_callback`;")
    with pytest.raises(ParameterError, match=given):
        CellDataset(collection, BlockShuffling(4), 10, fetch_callback=operator.getitem, **ignored)


def test_all_of_them_are_named():
    with pytest.raises(ParameterError, match="dense=True, dtype='float32', num_threads=1 with"):
        CellDataset(TABLE, BlockShuffling(4), 10, dense=True, dtype=np.float32, num_threads=1)
