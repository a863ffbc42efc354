"""AnnData objects pass the suite, in memory and backed by a file."""

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import adata_of
from tests.loader.sources.suites import Suite

from cellfeed import open_collection
from cellfeed.testing import SourceConformance


def source_of(adata, element):
    (source,) = open_collection(adata, elements=[element]).sources
    return source


class TestInMemory(SourceConformance):
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 10

    @pytest.fixture
    def write(self):
        return lambda case: source_of(adata_of(case), case.element)


class TestBacked(Suite):
    suffix = ".h5ad"
    max_examples = 4

    def stored(self, path, case):
        adata_of(case).write_h5ad(path)
        return source_of(ad.read_h5ad(path, backed="r"), case.element)


def test_a_row_that_begins_before_the_matrix():
    """What lies there in memory is not delivered."""
    X = sp.csr_matrix(np.ones((50, 20), np.float32))
    X.indptr[7:9] = -3, -1
    with pytest.raises(ValueError, match="out of bounds"):
        _ = open_collection(ad.AnnData(X))[[7]]
