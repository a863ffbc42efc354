"""PyTorch's messages on the page about them are those of PyTorch."""

import re
from functools import cache
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from torch.nn import BatchNorm1d, Conv1d, Dropout, LayerNorm
from torch.nn.functional import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    mse_loss,
    poisson_nll_loss,
)
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from cellfeed import BlockShuffling, CellDataset, open_collection

PAGE = (Path(__file__).parents[2] / "docs/how-to/torch_errors.md").read_text()
ROWS = [
    (code, said)
    for codes, said in re.findall(r"^\| (`.*`) \| `(.*)` \|$", PAGE, re.MULTILINE)
    for code in re.findall("`([^`]*)`", codes)
]
N, N_GENES = 8, 6


@cache
def names(*, dense, dtype=np.float32):
    """Return what the page takes for granted, with a minibatch."""
    counts = np.random.default_rng(0).poisson(1, (N, N_GENES)).astype(dtype)
    collection = open_collection(ad.AnnData(sp.csr_matrix(counts)))
    dataset = CellDataset(collection, BlockShuffling(2), N, dense=dense, seed=0)
    layers = (BatchNorm1d, Conv1d, Dropout, LayerNorm, DataLoader, DistributedSampler)
    functions = (
        binary_cross_entropy_with_logits,
        cross_entropy,
        mse_loss,
        poisson_nll_loss,
        torch.softmax,
    )
    return {each.__name__: each for each in (*layers, *functions)} | {
        "torch": torch,
        "dataset": dataset,
        "X": next(iter(dataset)).X,
        "y": torch.zeros(N, dtype=torch.long),
        "n_genes": N_GENES,
        "columns": torch.tensor([0, 2]),
        "mask": torch.ones(N, dtype=torch.bool),
        "reconstructed": torch.ones(N, N_GENES),
    }


def test_the_page_has_messages():
    assert len(ROWS) > 20


@pytest.mark.parametrize(("code", "said"), ROWS)
def test_messages(code, said):
    with pytest.raises(Exception, match=r"^") as raised:
        eval(code, names(dense=False))
    if f"those of PyTorch {'.'.join(torch.__version__.split('.')[:2])}." in PAGE:
        for part in said.split("..."):
            assert part in str(raised.value)


@pytest.mark.parametrize("code", [code for code, _ in ROWS if "X" in code and "Conv1d" not in code])
def test_dense_minibatches_are_taken(code):
    eval(code, names(dense=True))


def test_unsigned_integers_become_dense_while_they_are_read():
    said, X = re.findall(r'\(`("index_add_".*)`\)', PAGE), names(dense=False, dtype=np.uint16)["X"]
    with pytest.raises(NotImplementedError, match=f"^{said[0]}$"):
        X.to_dense()
    assert names(dense=True, dtype=np.uint16)["X"].dtype == torch.uint16
