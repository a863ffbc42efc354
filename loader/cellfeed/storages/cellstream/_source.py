"""Archives of cellstream, decoded by cellstream's own library into cellfeed's minibatches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location, removed
from cellfeed.decode import ChunkReads, Pieces, SlowRead, pieced_array
from cellfeed.extending import FormatError, PathError, ad, pd
from cellfeed.rows import Layout
from cellfeed.sources import (
    DirectCsr,
    OpenedPerProcess,
    Runs,
    Source,
    Storage,
    StoredElement,
    WatchedFiles,
    as_names,
    as_text,
    count_rows,
    expand,
    failures_named,
    files_in,
    fill,
    library,
)
from cellfeed.sources.arrow import to_frame

_MAGIC, _PAYLOAD = b"SHPK", "x_payload"
_LARGEST = 1 << 24  # float32 represents integers up to this exactly

Decode = Callable[[NDArray[np.int64], NDArray[Any], NDArray[Any]], None]
"""Writes the column indices and values of rows into arrays, in any thread."""


class Opened(NamedTuple):
    """What is known of an archive in this process.

    Parameters
    ----------
    manifest, shape
        Its manifest, and the number of cells and of genes.
    offsets, indptr
        Where the frame of each cell begins, and its elements, int64, shape (n_cells + 1,).
    decode, is_compiled
        A decoder, and whether it is the compiled one that `gather_rows` calls.
    """

    manifest: Any
    shape: tuple[int, int]
    offsets: NDArray[np.int64]
    indptr: NDArray[np.int64]
    decode: Decode
    is_compiled: bool


class Archive(OpenedPerProcess):
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

    def library(self, name: str = "cellstream") -> Any:
        """Return cellstream, or one of its modules."""
        return library(name, self.location, what="a cellstream archive", extra="cellstream")

    def check_unchanged(self) -> None:
        """Check that the path still refers to the file that was opened first.

        The file is memory-mapped: reading a part that no longer exists would kill the process.
        """
        self._watched.check()

    @contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Check before and after that the file is unchanged; name failures of cellstream."""
        self.check_unchanged()
        said = f"{self.location}: cellstream cannot read its {what}"
        with failures_named(said, "if it is damaged, copy it again"):
            yield
        self.check_unchanged()

    def packed(self) -> Any:
        """Return the `cellstream.packed.PackedArchive`, which locates its members."""
        return self.library("cellstream.packed").PackedArchive(self.path)

    def _open(self) -> Any:
        cellstream = self.library()
        try:
            self._watched.see(self.path, self.path.stat(), self.location)
        except FileNotFoundError as error:
            raise removed(self.location) from error
        with self.reading("archive"):
            if self.packed().manifest.get("layout") != "cell":
                msg = f"{self.location}: is a cellstream archive with shards, not with a frame"
                raise FormatError(f'{msg} for each cell; write it with `layout="cell"`')
            with closing(cellstream.CellStore(self.path)) as store:  # which checks its tables
                tables = store.manifest, store.shape, store.offsets, store.indptr
            return Opened(*tables, *self._decoder(*tables))

    def _decoder(
        self,
        manifest: Any,
        shape: tuple[int, int],
        offsets: NDArray[np.int64],
        indptr: NDArray[np.int64],
    ) -> tuple[Decode, bool]:
        """Return a decoder, and whether it is compiled.

        `gather_rows` calls the same decoder, but returns new SciPy arrays, which have to be copied.
        That takes at least a third more processor time.
        """
        try:
            compiled = import_module("cellstream.cell._rust_dispatch")
            is_compiled, decode_cells = compiled.rust_available(), compiled.decode_cells
        except (ImportError, AttributeError):  # of another version
            is_compiled = False
        if not is_compiled:

            def gather(rows: NDArray[Any], indices: NDArray[Any], data: NDArray[Any]) -> None:
                with closing(self.library().CellStore(self.path)) as store:
                    found = store.gather_rows(rows, out_dtype=data.dtype)
                indices[:], data[:] = found.indices, found.data

            return gather, False
        _, first, n_bytes = self.packed().member_location(_PAYLOAD)
        payload = np.asarray(np.memmap(self.path, np.uint8, "r", first, (n_bytes,)))
        options = {
            "codec": manifest["codec"],
            "value_dtype_on_disk": manifest["value_dtype_on_disk"],
            "n_vars": shape[1],
            "allow_lossy": True,  # such as float64 values requested as float32
            "n_threads": 1,
        }

        def decode(rows: NDArray[Any], indices: NDArray[Any], data: NDArray[Any]) -> None:
            ends = np.empty(rows.size + 1, np.int64)
            decode_cells(payload, offsets, indptr, rows, data, indices, ends, **options)

        return decode, True

    def member(self, name: str) -> Any:
        """Return a member of the archive as a memory-mapped file."""
        import pyarrow as pa  # noqa: PLC0415 - cellstream needs it

        _, first, n_bytes = self.packed().member_location(name)
        with pa.memory_map(str(self.path)) as whole:
            whole.seek(first)
            return pa.BufferReader(whole.read_buffer(n_bytes))

    @contextmanager
    def header(self) -> Iterator[h5py.File]:
        """Open all but the matrix: an AnnData file within the archive."""
        with self.reading("header"), h5py.File(self.member("header.h5ad"), "r") as file:
            yield file

    def obs(self, columns: Sequence[str], **options: bool) -> Any:
        """Read obs columns as a `pyarrow.Table`."""
        import pyarrow.parquet as pq  # noqa: PLC0415 - cellstream needs it

        with self.reading("obs"):
            return pq.ParquetFile(self.member("obs.parquet")).read([*columns], **options)

    def var(self) -> pd.DataFrame:
        """Read the table of genes."""
        with self.header() as file:
            found: pd.DataFrame = ad.io.read_elem(file["var"])
        return found


class CellFrames(DirectCsr):
    """The matrix, with a frame for each cell.

    Values are float32, as cellstream returns them, or float64 if float32 may not represent them.
    """

    decodes_to = frozenset(map(np.dtype, ("float32", "float64")))

    def __init__(self, archive: Archive) -> None:
        opened, self._archive = archive(), archive
        stored, self.shape = opened.manifest["value_dtype_on_disk"], opened.shape
        is_wide = stored == "float64" or (
            stored == "uint32" and np.iinfo(opened.manifest["x_data_dtype_min"]).max > _LARGEST
        )
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)
        _, first, n_bytes = archive.packed().member_location(_PAYLOAD)
        self._frames = pieced_array(
            f"{archive.location}: `X`",
            Pieces.one(first, n_bytes, 1),
            np.dtype(np.uint8),
            files_in(archive.path.parent, [archive.path.name]),
        )

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return as_names(self._archive.var().index)

    def stored_bytes(self) -> int:
        """Return the size in bytes of the frames, and of the tables that locate them."""
        offsets = self._archive().offsets
        return int(offsets[-1] + 2 * offsets.nbytes)

    def codec(self) -> str:
        """Return the compression of frames."""
        return str(self._archive().manifest["codec"])

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - any is cast to
        """Return why cells are not decoded in place; None if they are."""
        if self._archive().is_compiled:
            return None
        return SlowRead(
            "cellstream", "its compiled decoder is missing", "install its current wheel"
        )

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of nonzeros of each cell."""
        return _differences(self._archive().indptr, expand(runs))

    def stored_rows(self, rows: NDArray[np.int64]) -> ChunkReads:
        """Return the bytes of the frames of cells; see `DirectCsr`."""
        offsets = self._archive().offsets
        return self._frames.reads_of_ranges(
            offsets[rows],
            _differences(offsets, rows),
            np.zeros(rows.size, np.int64),
            self._frames.dtype,
        ).without_placing()

    def decode_rows(
        self, rows: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
    ) -> None:
        """Decode cells one after the other; see `DirectCsr`."""
        self._archive.check_unchanged()
        try:
            self._archive().decode(rows, indices, data)
        except Exception as error:  # describing it takes longer than many calls
            with self._archive.reading(f"cells {rows.min()} to {rows.max()}"):
                raise error from None
        self._archive.check_unchanged()


def _differences(pointers: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return pointers[rows + 1] - pointers[rows]


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

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns, without the names of the cells."""
        with self._archive.reading("obs"):
            return list(self._archive.packed().obs_columns())

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        return to_frame(self._archive.obs(columns))

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Read some rows of obs columns, indexed by the names of the cells."""
        found = self._archive.obs(columns, use_pandas_metadata=True).take(rows).to_pandas()
        return as_text(found.set_index(found.index.astype(str)))

    def read_var(self) -> pd.DataFrame:
        """Read the table of genes."""
        return self._archive.var()


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
