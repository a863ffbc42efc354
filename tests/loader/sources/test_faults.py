"""Files that are damaged, replaced, removed or unreadable: a clear error where it can be seen."""

import errno
import gc
import os
import zlib
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.warm import python as warm

from cellfeed import FormatError, open_collection

# 60 cells of 30 genes; 5 to 30 elements in a row, chunks of 50 elements or 7 rows.
COUNTS = np.random.default_rng(0).poisson(0.7, size=(60, 30)).astype(np.float32)
COUNTS[:, 0] += 1

FILTERS: dict[str, Any] = {
    "none": {},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "zstd": hdf5plugin.Zstd(),
    "blosc": hdf5plugin.Blosc(cname="lz4"),
    "fletcher32": {"fletcher32": True},
}
ELEMENTS = ["X/indices", "X/data", "X"]


@pytest.fixture
def write(write_h5ad, replace):
    return writer_of_small_chunks(write_h5ad, replace)


def writer_of_small_chunks(write_h5ad, replace):
    """Return a function that writes a file whose element has small chunks."""

    def write(element="X/data", *, filter_="gzip", edit=None):
        def edit_file(file):
            for name in ("X",) if element == "X" else ("X/indices", "X/data"):
                values = file[name][:]
                chunks = (7, 30) if values.ndim == 2 else (50,)
                replace(file, name, values, chunks=chunks, **FILTERS[filter_])
            if edit is not None:
                edit(file)

        X = COUNTS if element == "X" else sp.csr_matrix(COUNTS)
        return write_h5ad(X, {"number": np.arange(60.0)}, edit=edit_file)

    return write


def chunk_bytes(path: Path, element: str) -> list[tuple[int, int]]:
    """Return where the bytes of each chunk begin and end."""
    with h5py.File(path) as file:
        stored = file[element].id
        chunks = [stored.get_chunk_info(k) for k in range(stored.get_num_chunks())]
    return [(chunk.byte_offset, chunk.byte_offset + chunk.size) for chunk in chunks]


def flip(path: Path, where: int, bits: int = 0x55) -> None:
    # From Python 3.13 a file that an error is about may stay open until then, and HDF5 takes what
    # it has read of a file that is open.
    gc.collect(1)
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ bits]))


def last_row_of(path: Path, element: str) -> np.ndarray:
    return dense(open_collection(path)[[59]].X)


class TestChunks:
    @pytest.mark.parametrize("element", ELEMENTS)
    @pytest.mark.parametrize("filter_", ["gzip", "gzip, shuffle", "fletcher32"])
    def test_with_a_checksum_tell_every_flip(self, write, element, filter_):
        path = write(element, filter_=filter_)
        bounds = chunk_bytes(path, element)
        first, stop = bounds[-1]
        n, n_per_chunk = (60, 7) if element == "X" else (sp.csr_matrix(COUNTS).nnz, 50)
        begin = (len(bounds) - 1) * n_per_chunk
        said = rf"(rows|elements) {begin} to {n} \(bytes {first} to {stop}\): .*"
        for where in np.linspace(first, stop - 1, 6).astype(int).tolist():
            flip(path, where)
            match = rf"^{path}: `{element}`, {'' if filter_ == 'fletcher32' else said}.*; "
            with pytest.raises(FormatError, match=match + ".*copy or download"):
                last_row_of(path, element)
            assert np.array_equal(dense(open_collection(path)[:9].X), COUNTS[:9])
            flip(path, where)
            assert np.array_equal(last_row_of(path, element)[0], COUNTS[59])

    @pytest.mark.parametrize("element", ELEMENTS)
    @pytest.mark.parametrize("filter_", ["lzf", "zstd", "blosc"])
    def test_without_one_tell_what_does_not_decompress(self, write, element, filter_):
        """Other flips give other values: neither these formats nor HDF5 could tell."""
        path = write(element, filter_=filter_)
        first, stop = chunk_bytes(path, element)[-1]
        n_told = 0
        for where in range(first, stop, 5):
            flip(path, where, 0xFF)
            try:
                rows = last_row_of(path, element)
            except FormatError as error:
                n_told += 1
                assert str(error).startswith(f"{path}: `{element}`, ")  # noqa: PT017
                assert str(error).endswith("copy or download it again")  # noqa: PT017
            else:
                assert rows.shape == (1, 30)
            flip(path, where, 0xFF)
        assert n_told > 0

    @pytest.mark.parametrize("element", ELEMENTS)
    @pytest.mark.parametrize(("factor", "of"), [(0.5, "less"), (1.5, "more"), (0.0, "nothing")])
    @pytest.mark.parametrize("filter_", ["gzip", "gzip, shuffle", "zstd", "lzf"])
    def test_that_hold_less_or_more_than_they_should(self, write, element, factor, of, filter_):
        def edit(file):
            stored = file[element].id
            chunk = stored.get_chunk_info(stored.get_num_chunks() - 1)
            n_bytes = int(np.prod(file[element].chunks)) * 4
            other = encoded(filter_, bytes(int(n_bytes * factor)))
            stored.write_direct_chunk(chunk.chunk_offset, other, 0)

        path = write(element, filter_=filter_, edit=edit)
        expected = rf"^{path}: `{element}`, (rows|elements) \d+ to \d+ \(bytes \d+ to \d+\): "
        with pytest.raises(FormatError, match=expected + ".*; the file is damaged, copy"):
            last_row_of(path, element)

    @pytest.mark.parametrize("left_out", [1, 2, 3])
    def test_that_are_stored_as_they_are_but_too_short(self, write, left_out):
        def edit(file):
            file["X/data"].id.write_direct_chunk((0,), bytes(60), left_out)

        path = write(filter_="gzip, shuffle", edit=edit)
        with pytest.raises(FormatError, match=r"`X/data`, elements 0 to 50 .*the file is damaged"):
            open_collection(path)[:]

    @pytest.mark.parametrize("element", ELEMENTS)
    def test_beyond_the_end_of_the_file(self, write, element, monkeypatch):
        path = write(element)
        collection = open_collection(path)
        assert np.array_equal(dense(collection[:].X), COUNTS)
        first, stop = chunk_bytes(path, element)[-1]
        os.truncate(path, (first + stop) // 2)
        with pytest.raises(FormatError, match=f"^{path}: was replaced or written to"):
            collection[:]
        # As where a time would not tell.
        monkeypatch.setattr("cellfeed.sources._source.WatchedFiles.check", lambda self: None)
        expected = rf"^{path}: `{element}`, .* \(bytes {first} to {stop}\): are beyond the end"
        with pytest.raises(FormatError, match=expected):
            collection[[59]]

    @pytest.mark.parametrize("filter_", ["gzip", "none", "fletcher32"])
    def test_on_a_disk_that_fails(self, write, tmp_path, filter_):
        path = write("X", filter_=filter_)
        collection = open_collection(path)
        collection[:1]
        opened = [
            file.fd for file in psutil.Process().open_files() if Path(file.path) == path.resolve()
        ]
        assert opened
        with (tmp_path / "other").open("wb") as unreadable:
            for descriptor in opened:  # `pread` fails with EBADF, as with EIO
                os.dup2(unreadable.fileno(), descriptor)
        with pytest.raises(FormatError, match=rf"(?s)^{path}: `X`.* cannot be read.*; .*copy"):
            collection[:]


def encoded(filter_: str, content: bytes) -> bytes:
    if filter_.startswith("gzip"):
        return zlib.compress(content)
    with h5py.File("encoded", "w", driver="core", backing_store=False) as file:
        values = np.frombuffer(content or bytes(1), np.uint8)
        dataset = file.create_dataset("x", data=values, chunks=values.shape, **FILTERS[filter_])
        file.flush()
        return bytes(dataset.id.read_direct_chunk((0,))[1])


class TestHoles:
    """Chunks that were never written, which HDF5 takes to be zero."""

    @pytest.mark.parametrize("filter_", ["none", "gzip", "fletcher32"])
    @pytest.mark.parametrize("element", ["X/indices", "X/data"])
    def test_in_sparse_rows_are_damage(self, write, element, filter_):
        path = write(element, filter_=filter_, edit=lambda file: leave_out(file, element))
        match = rf"^{path}: `X.* missing; copy or download"
        with pytest.raises(FormatError, match=match):
            open_collection(path)[:]

    @pytest.mark.parametrize("filter_", ["none", "gzip", "fletcher32"])
    def test_in_dense_ones_are_zero(self, write, filter_):
        path = write("X", filter_=filter_, edit=lambda file: leave_out(file, "X"))
        expected = COUNTS.copy()
        expected[7:14] = 0
        assert np.array_equal(open_collection(path)[:].X, expected)


def leave_out(file: h5py.File, name: str) -> None:
    """Write an element anew, but for its second chunk."""
    stored = file[name]
    values, options = stored[:], {"chunks": stored.chunks, "dcpl": stored.id.get_create_plist()}
    del file[name]
    created = file.create_dataset(name, values.shape, values.dtype, **options)
    n = options["chunks"][0]
    created[:n], created[2 * n :] = values[:n], values[2 * n :]


class TestRowPointers:
    def test_that_end_elsewhere_when_they_are_read(self, write, monkeypatch):
        source: Any = open_collection(write()).sources[0].elements["X"]
        monkeypatch.setattr(source, "_n_elements", source._n_elements + 1)
        with pytest.raises(FormatError, match="the row pointers do not ascend from 0 to"):
            source.row_lengths(np.array([[0, 1]]))

    def test_of_which_some_were_never_written(self, write):
        """HDF5 reads them as zeros, as which the row after them has the elements of all."""

        def edit(file):
            pointers = file["X/indptr"][:]
            del file["X/indptr"]
            written = file.create_dataset("X/indptr", pointers.shape, pointers.dtype, chunks=(8,))
            written[8:] = pointers[8:]

        path = write(filter_="gzip", edit=edit)
        with pytest.raises(FormatError, match=f"^{path}: `X`: 1 of its chunks or shards are miss"):
            open_collection(path)[[0]]


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (OSError("first\n  second"), FormatError, r"`X`, .* cannot be read \(first second\); the "),
        # What the machine lacks is not called damage.
        (RuntimeError("can't start new thread"), RuntimeError, "can't start new thread$"),
        (OSError(errno.EMFILE, "Too many open files"), OSError, "Too many open files$"),
    ],
)
def test_errors_of_the_library_are_told_in_one_line(write, monkeypatch, error, kind, said):
    collection = open_collection(write("X", filter_="fletcher32"))
    collection[:]

    def fail(*_):
        raise error

    monkeypatch.setattr(h5py.Dataset, "__getitem__", fail)
    with pytest.raises(kind, match=said):
        collection[:]


@pytest.mark.process
@pytest.mark.slow
def test_damage_anywhere_gives_rows_or_an_error_of_ours(write):
    """HDF5's own tables have no checksum in files of this age: some rows may be others."""
    paths = [write(element, filter_="gzip, shuffle") for element in ("X/data", "X")]
    fuzzer = Path(__file__).parents[1] / "fuzzing.py"
    for outcome in warm.output_of("-W", "error", fuzzer, "files", 100, *paths).splitlines():
        assert "told" in outcome
        assert "same" in outcome
