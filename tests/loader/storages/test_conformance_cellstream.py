"""Archives of cellstream pass the suite."""

import itertools
from dataclasses import replace

import anndata as ad
import numpy as np
import pytest

from cellfeed.testing import SourceConformance

cell = pytest.importorskip("cellstream.cell")


class TestCellstream(SourceConformance):
    layouts = ("csr",)
    dtypes = ("<f4", "<f8")
    max_examples = 15

    def cases(self, **options):
        def storable(case):  # there are no archives without genes
            return replace(case, n_vars=max(1, case.n_vars))

        return super().cases(**options).map(storable)

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path = tmp_path / f"{next(numbers)}.csad"
            # Counts are stored as it does by default, with FastPFor; all else with zstd.
            is_default = case.dtype == "<f4" and case.values == "counts"
            dtype = np.dtype(case.dtype).name
            options = {} if is_default else {"codec": "zstd", "data_dtype": dtype}
            cell.write_cell_archive(
                ad.AnnData(case.matrix, obs=case.obs, var=case.var),
                path,
                require_unique_indices=case.columns != "some twice",
                **options,
            )
            return path

        return write
