"""Matrices of 10x Genomics pass the suite, with annotations in another order."""

import hdf5plugin
import numpy as np
import pandas as pd
import pytest
from hypothesis import strategies as st
from tests.loader.storages.tenx import GZIP, barcodes, write_tenx

from cellfeed import TenxSource
from cellfeed.testing import SourceConformance

OPTIONS = [GZIP, {}, {"compression": "gzip"}, {"compression": "lzf"}, dict(hdf5plugin.Zstd())]


class TestTenx(SourceConformance):
    layouts = ("csr",)
    dtypes = ("<i4", "<i8", "<u2", "<f4")
    max_examples = 20

    def storages(self, layout, dtype):
        return st.tuples(st.sampled_from([2, 3]), st.integers(1, 40), st.sampled_from(OPTIONS))

    def is_decoded_here(self, case):
        return True

    def where(self, path):
        return path

    @pytest.fixture
    def write(self, new_path):
        def write(case):
            version, chunk, options = case.storage
            names = barcodes(case.n_rows, seed=case.seed)
            ids = [f"ENSG{k}" for k in range(case.n_vars)]
            columns = {"gene_ids": ids, "feature_types": "Gene Expression", "genome": "GRCh38"}
            path = write_tenx(
                new_path(".h5"),
                case,
                barcodes=names,
                features=pd.DataFrame(columns, index=case.var.index),
                version=version,
                chunk=chunk,
                options=options,
            )
            obs = case.obs.set_axis(names, axis=0)
            random = np.random.default_rng(case.seed)
            source = TenxSource(self.where(path), obs=obs.iloc[random.permutation(case.n_rows)])
            source.elements = {"X": source.elements["X"]}
            return source

        return write
