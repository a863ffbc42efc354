"""Folders of memory maps pass the suite."""

import itertools
from dataclasses import replace

import pytest
from tests.loader.storages.memory_maps import write_npy, write_scdl

from cellfeed import MemoryMapSource
from cellfeed.testing import SourceConformance


class TestNpyFolder(SourceConformance):
    layouts = ("csr",)
    index_dtypes = ("<i4", "<i8", "<u2", "|u1")
    dtypes = (*SourceConformance.dtypes, "<f2", "|b1")
    max_examples = 20

    def is_decoded_here(self, case):
        return case.dtype != "<f2"

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            folder = write_npy(tmp_path / f"{next(numbers)}", case)
            return MemoryMapSource(folder, obs=case.obs, var=case.var)

        return write


class TestScdl(SourceConformance):
    layouts = ("csr",)
    dtypes = ("<f4",)
    max_examples = 5

    def is_decoded_here(self, case):
        return True

    def cases(self, **options):
        def storable(case):  # SCDL drops what is there twice, takes no empty matrix or odd values
            case = replace(
                case,
                n_vars=max(1, case.n_vars),
                density=max(0.5, case.density),
                values="counts",
                columns="in any order" if case.columns == "some twice" else case.columns,
            )
            while not case.indices.size:
                case = replace(case, seed=case.seed + 1)
            return case

        return super().cases(**options).map(storable)

    @pytest.fixture
    def write(self, tmp_path):
        pytest.importorskip("bionemo.scdl")
        numbers = itertools.count()

        def write(case):
            return write_scdl(tmp_path / f"{next(numbers)}", case.matrix, case.obs, case.var)

        return write
