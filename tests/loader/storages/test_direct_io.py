"""Files that are read past the page cache give the same rows, and leave no page there."""

import errno
import os
from itertools import chain
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import dense
from tests.loader.storages.memory_maps import write_npy

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    open_collection,
    preshuffle,
)
from cellfeed._bytes import UnbufferedFiles, check_unbuffered
from cellfeed._decode import FolderFiles
from cellfeed._storages._source import files_in
from cellfeed.sources import ByteStore, Location, Source
from cellfeed_tuner._measuring._page_cache import drop_pages, resident_fraction

pytestmark = pytest.mark.filterwarnings(
    "ignore:zarr v3 autosharding will be the default",
    "ignore:Consolidated metadata is currently not part",
    "ignore:Writing zarr v2 data will no longer be the default",
)

N_CELLS, N_GENES = 600, 400
COUNTS = np.random.default_rng(0).poisson(0.6, (N_CELLS, N_GENES)).astype(np.float32)


@pytest.fixture(scope="session", autouse=True)
def _direct_here(tmp_path_factory):
    path = tmp_path_factory.mktemp("direct") / "file"
    path.write_bytes(bytes(5000))
    try:
        check_unbuffered(path)
    except ParameterError as error:
        pytest.skip(str(error))


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
        collection,
        BlockShuffling(8),
        batch_size=32,
        fetch_factor=4,
        seed=3,
        dense=True,
        **options,
    )
    return dataset, delivered(dataset)


def delivered(dataset):
    return [(each.rows.tolist(), np.asarray(each.X)) for each in dataset]


def files_of(path):
    return [each for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file()]


class TestRows:
    @pytest.mark.parametrize("name", NAMES)
    def test_are_those_of_buffered_reads(self, stores, name):
        collection = open_collection(stores / name, direct_io=True)
        assert collection.describe()["is_fast"].all()
        buffered = open_collection(stores / name)

        @given(st.lists(st.integers(0, N_CELLS - 1), min_size=1, max_size=40, unique=True))
        def check(rows):
            assert np.array_equal(dense(collection[rows].X), dense(buffered[rows].X))

        check()
        assert np.array_equal(dense(collection[:].X), dense(buffered[:].X))
        if name != "shards.zarr":
            assert np.array_equal(dense(collection[:].X), COUNTS)

    @pytest.mark.parametrize("verify", ["first", "always", "never"])
    @pytest.mark.parametrize("name", ["gzip.h5ad", "v2.zarr", "shards.zarr"])
    def test_of_epochs_too(self, stores, name, verify):
        _, expected = minibatches(open_collection(stores / name))
        dataset, first = minibatches(open_collection(stores / name, direct_io=True), verify=verify)
        for (rows, X), (same_rows, same_X) in zip(first, expected, strict=True):
            assert rows == same_rows
            assert np.array_equal(X, same_X)
        second = delivered(dataset)
        assert sorted(chain.from_iterable(rows for rows, _ in second)) == list(range(N_CELLS))

    def test_go_on_from_a_state_of_buffered_reads(self, stores):
        def begun(*, direct_io):
            collection = open_collection(stores / "gzip.h5ad", direct_io=direct_io)
            return CellDataset(collection, BlockShuffling(8), batch_size=32, fetch_factor=2, seed=1)

        buffered = begun(direct_io=False)
        iterator = iter(buffered)
        for _ in range(5):
            next(iterator)
        state = buffered.state_dict()
        expected = [each.rows.tolist() for each in iterator]
        direct = begun(direct_io=True)
        direct.load_state_dict(state)
        assert [each.rows.tolist() for each in direct] == expected

    @pytest.mark.parametrize("context", ["fork", "spawn"])
    def test_reach_worker_processes(self, stores, context):
        collection = open_collection(stores / "gzip.h5ad", direct_io=True)
        dataset, _ = minibatches(collection)  # threads are there by then
        torch = pytest.importorskip("torch")
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context=context
        )
        found = delivered(loader)
        assert sorted(chain.from_iterable(rows for rows, _ in found)) == list(range(N_CELLS))
        for rows, X in found:
            assert np.array_equal(X, COUNTS[rows])


class TestPages:
    @pytest.mark.parametrize("name", NAMES)
    def test_none_is_left_by_an_epoch(self, stores, name):
        files = files_of(stores / name)
        left = dict[bool, float]()
        for direct_io in (True, False):
            collection = open_collection(stores / name, direct_io=direct_io)
            dataset, _ = minibatches(collection)  # by which tables are read
            drop_pages(files)
            if resident_fraction(files) != 0:
                pytest.skip("this file system keeps what it was asked to drop, or does not tell")
            assert sum(len(each.rows) for each in dataset) == N_CELLS
            left[direct_io] = resident_fraction(files) or 0.0
        assert left[True] == 0
        assert left[False] > 0.2

    def test_that_were_written_and_are_not_on_the_disk_yet_are_read(self, tmp_path):
        path = tmp_path / "new.h5ad"
        ad.AnnData(sp.csr_matrix(COUNTS)).write_h5ad(path, compression="gzip")
        collection = open_collection(path, direct_io=True)
        assert np.array_equal(dense(collection[:].X), COUNTS)


class TestRefusals:
    def test_of_memory(self):
        if not Path("/dev/shm").is_dir():
            pytest.skip("there is no /dev/shm")
        path = Path(f"/dev/shm/cellfeed-{os.getpid()}.h5ad")
        try:
            ad.AnnData(COUNTS[:3]).write_h5ad(path)
            with pytest.raises(
                ParameterError, match=r"its file system \(\w+\) does not support direct I/O;"
            ):
                open_collection(path, direct_io=True)
            assert len(open_collection(path)) == 3
        finally:
            path.unlink(missing_ok=True)

    def test_of_what_refuses_the_flag_or_the_read(self, stores, monkeypatch):
        def refuse(*arguments):
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(os, "preadv", refuse)
        with pytest.raises(
            ParameterError, match="does not support direct I/O; open it without `direct_io`"
        ):
            open_collection(stores / "gzip.h5ad", direct_io=True)

    def test_of_other_systems(self, stores, monkeypatch):
        monkeypatch.delattr(os, "O_DIRECT")
        with pytest.raises(ParameterError, match="this system does not support direct I/O"):
            open_collection(stores / "v3.zarr", direct_io=True)

    def test_of_servers_and_other_storages(self, tmp_path):
        with pytest.raises(ParameterError, match="is not local"):
            open_collection("https://example.org/a.h5ad", direct_io=True)
        write_npy(tmp_path / "maps", sp.csr_matrix(COUNTS))
        with pytest.raises(
            ParameterError, match="is memory-mapped CSR, but `direct_io` is only for"
        ):
            open_collection(tmp_path / "maps", direct_io=True)

    def test_of_what_is_open(self, stores):
        (source,) = open_collection(stores / "gzip.h5ad").sources
        assert isinstance(source, Source)
        with pytest.raises(
            ParameterError, match=r"applies only to paths, but got an open .*; give its path"
        ):
            open_collection([source], direct_io=True)


class TestFailures:
    def test_of_the_disk_name_the_chunk(self, stores, monkeypatch):
        path = stores / "gzip.h5ad"
        collection = open_collection(path, direct_io=True)
        collection[[0]]

        def fail(*arguments):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        expected = rf"^{path}: `X/\w+`, elements 0 to .* \(bytes \d+ to \d+\): cannot be read; "
        with pytest.raises(FormatError, match=expected):
            collection[:]

    def test_of_opening_say_so(self, stores, monkeypatch):
        collection = open_collection(stores / "gzip.h5ad", direct_io=True)

        open_ = os.open

        def fail(path, *arguments, **options):
            if str(path).startswith("/proc/self/fd/"):
                raise OSError(errno.EMFILE, "Too many open files")
            return open_(path, *arguments, **options)

        monkeypatch.setattr(os, "open", fail)
        with pytest.raises(PathError, match=r"Too many open files.*ulimit"):
            collection[:]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("files"), np.random.default_rng(0)
    contents = [rng.bytes(n) for n in (0, 1, 4096, 4097, 300_000)]
    for k, content in enumerate(contents):
        (folder / f"{k}").write_bytes(content)
    return files_in(folder, ["0", "1", "2", "3", "4"]), contents


class TestRanges:
    def test_that_overlap_are_read_once(self, files, monkeypatch):
        n_read, preadv = list[int](), os.preadv

        def counted(*given):
            n_read.append(preadv(*given))
            return n_read[-1]

        monkeypatch.setattr(os, "preadv", counted)
        store = UnbufferedFiles(files[0])
        asked = [(4, 100, 9000), (4, 5000, 9000), (4, 13_000, 10), (4, 20_000, 100)]
        pending = store.expect(*columns(asked))
        store.read_ranges(*columns(asked))
        assert pending is not None
        assert n_read == [20_480]  # up to the end of the page of the last byte

    def test_take_no_memory_beyond_the_end_of_their_file(self, files, monkeypatch):
        n_asked, preadv = list[int](), os.preadv

        def counted(descriptor, buffers, offset):
            n_asked.extend(map(len, buffers))
            return preadv(descriptor, buffers, offset)

        monkeypatch.setattr(os, "preadv", counted)
        store, contents = UnbufferedFiles(files[0]), files[1]
        asked = [(1, 0, 50_000), (3, 0, 50_000), (4, 299_000, 50_000), (2, 100_000, 50_000)]
        found = store.read_ranges(*columns(asked))
        assert [None if each is None else bytes(each) for each in found] == [
            contents[file][first : first + n] for file, first, n in asked
        ]
        assert sorted(n_asked) == [4096, 8192, 8192]  # whole pages; none beyond the end

    def test_of_files_that_are_not_there_are_none(self, tmp_path):
        class Paths(FolderFiles):
            def handles(self, files):
                return self._addresses(files)

            def sizes(self, files):
                return np.array([size for size, _ in self._found(files)], np.int64)

        (tmp_path / "0").write_bytes(bytes(10))
        store: ByteStore = UnbufferedFiles(Paths(tmp_path, np.array([b"0", b"1"]).__getitem__, 0))
        found = store.read_ranges(*columns([(0, 0, 20), (1, 0, 20)]))
        assert found[1] is None
        assert found[0] is not None
        assert bytes(found[0]) == bytes(10)
        assert store.location_of(1) == Location.of(tmp_path / "1")


def columns(ranges):
    return tuple(np.array(ranges, np.int64).reshape(-1, 3).T.copy())
