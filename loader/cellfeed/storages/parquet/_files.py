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
    Location,
    RemoteObjects,
    cancellable_threads,
    identity,
    open_object,
    removed,
    replaced,
    require_file,
)
from cellfeed.extending import ColumnError, FormatError, MismatchError, pd
from cellfeed.sources import failures_named, first_line
from cellfeed.sources.arrow import MISSING, import_arrow, kind, to_frame, values_of
from cellfeed.storages.parquet._footers import CODECS, END_BYTES, Footer, is_plain_or_dictionary
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._lists import LIST_NUMBERS, list_numbers

EXTRA = "parquet"

# Files and their row groups.

_TAIL_BYTES = 1 << 16  # of a file on a server, which mostly contain its footer
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
    offsets, sizes
        Byte ranges of the lists of genes and of values in the file, int64, shape (n_groups, 2).
    n_values
        Number of values in both lists, int64, shape (n_groups,).
    dtype
        Common dtype of the values in all files.
    largest
        Largest gene number; None if a footer does not say it.
    codec
        Compression of the lists of genes.
    lists
        What `list_numbers` says of both lists, int64, shape (n_groups, 2, LIST_NUMBERS).
    """

    files: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    n_values: NDArray[np.int64]
    dtype: np.dtype[Any]
    largest: int | None
    codec: str
    lists: NDArray[np.int64]


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
        self._states: list[Any] = [None] * len(self.locations)
        self._footers = dict[int, Footer]()
        self._objects: RemoteObjects | None = None
        if self.locations[0].is_remote:
            self._objects = RemoteObjects(self.locations.__getitem__, self._states.__getitem__)
        self.schema = self.footer(0).schema
        self.names = [*self.schema.names]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_footers": {}}

    @property
    def paths(self) -> list[Path]:
        """Their paths, if they are local."""
        return [each.path for each in self.locations if each.path is not None]

    @property
    def etags(self) -> list[str]:
        """Identifiers of the versions of files on servers."""
        return [f"{each.size} {each.etag} {each.modified}" for each in self._states]

    def damage_named(self, file: int, what: str) -> AbstractContextManager[None]:
        """Convert errors of pyarrow into a `FormatError` of one line."""
        msg = f"{self.locations[file].shown}: {what} cannot be read by pyarrow"
        return failures_named(msg, "copy or download it again")

    def check(self, file: int) -> None:
        """Check that a local file is as it was when it was opened."""
        location = self.locations[file]
        if location.path is None:
            return
        if self._states[file] is None:
            require_file(Path(self._absolute[file]), location)
        try:
            found = identity(os.stat(self._absolute[file]))  # noqa: PTH116 - called often
        except FileNotFoundError:
            raise removed(location) from None
        if self._states[file] is None:
            self._states[file] = found
        if self._states[file] != found:
            raise replaced(location)

    def footer(self, file: int) -> Footer:
        """Return the footer of a file."""
        found = self._footers.get(file)
        if found is None:
            found = self._read_footer(file)
            for oldest in [*self._footers][: 1 - _FOOTERS]:
                self._footers.pop(oldest, None)
            self._footers[file] = found
        return found

    def _read_footer(self, file: int) -> Footer:
        location = self.locations[file]
        if self._objects is None:
            self.check(file)
            size = self._states[file][0]
        else:
            if self._states[file] is None:
                self._states[file] = open_object(location)
            size = self._states[file].size
        with self.damage_named(file, "its footer"):
            tail = self._tail(file, size, min(size, _TAIL_BYTES))
            needed = int.from_bytes(tail[-END_BYTES:][:4], "little") + END_BYTES
            if len(tail) < needed <= size:
                tail = self._tail(file, size, needed)
            return Footer.read(location.shown, tail, size)

    def _tail(self, file: int, size: int, n_bytes: int) -> bytes:
        """Return the last bytes of a file."""
        if self._objects is None:
            with open(self._absolute[file], "rb") as opened:  # noqa: PTH123
                opened.seek(size - n_bytes)
                return opened.read()
        (found,) = self._objects.read_ranges(*_as_ranges(file, [size - n_bytes], [n_bytes]))
        return bytes(found) if found is not None else b""

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
        read = partial(self._groups_of, columns=columns)
        names, groups = zip(*self.each(read), strict=True)
        self.names = [*dict.fromkeys(chain(*names))]
        dtypes = {each.dtype for each in groups if each.dtype.kind != "V"}
        dtype = np.result_type(*dtypes) if dtypes else np.dtype(np.int8)
        for each in groups:
            if each.dtype != dtype:
                each.lists[:] = -1  # pyarrow decodes it, and values are cast
        largest = [each.largest for each in groups]
        arrays = ("files", "numbers", "offsets", "sizes", "n_values", "lists")
        n_rows = np.concatenate([np.diff(each.starts) for each in groups])
        return RowGroups(
            **{name: np.concatenate([getattr(each, name) for each in groups]) for name in arrays},
            starts=np.append(0, np.cumsum(n_rows)),
            dtype=dtype,
            largest=None if None in largest else max([0, *filter(None, largest)]),
            codec=next((each.codec for each in groups if each.codec), "unknown"),
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
        there = np.flatnonzero(n_rows)
        chunks = chunks[there]
        stored = [footer.metadata.schema.column(leaf) for leaf in leaves]
        lists = [
            list_numbers(chunk, stored[k], given[k])
            for of_group in chunks
            for k, chunk in enumerate(of_group)
        ]
        largest = [footer.largest(chunk, of_genes) for chunk in chunks[:, 0]]
        codecs = [CODECS[codec] for codec in chunks[-1:, 0, fields.CHUNK_CODEC]]
        groups = RowGroups(
            files=np.full(there.size, file),
            numbers=there,
            starts=np.append(0, np.cumsum(n_rows[there])),
            offsets=chunks[..., fields.DATA_OFFSET],
            sizes=chunks[..., fields.STORED_BYTES],
            n_values=chunks[..., fields.N_CHUNK_ENTRIES].sum(axis=1),
            dtype=dtype,
            largest=None if None in largest else max([-1, *filter(None, largest)]),
            codec="".join(codecs),
            lists=np.array(lists, np.int64).reshape(-1, len(columns), LIST_NUMBERS),
        )
        return footer.schema.names, groups

    def expect(self, groups: RowGroups, which: NDArray[np.int64]) -> object | None:
        """Start reading row groups; return an object that keeps requests alive."""
        if self._objects is not None:
            ranges = groups.offsets[which].reshape(-1), groups.sizes[which].reshape(-1)
            files = np.repeat(groups.files[which], groups.offsets.shape[1])
            return self._objects.expect(files, *ranges)
        if hasattr(os, "posix_fadvise"):
            for file in np.unique(groups.files[which]).tolist():
                own = which[groups.files[which] == file]
                places = np.stack([groups.offsets[own].ravel(), groups.sizes[own].ravel()], axis=1)
                with suppress(OSError), open(self._absolute[file], "rb") as opened:  # noqa: PTH123
                    for offset, size in places.tolist():
                        os.posix_fadvise(opened.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
        return None

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
        file = int(groups.files[group])
        offsets, sizes = groups.offsets[group].tolist(), groups.sizes[group].tolist()
        if self._objects is not None:
            contents = self._objects.read_ranges(*_as_ranges(file, offsets, sizes))
            there = [np.frombuffer(each, np.uint8) for each in contents if each is not None]
            return there if [each.size for each in there] == sizes else None
        self.check(file)
        found = list[NDArray[np.uint8]]()
        with suppress(OSError, ValueError), open(self._absolute[file], "rb") as opened:  # noqa: PTH123
            for offset, size in zip(offsets, sizes, strict=True):
                own = memory.acquire(size).array(np.dtype(np.uint8), size)
                opened.seek(offset)
                if opened.readinto(own.data) < size:
                    return None
                found.append(own)
            return found
        return None

    def batches(
        self, groups: RowGroups, group: int, columns: Sequence[str]
    ) -> Iterator[tuple[int, Any]]:
        """Decode a row group, some rows at a time; the iterator may be left at any of them.

        Parameters
        ----------
        groups, group
            The row groups, and the number of one.
        columns
            Names of columns.

        Yields
        ------
        The first row, and a `pyarrow.RecordBatch` of consecutive rows with these columns.

        Raises
        ------
        FormatError
            The file is damaged, or was replaced since it was opened.
        """
        file, number = int(groups.files[group]), int(groups.numbers[group])
        n_rows = int(groups.starts[group + 1] - groups.starts[group])
        first = 0
        with self.damage_named(file, f"row group {number}"):
            opened = self._opened(file, groups.offsets[group], groups.sizes[group])
            decoded = opened.iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[number], columns=[*columns], use_threads=False
            )
            for batch in decoded:
                yield first, batch.select([*columns])
                first += batch.num_rows
            if first < n_rows:
                msg = f"has {first} rows, but its footer says {n_rows}"
                raise ValueError(msg)

    def refused_obs(self, name: str) -> str:
        """Return why the type of a column in the first file cannot be in obs, if it cannot."""
        at = self.schema.get_field_index(name)
        return "" if at < 0 else self.footer(0).refused_in_obs(self.schema.field(at))

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return obs columns of all files, as `ParquetSource.read_obs` does."""
        import pyarrow as pa  # noqa: PLC0415 - optional

        tables, where = [*self.read(columns, as_obs=True)], [each.shown for each in self.locations]
        found = {
            name: _join_parts(name, [each[name] for each in tables], where) for name in columns
        }
        table = pa.table(found, metadata=tables[0].schema.metadata)
        with failures_named(f"{self.location.shown}: obs cannot be read", "write it again"):
            return to_frame(table.unify_dictionaries())

    def read(self, columns: Sequence[str], *, as_obs: bool = False) -> Iterator[Any]:
        """Yield a `pyarrow.Table` with whole columns of each file.

        Parameters
        ----------
        columns
            Their names.
        as_obs
            Whether text is read as dictionaries, and columns that cannot be in obs are refused.
        """

        def read(file: int) -> Any:
            footer = self.footer(file)
            given, text = [footer.field(name) for name in columns], list[str]()
            for each in given if as_obs else ():
                if reason := footer.refused_in_obs(each):
                    raise ColumnError(reason)
            _, chunks = footer.row_groups(footer.leaves(columns))
            if as_obs:  # each has one leaf; of other encodings, pyarrow makes no dictionaries
                fits = [all(map(is_plain_or_dictionary, each)) for each in chunks.swapaxes(0, 1)]
                there = zip(given, fits, strict=True)
                text = [each.name for each, fit in there if fit and kind(each.type) == "text"]
            with self.damage_named(file, f"columns {', '.join(map(repr, columns))}"):
                places = chunks[..., [fields.DATA_OFFSET, fields.STORED_BYTES]].reshape(-1, 2)
                offsets, sizes = places[(places >= 0).all(axis=1)].T
                opened = self._opened(file, offsets, sizes, text)
                return opened.read([*columns], use_threads=False).select([*columns])

        yield from self.each(read)

    def _opened(
        self,
        file: int,
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        text: Sequence[str] = (),
    ) -> Any:
        """Open a file with pyarrow, to read ranges of it; columns of text become dictionaries."""
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415

        if self._objects is None:
            self.check(file)
            source = pa.OSFile(self._absolute[file])
        else:
            # As large as the file, but of its pages only those of the ranges are in memory.
            whole = np.frombuffer(mmap.mmap(-1, self._states[file].size, flags=_LAZY), np.uint8)
            contents = self._objects.read_ranges(np.full(offsets.size, file), offsets, sizes)
            for offset, content in zip(offsets.tolist(), contents, strict=True):
                there = np.frombuffer(b"" if content is None else content, np.uint8)
                whole[offset : offset + there.size] = there
            source = pa.BufferReader(pa.py_buffer(whole))
        return pq.ParquetFile(
            source,
            metadata=self.footer(file).metadata,
            read_dictionary=[*text] or None,
            pre_buffer=False,
            page_checksum_verification=True,
        )


def _as_ranges(
    file: int, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    files = np.full(len(offsets), file, np.int64)
    return files, np.array(offsets, np.int64), np.array(sizes, np.int64)


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
