"""TileDB-SOMA experiments pass the suite."""

import itertools
from dataclasses import replace

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.storages.somas import write_experiment

from cellfeed.testing import SourceConformance


class TestSoma(SourceConformance):
    dtypes = ("<f4", "<f8", "|u1", "<i2", "<i8")
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 5

    def is_decoded_here(self, case):
        return bool(case.row_lengths.sum()) if case.layout == "csr" else None

    def cases(self, **options):
        def storable(case):  # there are no arrays without columns, no value twice, and no dense raw
            return replace(
                case,
                n_vars=max(1, case.n_vars),
                columns="in any order" if case.columns == "some twice" else case.columns,
                layout="csr" if case.element == "raw/X" else case.layout,
            )

        return super().cases(**options).map(storable)

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            matrix = case.matrix
            other = np.zeros_like(matrix)
            if case.layout == "csr":
                other = sp.csr_matrix(matrix.shape, dtype=np.float32)
            adata = ad.AnnData(matrix, obs=case.obs, var=case.var)
            if case.element != "X":
                adata = ad.AnnData(other, obs=case.obs, var=case.var)
            if case.element == "layers/counts":
                adata.layers["counts"] = matrix
            if case.element == "raw/X":
                adata.raw = ad.AnnData(matrix, obs=case.obs, var=case.var)
            return write_experiment(tmp_path / f"{next(numbers)}", adata)

        return write
