"""h5ad and zarr pass the suite where no compiled thread opens a file: ranges come to memory."""

import os

import pytest
from tests.loader.sources.test_conformance import TestH5ad as H5ad
from tests.loader.sources.test_conformance_zarr import TestZarr as Zarr
from tests.loader.sources.zarr_cells import quiet


def read_ranges(file, files, offsets, sizes):
    descriptor = file().id.get_vfd_handle()
    ranges = zip(sizes.tolist(), offsets.tolist(), strict=True)
    return [memoryview(os.pread(descriptor, *each)) for each in ranges]


class TestH5adInMemory(H5ad):
    max_examples = 10
    test_in_worker_processes = None  # type: ignore[assignment]  # as of any source

    @pytest.fixture(autouse=True)
    def in_memory(self, monkeypatch):
        file = "cellfeed.sources.anndata._h5file.LocalH5File"
        monkeypatch.setattr(f"{file}.handles", lambda self, files: None)
        monkeypatch.setattr(f"{file}.read_ranges", read_ranges)


@quiet
class TestZarrInMemory(Zarr):
    max_examples = 10
    test_in_worker_processes = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True)
    def in_memory(self, monkeypatch):
        monkeypatch.setattr("cellfeed.bytes._store.FolderFiles.handles", lambda self, files: None)
