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

from cellfeed._bytes import (
    ByteStore,
    Identity,
    LastingIdentity,
    Location,
    identity,
    lasting_identity,
    removed,
    replaced,
)
from cellfeed._bytes._store import closed_with
from cellfeed._decode import ChunkReads, Pieces, SlowRead, pieced_array
from cellfeed._errors import CellfeedError, FormatError, PathError, one_line
from cellfeed._lazy import ad, pd
from cellfeed._rows import Layout
from cellfeed._runs import Runs, count_rows, expand
from cellfeed._storages._base import (
    DirectCsr,
    Source,
    Storage,
    StorageFacts,
    StoredElement,
    library,
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

    @property
    def manifest(self) -> Any:
        """The manifest of the archive."""
        return self.packed.manifest


class Archive(ByteStore):
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
        self._identity: Identity | None = None
        self._opened: tuple[int, Opened] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}

    def __call__(self) -> Opened:
        """Return the opened archive."""
        if self._opened is None or self._opened[0] != os.getpid():
            with self.failures_named("archive"):
                self._opened = os.getpid(), self._open()
        return self._opened[1]

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
        try:
            self._compare(identity(os.stat(self.path)))  # noqa: PTH116 - called often
        except OSError as error:
            raise removed(self.location) from error

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

    def _open(self) -> Opened:
        cellstream = library("cellstream", self.location, what=_WHAT, extra="cellstream")
        reader = library("cellstream.packed.reader", self.location, what=_WHAT, extra="cellstream")
        packed = reader.PackedArchive(self.path)
        if packed.manifest.get("layout") != "cell":
            msg = f"{self.location}: is a cellstream archive with shards, not with a frame"
            raise FormatError(f'{msg} for each cell; write it with `layout="cell"`')
        with closing(cellstream.CellStore(self.path)) as store:  # which checks its tables
            shape, offsets, indptr = store.shape, store.offsets, store.indptr
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        owner = closed_with(descriptor)
        self._compare(identity(os.fstat(descriptor)))
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

    def _compare(self, found: Identity) -> None:
        if self._identity is None:
            self._identity = found
        if self._identity != found:
            raise replaced(self.location)


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


# Tables of cells and genes in an archive: members of its file, read by column.


def obs_names(archive: Archive) -> list[str]:
    """Return the names of the obs columns, without the names of the cells."""
    with archive.failures_named("obs"):
        return list(archive().packed.obs_columns())


def read_obs(
    archive: Archive, columns: Sequence[str], rows: NDArray[np.int64] | None = None
) -> pd.DataFrame:
    """Read obs columns.

    Parameters
    ----------
    archive
        The archive.
    columns
        Names of the columns; may be empty if rows are given.
    rows
        Rows to read, indexed by the names of the cells; if None, all cells, indexed by number.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - cellstream needs it

    with archive.failures_named("obs"):
        file = pq.ParquetFile(_member(archive, "obs.parquet"))
        table = file.read(columns=[*columns], use_pandas_metadata=rows is not None)
        some = table if rows is None else table.take(rows)
        found: pd.DataFrame = some.to_pandas(ignore_metadata=rows is None)
    return found


def read_var(archive: Archive) -> pd.DataFrame:
    """Read the table of genes."""
    with header(archive) as file:
        found: pd.DataFrame = ad.io.read_elem(file["var"])
    return found


@contextmanager
def header(archive: Archive) -> Iterator[h5py.File]:
    """Open the rest of an archive, all except the matrix: an AnnData file within its file."""
    with archive.failures_named("header"), h5py.File(_member(archive, "header.h5ad"), "r") as file:
        yield file


def _member(archive: Archive, name: str) -> Any:
    """Return a member of the archive as a memory-mapped file."""
    import pyarrow as pa  # noqa: PLC0415 - cellstream needs it

    _, first, n_bytes = archive().packed.member_location(name)
    archive.check_unchanged()
    with pa.memory_map(str(archive.path)) as whole:
        whole.seek(first)
        return pa.BufferReader(whole.read_buffer(n_bytes))


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
        manifest, self.shape = opened.manifest, opened.shape
        is_wide = manifest["value_dtype_on_disk"] == "float64" or (
            manifest["value_dtype_on_disk"] == "uint32"
            and np.iinfo(manifest["x_data_dtype_min"]).max > _LARGEST
        )
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)
        self.is_canonical = bool(manifest.get("indices_canonical", False))
        frames = Pieces.one(opened.first, opened.payload.size, 1)
        name = f"{archive.location}: `X`"
        self._stored = pieced_array(name, frames, np.dtype(np.uint8), archive)

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return read_var(self._archive).index.to_numpy(object)

    def stored_bytes(self) -> int:
        """Return the size in bytes of the frames, and of the tables that locate them."""
        tables = 2 * 8 * (self.shape[0] + 1)
        return int(self._archive().payload.size) + tables

    def codec(self) -> str:
        """Return the compression of frames."""
        return str(self._archive().manifest["codec"])

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
                return
            found = self._archive.gather(rows, data.dtype)
        except Exception as error:  # describing it takes longer than many calls
            with self._archive.failures_named(f"cells {rows.min()} to {rows.max()}"):
                raise error from None
        indices[:], data[:] = found.indices, found.data


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
        frames = CellFrames(self._archive)
        self.elements: dict[str, StoredElement] = {"X": frames}
        with header(self._archive) as file:
            for name, stored in file.get("obsm", {}).items():
                if isinstance(stored, h5py.Dataset) and stored.ndim > 1:
                    self.elements[f"obsm/{name}"] = _Embedding(self._archive, name, stored)

    def __repr__(self) -> str:
        return f"CellstreamSource({str(self.location)!r})"

    @property
    def n_rows(self) -> int:
        """Number of cells."""
        return self.elements["X"].shape[0] if "X" in self.elements else super().n_rows

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return obs_names(self._archive)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        return read_obs(self._archive, columns)

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, indexed by the names of the cells."""
        table = read_obs(self._archive, columns, rows)
        table = table.set_index(table.index.astype(str))
        return table.astype({name: "string" for name in table if table[name].dtype == object})

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        return read_var(self._archive)


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
        done = 0
        with header(self._archive) as file:
            for start, stop in runs.tolist():
                out[done : done + stop - start] = file[self._name][start:stop]
                done += stop - start
        return out


# Files that are archives of cellstream.

_MAGIC = b"SHPK"


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has one
    return [CellstreamSource(location)]


def _is_archive(path: Path) -> bool:
    """Return whether a file begins like an archive, without importing cellstream."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


CELLSTREAM = Storage(
    name="cellstream",
    open=_open,
    suffixes=(".csad", ".shad"),
    recognizes=_is_archive,
    extra="cellstream",
    facts=StorageFacts(
        recognized="a file with the header of `.csad` and `.shad`, and one frame per cell",
        reading="fast: cellstream's compiled decoder writes into minibatches",
    ),
)
