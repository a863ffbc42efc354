"""Matrices of 10x Genomics pass the suite, with annotations in another order."""

import hdf5plugin
import numpy as np
import pandas as pd
from hypothesis import strategies as st
from tests.loader.sources.suites import Suite
from tests.loader.storages.tenx.written import GZIP, barcodes, write_tenx

from cellfeed import TenxSource

OPTIONS = [GZIP, {}, {"compression": "gzip"}, {"compression": "lzf"}, dict(hdf5plugin.Zstd())]


class TestTenx(Suite):
    suffix = ".h5"
    layouts = ("csr",)
    dtypes = ("<i4", "<i8", "<u2", "<f4")
    max_examples = 20
    decoded_here = True

    def storages(self, layout, dtype):
        return st.tuples(st.integers(1, 40), st.sampled_from(OPTIONS))

    def stored(self, path, case):
        chunk, options = case.storage
        ids = [f"ENSG{k}" for k in range(case.n_vars)]
        columns = {"gene_ids": ids, "feature_types": "Gene Expression", "genome": "GRCh38"}
        return write_tenx(
            path,
            case,
            barcodes=barcodes(case.n_rows, seed=case.seed),
            features=pd.DataFrame(columns, index=case.var.index),
            chunk=chunk,
            options=options,
        )

    def opened(self, stored, case):
        obs = case.obs.set_axis(barcodes(case.n_rows, seed=case.seed), axis=0)
        random = np.random.default_rng(case.seed)
        source = TenxSource(stored, obs=obs.iloc[random.permutation(case.n_rows)])
        source.elements = {"X": source.elements["X"]}
        return source
