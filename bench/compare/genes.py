"""Highly variable genes: cellfeed's pass, a loop over its minibatches, and scanpy in memory.

``--data`` has counts that fit into memory. The loop sums with SciPy; reading all files is part of
scanpy's time. Files are in the page cache, and code is compiled before.
"""

import os
import tempfile

import anndata as ad
import numpy as np
import scanpy as sc
from bench._harness import Case, plates_of, way

from cellfeed import CellDataset, Streaming, highly_variable_genes, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

CHOICE = {"flavor": "seurat", "transform": [NormalizeTotal(1e4), Log1p()]}


def one_pass(seed, paths):
    os.environ["CELLFEED_CACHE_DIR"] = tempfile.mkdtemp()  # so that sums are not there yet
    highly_variable_genes(open_collection(paths[:1]), indices=range(50), **CHOICE)

    def sizes():
        collection = open_collection(paths)
        highly_variable_genes(collection, **CHOICE)
        yield len(collection)

    return sizes()


def minibatches_and_scipy(seed, paths):
    collection = open_collection(paths)
    sums, squares = np.zeros(collection.n_vars), np.zeros(collection.n_vars)
    for cells in CellDataset(collection, Streaming(), 1024, fetch_factor=4, as_torch=False):
        X = cells.X.astype(np.float32)
        totals = np.maximum(np.asarray(X.sum(axis=1)).ravel(), 1)
        X.data *= np.repeat(1e4 / totals, np.diff(X.indptr)).astype(np.float32)
        X = np.expm1(X.log1p())
        sums += X.sum(axis=0, dtype=np.float64)
        squares += X.multiply(X).sum(axis=0, dtype=np.float64)
        yield len(cells)


def scanpy_in_memory(seed, paths):
    adata = ad.concat([ad.read_h5ad(path) for path in paths], merge="same")
    sc.pp.normalize_total(adata, target_sum=1e4)
    sc.pp.log1p(adata)
    sc.pp.highly_variable_genes(adata, n_top_genes=2000, inplace=False)
    yield adata.n_obs


def cases(options):
    paths = plates_of(options)
    ways = {"scanpy in memory": way(scanpy_in_memory, paths=paths)}
    ways["minibatches and SciPy"] = way(minibatches_and_scipy, paths=paths)
    ways["cellfeed, one pass"] = way(one_pass, paths=paths)
    yield Case(ways, files=paths)


OPTIONS = {"cells": 28_000, "cache": ["warm"]}
