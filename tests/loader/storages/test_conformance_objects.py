"""AnnData objects pass the suite: in memory, and backed by a file."""

import itertools

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import open_collection
from cellfeed.testing import SourceConformance


def source_of(adata, element):
    (source,) = open_collection(adata, elements=[element]).sources
    return source


def adata_of(case):
    matrix = case.dense
    if case.layout == "csr":
        parts = (case.data, case.indices, case.indptr.astype(np.int64))
        matrix = sp.csr_matrix(parts, shape=(case.n_rows, case.n_vars))
    adata = ad.AnnData(matrix if case.element == "X" else None, obs=case.obs, var=case.var)
    if case.element == "layers/counts":
        adata.layers["counts"] = matrix
    if case.element == "raw/X":
        adata.raw = ad.AnnData(matrix, obs=case.obs, var=case.var)
    return adata


class TestInMemory(SourceConformance):
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 15

    @pytest.fixture
    def write(self):
        return lambda case: source_of(adata_of(case), case.element)


class TestBacked(SourceConformance):
    max_examples = 4

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path = tmp_path / f"{next(numbers)}.h5ad"
            adata_of(case).write_h5ad(path)
            return source_of(ad.read_h5ad(path, backed="r"), case.element)

        return write
