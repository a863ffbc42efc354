"""AnnLoader, measured by the clock of cellfeed's own."""

import anndata as ad
import numpy as np
import pytest
import torch
from notebooks.figures._annloader import measure_annloader, open_annloader

from cellfeed import open_collection

BATCH_SIZE = 32


@pytest.mark.parametrize("shuffle", [True, False])
def test_annloader_is_measured(small_collection, shuffle):
    collection = open_collection(small_collection)
    measured = measure_annloader(collection, shuffle=shuffle, batch_size=BATCH_SIZE, seconds=0.1)
    assert measured.status == "measured"
    assert measured.failure == ""
    assert measured.cells_per_round == BATCH_SIZE
    assert measured.first_round_seconds is not None
    assert measured.first_minibatch_seconds is not None
    assert measured.first_round_seconds >= measured.first_minibatch_seconds


def test_annloader_delivers_the_cells_in_order(small_collection):
    paths = open_collection(small_collection).files
    loader = open_annloader(paths, batch_size=BATCH_SIZE, shuffle=False, seed=0)
    X = [minibatch.X for minibatch in loader]
    assert {each.layout for each in X} == {torch.sparse_csr}
    delivered = np.concatenate([each.to_dense().numpy() for each in X])
    stored = np.concatenate([ad.read_h5ad(path).X.toarray() for path in paths])
    assert np.array_equal(delivered, stored[: len(stored) // BATCH_SIZE * BATCH_SIZE])
