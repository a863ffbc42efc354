"""`autotune` tunes a loader of tokens, with a step that trains on them."""

from functools import partial
from typing import Any

import pytest

from cellfeed import BlockShuffling, CellDataset, MatchedControls, open_collection
from cellfeed.synthetic import write_tahoe_like
from cellfeed.tokenizers import BinnedValues, MaskTokens, MaskValues, RankTokens
from cellfeed_tuner import Configuration, autotune, measure


def summed_tokens(minibatch):
    """A training step, which finds what the tokenizer makes."""
    assert minibatch["labels"].shape == minibatch["tokens"].shape
    return int(minibatch["tokens"].sum())


def summed_pairs(minibatch):
    """A training step on the tokens of treated cells and of their controls."""
    assert len(minibatch.controls) == len(minibatch)
    return summed_tokens(minibatch) + summed_tokens(minibatch.controls)


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    write_tahoe_like(folder, n_cells=1500, n_genes=60, n_plates=2)
    return open_collection(folder, obs=["plate", "drug"])


def made_with(collection, padding):
    names = ["<pad>", "<cls>", "<eos>", "<mask>", *collection.var_names]
    ranks = RankTokens(names, max_length=32, padding=padding)
    return partial(CellDataset, transform=[ranks, MaskTokens()])


def test_a_loader_of_tokens_is_tuned(collection, short_replicates):
    result = autotune(
        collection, label="plate", batch_size=16, block_sizes=[1, 4], fetch_factors=[2],
        workers=[0], budget=600, fresh=True, cache="warm", step=summed_tokens,
        make_dataset=made_with(collection, "longest"),
    )  # fmt: skip
    assert result.recommended is not None
    assert result.recommended.configuration.block_size in {1, 4}


def test_matched_pairs_of_tokens_are_tuned(collection, short_replicates):
    strategy = MatchedControls(BlockShuffling(4), "drug", "drug_001", ["plate"])
    result = autotune(
        collection, label="plate", strategy=strategy, batch_size=16, block_sizes=[1, 4],
        fetch_factors=[2], workers=[0], budget=600, fresh=True, cache="warm", step=summed_pairs,
        make_dataset=made_with(collection, "longest"),
    )  # fmt: skip
    assert result.loader_fault is None
    assert result.recommended is not None
    assert result.recommended.configuration.block_size in {1, 4}


@pytest.mark.parametrize("padding", ["max_length", None])
def test_padded_and_ragged_tokens_are_measured(collection, padding):
    configuration = Configuration(block_size=4, fetch_factor=2)
    found = measure(
        collection, configuration, label="plate", seconds=0.1,
        make_dataset=made_with(collection, padding),
    )  # fmt: skip
    assert (found.status, found.delivery_fault) == ("measured", "")


def test_values_are_measured(collection):
    names = ["<pad>", "<cls>", *collection.var_names]
    steps: list[Any] = [BinnedValues(names, max_length=20), MaskValues()]
    found = measure(
        collection, Configuration(block_size=4, fetch_factor=2), label="plate", seconds=0.1,
        make_dataset=partial(CellDataset, transform=steps),
    )  # fmt: skip
    assert (found.status, found.delivery_fault) == ("measured", "")
