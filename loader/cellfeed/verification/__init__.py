"""`verify`: reading everything of files and stores once, to find what is damaged."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import h5py
import numpy as np

from cellfeed.bytes import LastingIdentity, Location
from cellfeed.collection import located
from cellfeed.decode import ChunkedArray, Decoder
from cellfeed.extending import (
    FormatError,
    ParameterError,
    PathError,
    require_positive,
    usable_cpu_count,
)
from cellfeed.sources.anndata import (
    ANNDATA,
    AnnDataFile,
    LocalH5File,
    LocalZarrStore,
    damage_named,
    is_group,
    text,
)

__all__ = ["Verified", "verify"]

PathLike = str | os.PathLike[str]
OnBytes: TypeAlias = Callable[[float], object]

_Read = TypeVar("_Read")
_PIECE_BYTES = 1 << 25  # decompressed together
_TEXT_BYTES = 64  # of a text in memory, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What `verify` found.

    Attributes
    ----------
    damage
        A line for each damaged chunk, array or metadata file: where it is, and what is wrong.
    without_checksums
        Names of the arrays of each file or store without checksums. Only their decompression and
        structure could be checked.
    n_arrays, n_bytes
        Number of arrays, and of the bytes in which they are stored.
    """

    damage: tuple[str, ...]
    without_checksums: Mapping[str, tuple[str, ...]]
    n_arrays: int
    n_bytes: int


def verify(
    paths: PathLike | Iterable[PathLike],
    *,
    num_threads: int | None = None,
    on_progress: Callable[[float, float], object] | None = None,
) -> Verified:
    """Read everything of HDF5 files and zarr stores once, and find what is damaged.

    Every chunk of every array is decompressed completely, and its checksum verified if it has one.
    Column indices and row pointers of sparse matrices must fit each other, and the metadata of a
    zarr store their consolidated copy. Nothing is taken from the cache of cellfeed. Not checked are
    HDF5's own metadata and texts, and metadata of zarr without a copy, as far as they can be read.

    Parameters
    ----------
    paths
        Paths of local files and stores of AnnData, folders of them, or patterns.
    num_threads
        Number of threads; by default, one for each processor that the process may use.
    on_progress
        Called with the number of stored bytes that have been read, and with all of them.

    Returns
    -------
    A `Verified`; nothing is damaged if its ``damage`` is empty.

    Raises
    ------
    PathError
        There is no such file, or it may not be read.
    ParameterError
        A path is a URL, or of another format.

    Examples
    --------
    >>> import tempfile
    >>> from cellfeed.synthetic import write_tahoe_like
    >>> folder = Path(tempfile.mkdtemp())
    >>> [path] = write_tahoe_like(folder, n_cells=100, n_genes=500, n_plates=1, n_drugs=4)
    >>> found = verify(path)
    >>> found.damage
    ()
    """
    given = paths if isinstance(paths, str | os.PathLike) else list(paths)
    files = [_opened(location, storage.name) for location, storage in located(given)]  # type: ignore[arg-type]
    if num_threads is None:
        num_threads = usable_cpu_count()
    num_threads = require_positive("num_threads", num_threads)
    total, done = sum(map(_size, files)), 0.0

    def on_bytes(n: float) -> None:
        nonlocal done
        done += n
        if on_progress is not None:
            on_progress(min(done, total), total)

    with ThreadPoolExecutor(num_threads, thread_name_prefix="cellfeed-verify") as threads:
        decoder = Decoder(threads, num_threads, verify="always")
        found = [_Verification(file, decoder, on_bytes) for file in files]
        for each in found:
            each.run()
    on_bytes(total)
    return Verified(
        damage=tuple(line for each in found for line in each.damage),
        without_checksums={
            str(each.file.location): tuple(each.without_checksums)
            for each in found
            if each.without_checksums
        },
        n_arrays=sum(each.n_arrays for each in found),
        n_bytes=sum(each.n_bytes for each in found),
    )


class _File(LocalH5File):
    """An HDF5 file of which no tables are cached."""

    def identity(self) -> LastingIdentity | None:
        return None


class _Store(LocalZarrStore):
    """A zarr store of which no tables are cached."""

    def _identity_of(self, name: str) -> LastingIdentity | None:  # noqa: ARG002 - as overridden
        return None


def _opened(location: Location, storage: str) -> AnnDataFile:
    if location.path is None:
        msg = f"{location}: `verify` reads local files; download it first"
        raise ParameterError(msg)
    if storage != ANNDATA.name:
        msg = f"{location}: is {storage}, but `verify` reads HDF5 files and zarr stores of AnnData"
        raise ParameterError(f"{msg}; leave it out")
    return _Store(location) if location.path.is_dir() else _File(location.path)


def _size(file: AnnDataFile) -> int:
    path = Path(file.location)
    if path.is_file():
        return path.stat().st_size
    walked = os.walk(path, followlinks=True)
    return sum(Path(folder, name).lstat().st_size for folder, _, names in walked for name in names)


class _Verification:
    """Reads everything of one file or store, and collects what is damaged."""

    def __init__(self, file: AnnDataFile, decoder: Decoder, on_bytes: OnBytes) -> None:
        self.file, self._decoder, self._on_bytes = file, decoder, on_bytes
        self.damage = list[str]()
        self.without_checksums = list[str]()
        self.n_arrays = self.n_bytes = 0
        self._failed = set[str]()  # paths of groups and arrays

    def run(self) -> None:
        path, sparse = Path(self.file.location), dict[str, _Sparse]()
        for name, node in self._nodes():
            if is_group(node):
                found = self._attempt(name, _Sparse.of, node)
                if found is not None:
                    sparse[name] = found
            else:
                above, _, own_name = name.rpartition("/")
                are_indices = own_name == "indices" and above in sparse
                self._read_array(name, node, sparse[above].n_minor if are_indices else None)
        for name, line in _differences_from_consolidated(path) if path.is_dir() else ():
            if name not in self._failed:
                self._failed.add(name)
                self.damage.append(line)
        for name, of_matrix in sparse.items():
            if self._failed.isdisjoint(f"{name}/{each}" for each in ("indptr", "indices", "data")):
                self._attempt(name, of_matrix.check, self.file, name)

    def _attempt(self, name: str, read: Callable[..., _Read], *arguments: Any) -> _Read | None:
        """Return what a function returns; None if it fails, which is recorded."""
        try:
            with damage_named(self.file.location, name or "/"):
                return read(*arguments)
        except (FormatError, PathError) as error:
            if isinstance(error, PathError) and not name:
                raise  # the file or store itself is missing, or may not be read
            self.damage.append(str(error))
            self._failed.add(name)
            return None

    def _nodes(self) -> Iterator[tuple[str, Any]]:
        """Yield the path and the object of each group and array, groups before their members.

        An object of HDF5 with several links is yielded once; soft links are not followed.
        """
        path, seen = Path(self.file.location), set[tuple[int, int]]()
        names = iter(_names_in_store(path)) if path.is_dir() else iter([""])
        waiting = list[str]()
        while (name := waiting.pop() if waiting else next(names, None)) is not None:
            node = self._attempt(name, self._examined, name)
            if node is None:
                continue
            if isinstance(node, h5py.Group | h5py.Dataset):
                there = h5py.h5o.get_info(node.id)
                if (there.fileno, there.addr) in seen:
                    continue
                seen.add((there.fileno, there.addr))
            if isinstance(node, h5py.Group):
                members = self._attempt(name, _members, node) or []
                waiting += [f"{name}/{each}".lstrip("/") for each in reversed(members)]
            yield name, node

    def _examined(self, name: str) -> Any:
        """Return a group or array, of which all attributes can be read."""
        node = self.file.stored(name) if name else self.file()
        dict(node.attrs)
        return node

    def _read_array(self, name: str, stored: Any, n_columns: int | None) -> None:
        """Read an array of h5py or zarr; with ``n_columns``, its elements are column indices."""
        self.n_arrays += 1
        n_bytes = 0
        with suppress(OSError, RuntimeError):  # reading will find out why
            n_bytes = self.file.stored_bytes(name) or 0
        self.n_bytes += n_bytes
        if n_bytes and self._attempt(name, self.file.has_checksums, name) is False:
            self.without_checksums.append(name)
        read = self._attempt(name, self._reader, name, stored, n_columns)
        if read is None:
            return
        for rows in _divided(range(read.n_rows), read.step * read.n_steps):
            try:
                read(rows)
            except (FormatError, PathError):  # find out which chunks are damaged
                for chunk in _divided(rows, read.step):
                    self._attempt(name, read, chunk)
            self._on_bytes(n_bytes * len(rows) / read.n_rows)

    def _reader(self, name: str, stored: Any, n_columns: int | None) -> "_ChunkReader | _Reader":
        if stored.shape and stored.size:
            self.file.watch([name])
            array = self.file.chunked_array(name, lost_is_zero=True)
            if array is not None and (n_columns is None or array.dtype.kind in "iu"):
                return _ChunkReader(array, n_columns, self._decoder)
        return _Reader(self.file.location, name, stored, n_columns)


class _ChunkReader:
    """Reads rows of an array from its chunks.

    Attributes
    ----------
    n_rows, step, n_steps
        Number of rows, those of a chunk, and the number of chunks to read together.
    """

    def __init__(self, array: ChunkedArray, n_columns: int | None, decoder: Decoder) -> None:
        self._array, self._n_columns, self._decoder = array, n_columns, decoder
        self.n_rows, self.step = array.shape[0], array.chunk_shape[0]
        of_chunks = math.prod((self.step, *array.shape[1:])) * array.dtype.itemsize
        self.n_steps = max(1, _PIECE_BYTES // of_chunks)

    def __call__(self, rows: range) -> None:
        array, n = self._array, len(rows)
        start, count, place = (np.array([each], np.int64) for each in (rows.start, n, 0))
        if self._n_columns is not None:
            columns = np.empty(n, np.int32)
            reads = array.reads_of_ranges(
                start, count, place, columns.dtype, index_limit=self._n_columns
            )
            reads.run(np.array([columns.ctypes.data], np.int64), self._decoder)
        elif len(array.shape) == 1:
            array.reads_of_ranges(start, count, place, array.dtype).decompress(self._decoder)
        else:
            places = np.zeros(n, np.int64)
            reads = array.reads_of_rows(np.arange(rows.start, rows.stop), places, array.dtype)
            reads.decompress(self._decoder)


class _Reader:
    """Reads rows of an array through h5py or zarr; its attributes are those of `_ChunkReader`."""

    def __init__(self, location: Location, name: str, stored: Any, n_columns: int | None) -> None:
        self._location, self._name, self._n_columns = location, name, n_columns
        is_text = isinstance(stored, h5py.Dataset) and h5py.check_string_dtype(stored.dtype)
        self._stored = stored.asstr() if is_text else stored
        self._is_single = not stored.shape  # or empty
        shape: tuple[int, ...] = stored.shape or (1,)
        self.n_rows = shape[0]
        row_bytes = max(_TEXT_BYTES, stored.dtype.itemsize) * max(1, math.prod(shape[1:]))
        n_rows: int = max(1, _PIECE_BYTES // row_bytes)  # read together
        self.step = n_rows if self._is_single or not stored.chunks else stored.chunks[0]
        self.n_steps = max(1, n_rows // self.step)

    def __call__(self, rows: range) -> None:
        runs = None if self._is_single else np.array([[rows.start, rows.stop]])
        with damage_named(self._location, self._name, runs):
            values = self._stored[() if runs is None else slice(rows.start, rows.stop)]
        n = self._n_columns
        if n is not None and values.size and not 0 <= values.min() <= values.max() < n:
            msg = f"{self._location}: `{self._name}`, rows {rows.start} to {rows.stop}: have a "
            raise FormatError(f"{msg}column index outside of the matrix; write the file again")


@dataclass(frozen=True, slots=True)
class _Sparse:
    """Shape of a matrix in CSR or CSC format: rows or columns, and what indices count."""

    n_major: int
    n_minor: int

    @classmethod
    def of(cls, group: Any) -> "_Sparse | None":
        """Return the shape of a sparse matrix; None for other groups."""
        encoding = text(group, "encoding-type")
        if encoding not in ("csr_matrix", "csc_matrix"):
            return None
        shape = [int(n) for n in group.attrs["shape"]]
        return cls(*(shape if encoding == "csr_matrix" else reversed(shape)))

    def check(self, file: AnnDataFile, name: str) -> None:
        """Check that the pointers fit the arrays.

        Raises
        ------
        FormatError
            They do not, or chunks of values are missing.
        """
        indptr = np.asarray(file.stored(f"{name}/indptr")[:])
        sizes = {file.stored(f"{name}/{each}").size for each in ("indices", "data")}
        fits = indptr.size == self.n_major + 1 and indptr[0] == 0 and {int(indptr[-1])} == sizes
        if not fits or (indptr[1:] < indptr[:-1]).any():
            msg = f"{file.location}: `{name}/indptr` does not fit the shape, indices and data of"
            raise FormatError(f"{msg} `{name}`; copy or download it again")
        if n_lost := file.n_lost(f"{name}/data"):
            msg = f"{file.location}: `{name}/data`: {n_lost} of its chunks or shards are missing"
            raise FormatError(f"{msg}; copy or download it again")


def _members(group: h5py.Group) -> list[str]:
    """Return the names of the members of a group, without soft links, whose targets have others."""
    return [name for name in group if not isinstance(group.get(name, getlink=True), h5py.SoftLink)]


def _divided(rows: range, step: int) -> Iterator[range]:
    for start in range(rows.start, rows.stop, step):
        yield range(start, min(start + step, rows.stop))


# The nodes of a zarr store, and the consolidated copy of their metadata.

_NODE_METADATA = ("zarr.json", ".zgroup", ".zarray")


def _names_in_store(path: Path) -> Iterator[str]:
    """Yield the paths of groups and arrays, as far as each has metadata; "" is the store."""
    for folder, folders, files in os.walk(path, followlinks=True):
        if not any(name in files for name in _NODE_METADATA):
            folders.clear()  # they contain chunks
            continue
        folders.sort()
        name = str(Path(folder).relative_to(path))
        yield "" if name == "." else name


def _differences_from_consolidated(path: Path) -> Iterator[tuple[str, str]]:
    """Yield each node whose metadata differ from their copy in those of the store, and a line."""
    of_nodes = _content(path / "zarr.json").get("consolidated_metadata") or {}
    of_files = _content(path / ".zmetadata")  # of version 2
    copies = {f"{name}/zarr.json": each for name, each in (of_nodes.get("metadata") or {}).items()}
    for file, copy in (copies | (of_files.get("metadata") or {})).items():
        name = file.rpartition("/")[0]
        if not (path / file).is_file():
            yield name, f"{path / file}: is missing; copy or download the store again"
        elif _without_copies(_content(path / file)) != _without_copies(copy):
            msg = f"{path / file}: differs from its consolidated copy at {path}; copy or download"
            yield name, f"{msg} the store again or, if it was changed, consolidate it again"


def _content(file: Path) -> dict[str, Any]:
    """Return the content of a file of metadata; empty if it is missing or damaged."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _without_copies(metadata: dict[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in metadata.items() if name != "consolidated_metadata"}
