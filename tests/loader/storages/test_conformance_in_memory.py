"""h5ad and zarr pass the suite where no compiled thread opens a file: ranges come to memory."""

import os

import pytest
from tests.loader.storages.test_conformance import TestH5ad as H5ad
from tests.loader.storages.test_conformance_zarr import TestZarr as Zarr

from cellfeed._decode import ZarrFiles
from cellfeed._storages._anndata._local_h5file import LocalH5File

pytestmark = pytest.mark.filterwarnings("ignore:zarr v3 autosharding:UserWarning")


class H5InMemory(LocalH5File):
    def handles(self, files):
        return None

    def read_ranges(self, files, offsets, sizes):
        descriptor = self().id.get_vfd_handle()
        ranges = zip(sizes.tolist(), offsets.tolist(), strict=True)
        return [memoryview(os.pread(descriptor, *each)) for each in ranges]


class ZarrInMemory(ZarrFiles):
    def handles(self, files):
        return None


class TestH5adInMemory(H5ad):
    max_examples = 20
    test_in_worker_processes = None  # type: ignore[assignment]  # as of any source

    @pytest.fixture(autouse=True)
    def in_memory(self, monkeypatch):
        monkeypatch.setattr("cellfeed._storages._anndata._open.LocalH5File", H5InMemory)


class TestZarrInMemory(Zarr):
    max_examples = 20
    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def in_memory(self, monkeypatch):
        monkeypatch.setattr("cellfeed._decode.ZarrFiles", ZarrInMemory)
