"""Parquet files: their row groups, rows of these, and obs columns.

cellfeed decodes the pages of lists that it knows, from the bytes of their columns; pyarrow decodes
other row groups, and reads local files itself. Of files on servers, the byte ranges of the wanted
columns are requested as for any other format.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import (
    BufferPool,
    ByteStore,
    Location,
    RemoteObjects,
    cancellable_threads,
    open_object,
    require_file,
)
from cellfeed.extending import ColumnError, FormatError, MismatchError, pd
from cellfeed.sources import failures_named, files_in, first_line
from cellfeed.sources.arrow import MISSING, import_arrow, kind, to_frame, values_of
from cellfeed.storages.parquet._footers import END_BYTES, Footer
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._lists import DECODED, describe_lists

EXTRA = "parquet"

# Files and their row groups.

RANGE = [fields.DATA_OFFSET, fields.STORED_BYTES]  # of a column in a row group
_TAIL_BYTES = 1 << 16  # of a file, which mostly contain its footer
_FOOTERS = 64  # that are kept in memory
_AT_ONCE = 16
_BATCH_ROWS = 128  # decoded at a time: few enough to stay in the cache

# Memory that is there once it is written, also if the system has less: `MAP_NORESERVE`.
_LAZY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True, slots=True, eq=False)
class RowGroups:
    """The row groups of some files; arrays have one entry for each.

    Parameters
    ----------
    files, numbers
        Its file, and its number there, int64, shape (n_groups,).
    starts
        Its first row, and the end of the last, int64, shape (n_groups + 1,).
    chunks
        What its footer says of the lists of genes and of values, as `fields` lists it, and
        `describe_lists`; int64, shape (n_groups, 2, N_CHUNK_FIELDS).
    dtype
        Common dtype of the values in all files.
    largest
        Largest gene number; None if a footer does not say it.
    """

    files: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    chunks: NDArray[np.int64]
    dtype: np.dtype[Any]
    largest: int | None

    def ranges(self, group: Any) -> NDArray[np.int64]:
        """Return first byte and number of bytes of both lists of a row group, or of several."""
        found: NDArray[np.int64] = self.chunks[group][..., RANGE]
        return found.reshape(-1, 2)


class ParquetFiles:
    """Parquet files with the same columns.

    Parameters
    ----------
    location
        What the user gave, for messages.
    locations
        The files.

    Attributes
    ----------
    schema
        The `pyarrow.Schema` of the first file.
    names
        Names of the columns: of the first file, and of all when `row_groups` has read them.
    versions
        The version of each file on a server, None until its footer is read.

    Raises
    ------
    PathError
        A file is missing.
    FormatError
        A file is not a Parquet file, or pyarrow is not installed.
    """

    def __init__(self, location: Location, locations: Sequence[Location]) -> None:
        self.location, self.locations = location, tuple(locations)
        import_arrow(location, EXTRA)
        # They stay the same where the working folder changes; on servers, none are needed.
        self._absolute = [str(path.absolute()) for path in self.paths]
        self.versions: list[Any] = [None] * len(self.locations)
        if self._absolute:
            for path in self.paths:
                require_file(path)
            folder = Path(os.path.commonpath([path.parent for path in self.paths]))
            names = [str(path.relative_to(folder)) for path in self.paths]
            self._store: ByteStore = files_in(folder, names)
        else:
            self._store = RemoteObjects(self.locations.__getitem__, self.versions.__getitem__)
        self._footers = dict[int, Footer]()
        self.schema = self.footer(0).schema
        self.names = [*self.schema.names]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_footers": {}}

    @property
    def paths(self) -> list[Path]:
        """Their paths, if they are local."""
        return [each.path for each in self.locations if each.path is not None]

    def damage_named(self, file: int, what: str) -> AbstractContextManager[None]:
        """Convert errors of pyarrow into a `FormatError` of one line."""
        msg = f"{self.locations[file].shown}: {what} cannot be read by pyarrow"
        return failures_named(msg, "copy or download it again")

    def check(self, file: int) -> None:
        """Check that a local file is as it was when it was opened."""
        self._store.check_files(np.array([file]))

    def footer(self, file: int) -> Footer:
        """Return the footer of a file; the latest few are kept, as long as this object."""
        found = self._footers.get(file)
        if found is None:
            found = self._read_footer(file)
            for oldest in [*self._footers][: 1 - _FOOTERS]:
                self._footers.pop(oldest, None)
            self._footers[file] = found
        return found

    def _read_footer(self, file: int) -> Footer:
        location = self.locations[file]
        if location.is_remote and self.versions[file] is None:
            self.versions[file] = open_object(location)
        size = int(self._store.sizes(np.array([file]))[0])
        with self.damage_named(file, "its footer"):
            n_bytes = min(size, _TAIL_BYTES)
            (tail,) = self._read(file, np.array([[size - n_bytes, n_bytes]]))
            needed = int.from_bytes(tail[-END_BYTES:][:4].tobytes(), "little") + END_BYTES
            if tail.size < needed <= size:
                (tail,) = self._read(file, np.array([[size - needed, needed]]))
            return Footer.read(location.shown, tail.tobytes(), size)

    def _read(self, file: int, ranges: NDArray[np.int64]) -> list[NDArray[np.uint8]]:
        """Return byte ranges of a file; see `RowGroups.ranges`."""
        contents = self._store.read_ranges(np.full(len(ranges), file), *ranges.T)
        return [np.frombuffer(b"" if each is None else each, np.uint8) for each in contents]

    def each(self, read: Callable[[int], Any]) -> Iterator[Any]:
        """Iterate over ``read(file)`` of all files; several are read at a time."""
        numbers = range(len(self.locations))
        if len(numbers) == 1:
            yield read(0)
            return
        with cancellable_threads(_AT_ONCE, "cellfeed-open") as threads:
            yield from threads.map(read, numbers)

    def row_groups(self, columns: tuple[str, str]) -> RowGroups:
        """Read all footers; return the row groups with the places of the lists.

        Parameters
        ----------
        columns
            Names of the columns with lists of gene numbers, and of values.

        Raises
        ------
        ColumnError
            A file lacks a column, or has several of its name.
        FormatError
            A file has a column of another type, or is damaged.
        """
        names, groups = zip(*self.each(partial(self._groups_of, columns=columns)), strict=True)
        self.names = [*dict.fromkeys(chain(*names))]
        dtypes = {each.dtype for each in groups if each.dtype.kind != "V"}
        dtype = np.result_type(*dtypes) if dtypes else np.dtype(np.int8)
        for each in groups:
            if each.dtype != dtype:
                each.chunks[..., fields.CHUNK_ITEMSIZE] = -1  # pyarrow decodes it, values are cast
        n_rows = np.concatenate([np.diff(each.starts) for each in groups])
        return RowGroups(
            files=np.concatenate([each.files for each in groups]),
            numbers=np.concatenate([each.numbers for each in groups]),
            starts=np.append(0, np.cumsum(n_rows)),
            chunks=np.concatenate([each.chunks for each in groups]),
            dtype=dtype,
            largest=_largest([each.largest for each in groups], 0),
        )

    def _groups_of(self, file: int, columns: tuple[str, str]) -> tuple[list[str], RowGroups]:
        """Return the columns of a file, and its row groups that have rows."""
        footer = self.footer(file)
        given, leaves = [footer.field(name) for name in columns], footer.leaves(columns)
        of_genes, dtype = map(footer.dtype_in_lists, given)
        if of_genes.kind not in "iuV":
            msg = f"{footer.where}: column {columns[0]!r} has {of_genes}, which are no gene"
            raise FormatError(f"{msg} numbers; give another column as `genes=`")
        n_rows, chunks = footer.row_groups(leaves)
        numbers = np.flatnonzero(n_rows)
        chunks = chunks[numbers]
        for k, leaf in enumerate(leaves):
            describe_lists(chunks[:, k], footer.metadata.schema.column(leaf), given[k])
        largest = [footer.largest(chunk, of_genes) for chunk in chunks[:, 0]]
        groups = RowGroups(
            files=np.full(numbers.size, file),
            numbers=numbers,
            starts=np.append(0, np.cumsum(n_rows[numbers])),
            chunks=chunks,
            dtype=dtype,
            largest=_largest(largest, -1),
        )
        return footer.schema.names, groups

    def expect(self, groups: RowGroups, which: NDArray[np.int64]) -> object | None:
        """Start reading row groups; return an object that keeps requests alive."""
        files, ranges = np.repeat(groups.files[which], 2), groups.ranges(which)
        if self._absolute and hasattr(os, "posix_fadvise"):
            for file in np.unique(files).tolist():
                with suppress(OSError), open(self._absolute[file], "rb") as opened:  # noqa: PTH123
                    for offset, size in ranges[files == file].tolist():
                        os.posix_fadvise(opened.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
        return self._store.expect(files, *ranges.T)

    def column_bytes(
        self, groups: RowGroups, group: int, memory: BufferPool
    ) -> list[NDArray[np.uint8]] | None:
        """Return the bytes of the columns of a row group; None if they are not all there.

        Parameters
        ----------
        groups, group
            The row groups, and the number of one.
        memory
            Where memory is taken from, for those of local files.
        """
        file, ranges = int(groups.files[group]), groups.ranges(group)
        if not self._absolute:
            found = self._read(file, ranges)
            return found if [each.size for each in found] == ranges[:, 1].tolist() else None
        found = [memory.acquire(n).array(np.dtype(np.uint8), n) for n in ranges[:, 1].tolist()]
        n_read = 0
        with suppress(OSError), open(self._absolute[file], "rb") as opened:  # noqa: PTH123
            for offset, own in zip(ranges[:, 0].tolist(), found, strict=True):
                opened.seek(offset)
                n_read += opened.readinto(own.data)
        self.check(file)
        return found if n_read == ranges[:, 1].sum() else None

    def batches(self, groups: RowGroups, group: int, columns: Sequence[str]) -> Iterator[Any]:
        """Decode a row group, some rows at a time; the iterator may be left at any of them.

        Parameters
        ----------
        groups, group
            The row groups, and the number of one.
        columns
            Names of columns.

        Yields
        ------
        A `pyarrow.RecordBatch` of consecutive rows with these columns.

        Raises
        ------
        FormatError
            The file is damaged, or was replaced since it was opened.
        """
        file, number = int(groups.files[group]), int(groups.numbers[group])
        n_rows = int(groups.starts[group + 1] - groups.starts[group])
        first = 0
        with self.damage_named(file, f"row group {number}"):
            opened = self._opened(file, groups.ranges(group))
            decoded = opened.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[number], columns=[*columns], use_threads=False
            )
            for batch in decoded:
                yield batch.select([*columns])
                first += batch.num_rows
            if first < n_rows:
                msg = f"has {first} rows, but its footer says {n_rows}"
                raise ValueError(msg)

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return obs columns of all files, as `ParquetSource.read_obs` does."""
        import pyarrow as pa  # noqa: PLC0415 - optional

        tables = [*self.each(partial(self.read, columns=columns, as_obs=True))]
        where = [each.shown for each in self.locations]
        found = {
            name: _join_parts(name, [each[name] for each in tables], where) for name in columns
        }
        table = pa.table(found, metadata=tables[0].schema.metadata)
        with failures_named(f"{self.location.shown}: obs cannot be read", "write it again"):
            return to_frame(table.unify_dictionaries())

    def read(self, file: int, columns: Sequence[str], *, as_obs: bool = False) -> Any:
        """Return whole columns of a file as a `pyarrow.Table`.

        Parameters
        ----------
        file
            Number of the file.
        columns
            Their names.
        as_obs
            Whether text is read as dictionaries, and columns that cannot be in obs are refused.
        """
        footer = self.footer(file)
        given = [footer.field(name) for name in columns]
        for reason in (refused_in_obs(each, footer.where) for each in given if as_obs):
            if reason:
                raise ColumnError(reason)
        _, chunks = footer.row_groups(footer.leaves(columns))
        text = list[str]()
        if as_obs:  # each has one leaf; of other encodings, pyarrow makes no dictionaries
            fits = (chunks[..., fields.ENCODINGS] & ~DECODED == 0).all(axis=0).tolist()
            text = [
                e.name for e, fit in zip(given, fits, strict=True) if fit and kind(e.type) == "text"
            ]
        with self.damage_named(file, f"columns {', '.join(map(repr, columns))}"):
            ranges = chunks[..., RANGE].reshape(-1, 2)
            opened = self._opened(file, ranges[(ranges >= 0).all(axis=1)], text)
            return opened.read([*columns], use_threads=False).select([*columns])

    def _opened(self, file: int, ranges: NDArray[np.int64], text: Sequence[str] = ()) -> Any:
        """Open a file with pyarrow, to read ranges of it; columns of text become dictionaries."""
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415

        if self._absolute:
            self.check(file)
            source = pa.OSFile(self._absolute[file])
        else:
            # As large as the file, but of its pages only those of the ranges are in memory.
            whole = np.frombuffer(mmap.mmap(-1, self.versions[file].size, flags=_LAZY), np.uint8)
            for offset, own in zip(ranges[:, 0].tolist(), self._read(file, ranges), strict=True):
                whole[offset : offset + own.size] = own
            source = pa.BufferReader(pa.py_buffer(whole))
        return pq.ParquetFile(
            source,
            metadata=self.footer(file).metadata,
            read_dictionary=[*text] or None,
            pre_buffer=False,
            page_checksum_verification=True,
        )


def _largest(numbers: Sequence[int | None], default: int) -> int | None:
    """Return the largest number; None if one is not known."""
    return None if None in numbers else max([default, *filter(None, numbers)])


# Obs columns: each of one kind in all files, of whatever Arrow type it is.


def _join_parts(name: str, parts: Sequence[Any], where: Sequence[str]) -> Any:
    """Return a column of some files as one `pyarrow.ChunkedArray`.

    Parameters
    ----------
    name
        Its name, for messages.
    parts
        The column in each file, a `pyarrow.ChunkedArray` whose type has a `kind`. One without a
        type, all of whose values are missing, fits any other.
    where
        The files, for messages.

    Raises
    ------
    MismatchError
        It is of one kind in a file and of another in the next.
    ColumnError
        The common type of its numbers cannot hold one of them.
    """
    import pyarrow as pa  # noqa: PLC0415 - optional

    kinds = [kind(part.type) for part in parts]
    known = [k for k, each in enumerate(kinds) if each != MISSING]
    for k in known:
        types = parts[k].type, parts[known[0]].type
        if kinds[k] != kinds[known[0]] or (kinds[k] not in _JOINED and types[0] != types[1]):
            shown = [*map(values_of, types)]
            msg = f"{where[k]}: column {name!r} is of type {shown[0]}, but of type {shown[1]} in"
            raise MismatchError(f"{msg} {where[known[0]]}; write the same kind to all files")
    if "text" in kinds and len({part.type for part in parts}) > 1:
        parts = [_as_text(part) for part in parts]
    schemas = [pa.schema([(name, part.type)]) for part in parts]
    joint = pa.unify_schemas(schemas, promote_options="permissive").field(name).type
    chunks = list[Any]()
    for part, file in zip(parts, where, strict=True):
        try:
            chunks += part.cast(joint).chunks
        except pa.ArrowInvalid as error:
            msg = f"{file}: column {name!r} has values that {joint}, the common type of the files,"
            msg = f"{msg} cannot hold ({first_line(error)})"
            raise ColumnError(f"{msg}; write it as text") from error
    return pa.chunked_array(chunks, joint)


_JOINED = ("numbers", "text")  # kinds of columns whose types may differ between files


def _as_text(part: Any) -> Any:
    """Return text, a dictionary or not, as a dictionary of one type."""
    import pyarrow as pa  # noqa: PLC0415 - optional

    return part.cast(values_of(part.type)).cast(pa.large_string()).dictionary_encode()


def refused_in_obs(field: Any, where: str) -> str:
    """Return a message why the type of a column cannot be in obs; empty if it can."""
    if kind(field.type):
        return ""
    msg = f"{where}: column {field.name!r} is of type {field.type}"
    return f"{msg}, neither numbers, booleans nor text; write it as text"
