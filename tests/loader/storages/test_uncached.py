"""Files whose pages are dropped give the same rows, and leave no page in the cache."""

import os
import pickle
import resource

import anndata as ad
import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.commands import limited
from tests.loader.matrices import dense
from tests.loader.read_options import parameters_of
from tests.loader.sources.zarr_cells import quiet
from tests.loader.storages.memory_maps.written import write_npy
from tests.page_cache import drop_pages, share_of_pages

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection, preshuffle
from cellfeed.sources import Source

pytestmark = quiet

N_CELLS, N_GENES = 600, 400
COUNTS = np.random.default_rng(0).poisson(0.6, (N_CELLS, N_GENES)).astype(np.float32)


@pytest.fixture(scope="session")
def stores(tmp_path_factory):
    """The same cells in all that is read by chunks."""
    folder = tmp_path_factory.mktemp("stores")
    obs = {"plate": np.repeat(["a", "b", "c"], N_CELLS // 3)}
    sparse, dense = ad.AnnData(sp.csr_matrix(COUNTS), obs=obs), ad.AnnData(COUNTS, obs=obs)
    sparse.write_h5ad(folder / "gzip.h5ad", compression="gzip")
    sparse.write_h5ad(folder / "contiguous.h5ad")
    dense.write_h5ad(folder / "dense.h5ad", compression="lzf")
    for number in (2, 3):
        with ad.settings.override(zarr_write_format=number):
            sparse.write_zarr(folder / f"v{number}.zarr", chunks=None)
            dense.write_zarr(folder / f"dense-v{number}.zarr", chunks=(50, 90))
    preshuffle(folder / "gzip.h5ad", folder / "shards.zarr", cells_per_chunk=16)
    return folder


NAMES = (
    "gzip.h5ad",
    "contiguous.h5ad",
    "dense.h5ad",
    "v2.zarr",
    "v3.zarr",
    "dense-v2.zarr",
    "dense-v3.zarr",
    "shards.zarr",
)


def minibatches(collection, **options):
    dataset = CellDataset(
        collection, BlockShuffling(8), 32, 4, seed=3, dense=True, **parameters_of(options)
    )
    return dataset, delivered(dataset)


def delivered(dataset):
    return [(each.rows.tolist(), np.asarray(each.X)) for each in dataset]


def left_by_an_epoch(dataset, files):
    """Return the share of pages that an epoch leaves in the cache."""
    drop_pages(files)
    if share_of_pages(files) != 0:
        pytest.skip("this file system keeps what it was asked to drop")
    assert sum(len(each.rows) for each in dataset) == N_CELLS
    return share_of_pages(files)


def files_of(path):
    return [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]


@pytest.mark.parametrize("name", NAMES)
class TestEachStorage:
    def test_rows_are_those_of_buffered_reads(self, stores, name):
        collection = open_collection(stores / name, uncached=True)
        assert collection.describe()["is_fast"].all()
        buffered = open_collection(stores / name)
        random = np.random.default_rng(0)
        for n in (1, 2, 10, 40):
            rows = random.permutation(N_CELLS)[:n]
            assert np.array_equal(dense(collection[rows].X), dense(buffered[rows].X))
        _, expected = minibatches(buffered)
        for verify in ("first", "always", "never"):
            _, found = minibatches(collection, verify=verify)
            for (rows, X), (same_rows, same_X) in zip(found, expected, strict=True):
                assert rows == same_rows
                assert np.array_equal(X, same_X)
                if name != "shards.zarr":
                    assert np.array_equal(X, COUNTS[rows])

    def test_no_page_is_left_by_an_epoch(self, stores, name):
        files = files_of(stores / name)
        left = dict[bool, float]()
        for uncached in (True, False):
            collection = open_collection(stores / name, uncached=uncached)
            collection = pickle.loads(pickle.dumps(collection))  # as it comes to workers
            dataset, _ = minibatches(collection)  # by which tables are read
            left[uncached] = left_by_an_epoch(dataset, files)
        assert left[True] < 0.02
        assert left[False] > 0.2


class TestPages:
    def test_of_files_that_do_not_stay_open(self, stores):
        """Too many to stay open: read, and dropped, by their paths."""
        files = files_of(stores / "dense-v2.zarr")
        with limited(resource.RLIMIT_NOFILE, psutil.Process().num_fds() + 32):
            collection = open_collection(stores / "dense-v2.zarr", uncached=True)
            dataset, _ = minibatches(collection)
            assert left_by_an_epoch(dataset, files) < 0.02

    def test_that_were_written_and_are_not_on_the_disk_yet_are_read(self, tmp_path):
        path = tmp_path / "new.h5ad"
        ad.AnnData(sp.csr_matrix(COUNTS)).write_h5ad(path, compression="gzip")
        collection = open_collection(path, uncached=True)
        assert np.array_equal(dense(collection[:].X), COUNTS)


class TestRefusals:
    def test_of_other_systems(self, stores, monkeypatch):
        monkeypatch.delattr(os, "posix_fadvise")
        with pytest.raises(ParameterError, match="this system cannot drop pages of files"):
            open_collection(stores / "v3.zarr", uncached=True)

    def test_of_servers_and_other_storages(self, tmp_path):
        with pytest.raises(ParameterError, match="is not local"):
            open_collection("https://example.org/a.h5ad", uncached=True)
        write_npy(tmp_path / "maps", sp.csr_matrix(COUNTS))
        said = "is memory-mapped CSR, but `uncached` is only for"
        with pytest.raises(ParameterError, match=said):
            open_collection(tmp_path / "maps", uncached=True)

    def test_of_what_is_open(self, stores):
        (source,) = open_collection(stores / "gzip.h5ad").sources
        assert isinstance(source, Source)
        said = r"applies only to paths, but got an open .*; give its path"
        with pytest.raises(ParameterError, match=said):
            open_collection([source], uncached=True)
