"""What storages in files do with damage, and with files that change."""

import importlib

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.sources import test_faults, test_zarr_damage
from tests.loader.storages.memory_maps.written import write_npy
from tests.loader.storages.tenx import written as tenx

from cellfeed import TokenStream, TokenStreamWriter, open_collection
from cellfeed.testing import StorageDamageConformance

COUNTS = np.random.default_rng(0).poisson(0.7, size=(60, 12)).astype(np.float32)
X = sp.csr_matrix(COUNTS)


class TestH5ad(StorageDamageConformance):
    has_checksums = True

    @pytest.fixture(params=[("X/data", "gzip"), ("X/data", "fletcher32"), ("X", "gzip, shuffle")])
    def stored(self, request, write_h5ad, replace):
        element, filter_ = request.param
        write = test_faults.writer_of_small_chunks(write_h5ad, replace)
        return write(element, filter_=filter_)

    def value_ranges(self, path):  # of its own tables, some crash HDF5
        with h5py.File(path) as file:
            names = ["X"] if isinstance(file["X"], h5py.Dataset) else ["X/indices", "X/data"]
        return [(path, *ends) for name in names for ends in test_faults.chunk_bytes(path, name)]


class TestTenx(StorageDamageConformance):
    has_checksums = True

    @pytest.fixture
    def stored(self, tmp_path):
        names, columns = tenx.barcodes(60), tenx.features(12)
        X = tenx.counts(60, 12, density=0.7)
        path = tmp_path / "matrix.h5"
        return tenx.write_tenx(path, X, barcodes=names, features=columns, chunk=50)

    def value_ranges(self, path):
        names = ("matrix/indices", "matrix/data")
        return [(path, *ends) for name in names for ends in test_faults.chunk_bytes(path, name)]


@test_zarr_damage.pytestmark
class TestZarr(StorageDamageConformance):
    has_checksums = True

    @pytest.fixture(params=[None, (48,)], ids=["chunks", "shards"])
    def stored(self, request, tmp_path):
        options = {"chunks": (80,)} if request.param is None else {"shards": request.param}
        return test_zarr_damage.write_store(tmp_path / "cells.zarr", X, **options)

    def value_ranges(self, path):
        files = [*path.glob("X/data/c/*"), *path.glob("X/indices/c/*")]
        return [(each, 0, each.stat().st_size) for each in sorted(files)]


class TestNpyFolder(StorageDamageConformance):
    @pytest.fixture
    def stored(self, tmp_path):
        return write_npy(tmp_path / "cells", X)

    def value_ranges(self, path):
        files = (path / f"{name}.npy" for name in ("data", "indices"))
        return [(each, 128, each.stat().st_size) for each in files]


class TestHuggingFace(StorageDamageConformance):
    test_flipped_bits = None  # type: ignore[assignment]  # pyarrow crashes for some

    @pytest.fixture
    def stored(self, tmp_path):
        pytest.importorskip("datasets")
        arrow_files = importlib.import_module("tests.loader.storages.huggingface.arrow_files")
        obs = pd.DataFrame({"row": np.arange(60)})
        return arrow_files.write_dataset(tmp_path / "cells", X, obs, num_shards=3)


class TestCellstream(StorageDamageConformance):
    test_flipped_bits = None  # type: ignore[assignment]  # its codec crashes for some

    @pytest.fixture
    def stored(self, tmp_path):
        cell = pytest.importorskip("cellstream.cell")
        path = tmp_path / "cells.csad"
        cell.write_cell_archive(ad.AnnData(X), path)
        return path

    # Its decoder maps the archive: one that gets shorter while it is decoded ends the process.
    @pytest.mark.parametrize("change", ["replaced", "removed"])
    def test_files_that_change_during_an_epoch(self, stored, change):
        super().test_files_that_change_during_an_epoch(stored, change)


class TestTokens(StorageDamageConformance):
    detects_overwriting = False

    @pytest.fixture
    def stored(self, tmp_path):
        with TokenStreamWriter(tmp_path / "stream", "uint16") as writer:
            writer.append(np.arange(400, dtype=np.uint16))
        return tmp_path / "stream"

    def open(self, path):
        return open_collection(TokenStream(path, 10))

    def value_ranges(self, path):
        (tokens,) = path.rglob("tokens.bin")
        return [(tokens, 0, tokens.stat().st_size)]
