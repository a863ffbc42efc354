"""What tokens cost beside reading, and beside the same tokenizer in NumPy in worker processes.

Minibatches of 64 at block 16: cellfeed's tokens, made by its threads; the same tokens that a
``batch_transform`` computes with NumPy, a cell at a time, in as many worker processes as there are
processors (whose processor time is not in the table); and reading alone. Each gene has a token and
a median, so none is left out. Eight minibatches are not timed.
"""

import os

import numpy as np
from bench._harness import Case, after, plates_of, way

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.tokenizers import BinnedValues, MaskTokens, RankTokens

LENGTH = 2048
SPECIAL = {"<pad>": 0, "<cls>": 1, "<eos>": 2, "<mask>": 3}


class ByRank:
    """Tokens by rank, with NumPy."""

    def __init__(self, tokens, medians):
        self.tokens, self.medians = tokens, medians

    def __call__(self, cells):
        X, tokens = cells.X, np.zeros((len(cells), LENGTH), np.int64)
        for k in range(len(cells)):
            here = slice(X.indptr[k], X.indptr[k + 1])
            genes, values = X.indices[here], X.data[here].astype(np.float64)
            scores = values / values.sum() * 10_000 / self.medians[genes]
            order = np.argsort(-scores, kind="stable")[: LENGTH - 2]
            tokens[k, 0], tokens[k, order.size + 1] = 1, 2
            tokens[k, 1 : order.size + 1] = self.tokens[genes[order]]
        return (tokens,)


class InBins(ByRank):
    """Tokens with binned values, with NumPy."""

    def __call__(self, cells):
        X, shape = cells.X, (len(cells), LENGTH)
        tokens, bins = np.zeros(shape, np.int64), np.full(shape, -2, np.float32)
        for k in range(len(cells)):
            here = slice(X.indptr[k], X.indptr[k + 1])
            genes, values = X.indices[here], X.data[here]
            edges = np.quantile(values, np.linspace(0, 1, 50))
            left, right = np.digitize(values, edges), np.digitize(values, edges, right=True)
            own = np.ceil(np.random.rand(values.size) * (right - left) + left)  # noqa: NPY002
            kept = np.sort(np.random.permutation(values.size)[: LENGTH - 1])  # noqa: NPY002
            tokens[k, 0], bins[k, 0] = 1, 0
            tokens[k, 1 : kept.size + 1] = self.tokens[genes[kept]]
            bins[k, 1 : kept.size + 1] = own[kept]
        return tokens, bins


def read(seed, folder, what):
    collection = open_collection(folder)
    random, names = np.random.default_rng(0), collection.var_names
    tokens, medians = 4 + random.permutation(names.size), random.lognormal(size=names.size)
    vocabulary = SPECIAL | dict(zip(names, tokens.tolist(), strict=True))
    by_name = dict(zip(names, medians.tolist(), strict=True))
    ranks, masked = (
        RankTokens(vocabulary, by_name, max_length=LENGTH, masking=each)
        for each in (None, MaskTokens(0.15))
    )
    options = {
        "reading": {},
        "ranks": {"transform": ranks},
        "masked": {"transform": masked},
        "bins": {"transform": BinnedValues(vocabulary, max_length=LENGTH)},
        "ranks in NumPy": {"batch_transform": ByRank(tokens, medians), "as_torch": False},
        "bins in NumPy": {"batch_transform": InBins(tokens, medians), "as_torch": False},
    }[what]
    dataset = CellDataset(
        collection, BlockShuffling(16), batch_size=64, fetch_factor=16, seed=seed, **options
    )
    workers = len(os.sched_getaffinity(0)) if "NumPy" in what else 0
    loader = dataset.loader(num_workers=workers, persistent_workers=bool(workers))

    def sizes():
        while True:
            for each in loader:
                yield len(each[0]) if isinstance(each, tuple) else len(each)

    return after(8 * 64, sizes())


def cases(options):
    paths = plates_of(options)
    names = "reading", "ranks", "masked", "bins", "ranks in NumPy", "bins in NumPy"
    yield Case({name: way(read, folder=options.data, what=name) for name in names}, files=paths)


OPTIONS = {"cells": 14_000, "rounds": 5, "seconds": 4.0, "cache": ["warm"]}
