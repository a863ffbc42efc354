"""`dense`, `dtype`, `num_threads` and `transform` are refused where they would be ignored."""

import operator
import re
import warnings

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


@pytest.mark.parametrize(("batch_size", "fetch_factor"), [(8, 2), (10**6, 1), (1, 10**6)])
@pytest.mark.parametrize(("dense", "is_warned"), [(False, False), (True, True)])
def test_fetches_that_do_not_fit(tmp_path, monkeypatch, batch_size, fetch_factor, dense, is_warned):
    path = tmp_path / "wide.h5ad"
    ad.AnnData(sp.eye_array(100, 10_000, dtype=np.float32, format="csr")).write_h5ad(path)
    collection = open_collection(path)
    monkeypatch.setattr("cellfeed._dataset._parameters.usable_memory_bytes", lambda: 30_000)
    strategy = BlockShuffling(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        CellDataset(collection, strategy, batch_size, fetch_factor, dense=dense)
    texts = [str(each.message) for each in caught]
    expected = r"fetches take about \d+ MB of memory, but 0 MB are available; choose a smaller .*"
    assert len(texts) == is_warned
    assert all(re.fullmatch(expected, text) for text in texts)


def test_all_of_them_are_named():
    with pytest.raises(ParameterError, match="dense=True, dtype='float32', num_threads=1 with"):
        CellDataset(TABLE, BlockShuffling(4), 10, dense=True, dtype=np.float32, num_threads=1)
