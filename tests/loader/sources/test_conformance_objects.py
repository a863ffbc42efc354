"""AnnData objects pass the suite, in memory and backed by a file, and so do frames in obsm."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
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


class TestFrames(Suite):
    suffix = ".h5ad"
    layouts = ("dense",)
    dtypes = ("<f4", "<f8", "|i1", "<u2", "<i8", "|b1")
    elements = ("obsm/frame",)
    max_examples = 8

    def cases(self, *, n_vars=None, **options):
        if n_vars is None:
            return st.integers(1, 12).flatmap(lambda n: self.cases(n_vars=n, **options))
        # Without columns, there is none that a dtype could be of.
        return super().cases(n_vars=max(1, n_vars), **options)

    def stored(self, path, case):
        X = np.zeros((case.n_rows, 1), np.float32)
        frame = pd.DataFrame(case.dense, case.obs.index, case.var.index)
        ad.AnnData(X, obs=case.obs, obsm={"frame": frame}).write_h5ad(path)
        return path
