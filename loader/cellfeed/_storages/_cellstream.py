"""Archives of cellstream, decoded by cellstream's own library into cellfeed's minibatches."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, LastingIdentity, Location, lasting_identity, removed
from cellfeed._bytes._store import closed_with
from cellfeed._decode import ChunkReads, Pieces, SlowRead, pieced_array
from cellfeed._errors import CellfeedError, FormatError, PathError, one_line
from cellfeed._lazy import ad, pd
from cellfeed._rows import Layout
from cellfeed._runs import Runs, count_rows, expand
from cellfeed._storages._registry import Storage, library, to_frame
from cellfeed._storages._source import (
    DirectCsr,
    OpenedPerProcess,
    Source,
    StoredElement,
    WatchedFiles,
    as_names,
    as_text,
    fill,
)

# An archive opened in this process: its tables, the bytes of its cells, and its decoder.

_WHAT = "a cellstream archive"
_PAYLOAD = "x_payload"


Decode = Callable[[NDArray[np.int64], NDArray[Any], NDArray[Any]], None]


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An opened archive, in one process.

    Parameters
    ----------
    packed
        The `cellstream.packed.reader.PackedArchive`, which locates its members.
    shape
        Number of cells and of genes.
    offsets, indptr
        Where the frame of each cell begins, and its elements, int64, shape (n_cells + 1,).
    descriptor, owner
        Descriptor of the file, and the object that closes it.
    first
        Where the frames of the cells begin in the file.
    payload
        These frames, uint8, memory-mapped.
    decode
        cellstream's decoder of rows into memory for values and column indices; None if this version
        of cellstream lacks it, or does not support the archive.
    """

    packed: Any
    shape: tuple[int, int]
    offsets: NDArray[np.int64]
    indptr: NDArray[np.int64]
    descriptor: int
    owner: object
    first: int
    payload: NDArray[np.uint8]
    decode: Decode | None


class Archive(OpenedPerProcess, ByteStore):
    """An archive, opened separately in each process that reads it.

    Parameters
    ----------
    location
        A local file.

    Attributes
    ----------
    path
        The file.
    """

    def __init__(self, location: Location) -> None:
        if location.path is None:
            msg = f"{location}: cellstream archives must be local"
            raise PathError(f"{msg}; download it")
        self.location = location
        self.path = location.path.absolute()  # stays valid if the working directory changes
        self._watched = WatchedFiles()

    @contextmanager
    def failures_named(self, what: str) -> Iterator[None]:
        """Convert errors of cellstream into an error of one line.

        Raises
        ------
        FormatError
            Replaces any error that it raises.
        """
        try:
            yield
        except CellfeedError:
            raise
        except FileNotFoundError as error:
            raise removed(self.location) from error
        except Exception as error:
            said = one_line(error).removeprefix(f"{self.path}: ")
            msg = f"{self.location}: cellstream cannot read its {what} ({said})"
            raise FormatError(f"{msg}; if it is damaged, copy it again") from error

    def check_unchanged(self) -> None:
        """Check that the path still refers to the file that was opened first.

        The file is memory-mapped: reading a part that no longer exists would kill the process.
        """
        self._watched.check()

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location of the archive."""
        return self.location

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the file in bytes."""
        return np.full(len(files), os.fstat(self().descriptor).st_size, np.int64)

    def identity(self) -> LastingIdentity | None:
        """Return the identity of the file."""
        return lasting_identity([("", os.fstat(self().descriptor))])

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object]:
        """Return the file descriptor; see `ByteStore`."""
        self.check_unchanged()
        opened = self()
        return np.full(len(files), opened.descriptor, np.int64), opened

    def check_files(self, files: NDArray[np.int64]) -> None:  # noqa: ARG002 - there is one
        """Check the file; see `ByteStore`."""
        self.check_unchanged()

    def _open(self) -> Opened:
        cellstream = library("cellstream", self.location, what=_WHAT, extra="cellstream")
        reader = library("cellstream.packed.reader", self.location, what=_WHAT, extra="cellstream")
        with self.failures_named("archive"):
            packed = reader.PackedArchive(self.path)
            if packed.manifest.get("layout") != "cell":
                msg = f"{self.location}: is a cellstream archive with shards, not with a frame"
                raise FormatError(f'{msg} for each cell; write it with `layout="cell"`')
            with closing(cellstream.CellStore(self.path)) as store:  # which checks its tables
                shape, offsets, indptr = store.shape, store.offsets, store.indptr
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            owner = closed_with(descriptor)
            self._watched.see(self.path, os.fstat(descriptor), self.location)
            _, first, n_bytes = packed.member_location(_PAYLOAD)
            payload = np.empty(0, np.uint8)
            if n_bytes:
                mapped = mmap.mmap(descriptor, n_bytes, offset=first, access=mmap.ACCESS_READ)
                payload = np.frombuffer(mapped, np.uint8)
            decode = _decoder(packed.manifest, payload, offsets, indptr, shape[1])
        return Opened(packed, shape, offsets, indptr, descriptor, owner, first, payload, decode)

    def gather(self, rows: NDArray[np.int64], dtype: np.dtype[Any]) -> Any:
        """Return rows, as CSR of SciPy, by cellstream's own function."""
        cellstream = library("cellstream", self.location, what=_WHAT, extra="cellstream")
        with closing(cellstream.CellStore(self.path)) as store:
            return store.gather_rows(rows, out_dtype=dtype)

    @contextmanager
    def header(self) -> Iterator[h5py.File]:
        """Open all but the matrix: an AnnData file within the archive."""
        with self.failures_named("header"), h5py.File(self.member("header.h5ad"), "r") as file:
            yield file

    def member(self, name: str) -> Any:
        """Return a member of the archive as a memory-mapped file."""
        import pyarrow as pa  # noqa: PLC0415 - cellstream needs it

        _, first, n_bytes = self().packed.member_location(name)
        self.check_unchanged()
        with pa.memory_map(str(self.path)) as whole:
            whole.seek(first)
            return pa.BufferReader(whole.read_buffer(n_bytes))

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        with self.header() as file:
            found: pd.DataFrame = ad.io.read_elem(file["var"])
        return found


def _decoder(
    manifest: Any,
    payload: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    indptr: NDArray[np.int64],
    n_genes: int,
) -> Decode | None:
    """Return cellstream's compiled decoder, if it exists and supports the archive.

    cellstream's `gather_rows` calls the same decoder, but allocates memory on each call.
    """
    try:
        dispatch = import_module("cellstream.cell._rust_dispatch")
        decode_cells, is_decodable = dispatch.decode_cells, dispatch.use_rust_for_cell_decode
    except (ImportError, AttributeError):  # of another version
        return None
    codec, dtypes = manifest["codec"], [manifest[f"{k}_dtype_on_disk"] for k in ("index", "value")]
    if not is_decodable(codec, *dtypes, np.float32, np.int32):
        return None
    options = {
        "codec": codec,
        "value_dtype_on_disk": dtypes[1],
        "n_vars": n_genes,
        "allow_lossy": True,  # such as float64 values requested as float32
        "n_threads": 1,
    }

    def decode(rows: NDArray[np.int64], data: NDArray[Any], indices: NDArray[Any]) -> None:
        ends = np.empty(rows.size + 1, np.int64)
        decode_cells(payload, offsets, indptr, rows, data, indices, ends, **options)

    return decode


# The matrix of an archive, which stores each cell in a frame of its own.

_FLOATS = frozenset(map(np.dtype, ("float32", "float64")))
_LARGEST = 1 << 24  # float32 represents integers up to this exactly


class CellFrames(DirectCsr):
    """The frames of an archive's cells.

    Values are float32, as cellstream returns them, or float64 if float32 may not represent them.

    Parameters
    ----------
    archive
        The archive.
    """

    decodes_to = _FLOATS

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        opened = archive()
        manifest, self.shape = opened.packed.manifest, opened.shape
        is_wide = manifest["value_dtype_on_disk"] == "float64" or (
            manifest["value_dtype_on_disk"] == "uint32"
            and np.iinfo(manifest["x_data_dtype_min"]).max > _LARGEST
        )
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)
        frames = Pieces.one(opened.first, opened.payload.size, 1)
        name = f"{archive.location}: `X`"
        self._stored = pieced_array(name, frames, np.dtype(np.uint8), archive)

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return as_names(self._archive.read_var().index)

    def stored_bytes(self) -> int:
        """Return the size in bytes of the frames, and of the tables that locate them."""
        tables = 2 * 8 * (self.shape[0] + 1)
        return int(self._archive().payload.size) + tables

    def codec(self) -> str:
        """Return the compression of frames."""
        return str(self._archive().packed.manifest["codec"])

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - any is cast to
        """Return why cells are not decoded in place; None if they are."""
        if self._archive().decode is not None:
            return None
        reason = "its compiled decoder is missing or does not support these values"
        return SlowRead("cellstream", reason, "install its current wheel")

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of nonzeros of each cell."""
        return _differences(self._archive().indptr, expand(runs))

    def stored_rows(self, rows: NDArray[np.int64]) -> ChunkReads:
        """Return the bytes of cells; see `DirectCsr`."""
        offsets = self._archive().offsets
        nowhere = np.zeros(rows.size, np.int64)
        reads = self._stored.reads_of_ranges(
            offsets[rows], _differences(offsets, rows), nowhere, self._stored.dtype
        )
        return reads.without_placing()

    def decode_rows(
        self, rows: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
    ) -> None:
        """Decode cells one after the other; see `DirectCsr`."""
        opened = self._archive()
        self._archive.check_unchanged()
        try:
            if opened.decode is not None:
                opened.decode(rows, data, indices)
            else:
                found = self._archive.gather(rows, data.dtype)
                indices[:], data[:] = found.indices, found.data
        except Exception as error:  # describing it takes longer than many calls
            with self._archive.failures_named(f"cells {rows.min()} to {rows.max()}"):
                raise error from None
        self._archive.check_unchanged()


def _differences(pointers: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return pointers[rows + 1] - pointers[rows]


# An archive of cellstream as a source.


class CellstreamSource(Source):
    """Cells of an archive that cellstream wrote with ``layout="cell"``.

    `open_collection` takes its path. cellstream (``pip install 'cellfeed[cellstream]'``) reads it:
    its compiled decoder writes directly into cellfeed's minibatches, in as many threads as
    requested.

    Parameters
    ----------
    path
        The archive, a local file.

    Attributes
    ----------
    elements
        ``"X"``, and ``"obsm/NAME"`` for each array of its obsm. Archives have no layers.

    Raises
    ------
    FormatError
        The archive cannot be read, or cellstream is not installed.
    """

    def __init__(self, path: str | os.PathLike[str] | Location) -> None:
        self.location = path if isinstance(path, Location) else Location.of(path)
        self._archive = Archive(self.location)
        self.elements: dict[str, StoredElement] = {"X": CellFrames(self._archive)}
        with self._archive.header() as file:
            for name, stored in file.get("obsm", {}).items():
                if isinstance(stored, h5py.Dataset) and stored.ndim > 1:
                    self.elements[f"obsm/{name}"] = _Embedding(self._archive, name, stored)

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return self.elements["X"].shape[0] if "X" in self.elements else super().n_rows

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns, without the names of the cells."""
        with self._archive.failures_named("obs"):
            return list(self._archive().packed.obs_columns())

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        with self._archive.failures_named("obs"):
            return to_frame(self._obs_table(columns))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, indexed by the names of the cells."""
        with self._archive.failures_named("obs"):
            found = self._obs_table(columns, use_pandas_metadata=True).take(rows).to_pandas()
        return as_text(found.set_index(found.index.astype(str)))

    def _obs_table(self, columns: Sequence[str], **options: bool) -> Any:
        import pyarrow.parquet as pq  # noqa: PLC0415 - cellstream needs it

        return pq.ParquetFile(self._archive.member("obs.parquet")).read([*columns], **options)

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        return self._archive.read_var()


class _Embedding(StoredElement):
    """An array of obsm, which the archive's header stores as a whole."""

    layout: Layout = "dense"
    var = None

    def __init__(self, archive: Archive, name: str, stored: h5py.Dataset) -> None:
        self._archive, self._name = archive, f"obsm/{name}"
        self.shape, self.dtype = stored.shape, stored.dtype.newbyteorder("=")

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read rows."""
        out = np.empty((count_rows(runs), *self.shape[1:]), self.dtype)
        with self._archive.header() as file:
            return fill(out, runs, lambda start, stop: file[self._name][start:stop])


# Files that are archives of cellstream.

_MAGIC = b"SHPK"


def _is_archive(path: Path) -> bool:
    """Return whether a file begins like an archive, without importing cellstream."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


CELLSTREAM = Storage(
    name="cellstream",
    open=lambda location, _: [CellstreamSource(location)],
    suffixes=(".csad", ".shad"),
    recognizes=_is_archive,
    extra="cellstream",
)
