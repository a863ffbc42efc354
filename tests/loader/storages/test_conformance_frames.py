"""Data frames in obsm pass the suite for sources."""

import itertools

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st

from cellfeed.testing import SourceConformance, StoredCase


class TestFrames(SourceConformance):
    layouts = ("dense",)
    dtypes = ("<f4", "<f8", "|i1", "<u2", "<i8", "|b1")
    elements = ("obsm/frame",)
    max_examples = 15

    def cases(self, *, n_vars: int | None = None, **options) -> st.SearchStrategy[StoredCase]:
        if n_vars is None:
            return st.integers(1, 12).flatmap(lambda n: self.cases(n_vars=n, **options))
        # Without columns, there is none that a dtype could be of.
        return super().cases(n_vars=max(1, n_vars), **options)

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            X = np.zeros((case.n_rows, 1), np.float32)
            frame = pd.DataFrame(case.dense, case.obs.index, case.var.index)
            path = tmp_path / f"{next(numbers):05}.h5ad"
            ad.AnnData(X, obs=case.obs, obsm={"frame": frame}).write_h5ad(path)
            return path

        return write
