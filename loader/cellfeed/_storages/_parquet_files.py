"""Parquet files: which ones a path or URL stands for, their row groups, and rows of these.

cellfeed decodes the pages of lists that it knows, from the bytes of their columns; pyarrow decodes
other row groups, and reads local files itself. Of files on servers, the byte ranges of the wanted
columns are requested as for any other format.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location, has_suffix, identity, replaced, threads_until_left
from cellfeed._bytes._buffers import BufferPool
from cellfeed._bytes._location import removed
from cellfeed._bytes._remote import RemoteObjects, Version, expand_url, open_object
from cellfeed._decode import LIST_NUMBERS, list_numbers
from cellfeed._errors import ColumnError, FormatError, PathError, RemoteError
from cellfeed._storages._registry import failures_named, first_line, import_arrow, suffixes

SUFFIX = ".parquet"
EXTRA = "parquet"
GENE_TABLE = "gene_metadata.parquet"  # its name in Tahoe-100M
_MAGIC = b"PAR1"

# Which files a path or URL stands for.


def is_parquet(path: Path) -> bool:
    """Return whether a path is a Parquet file, or a folder of them and of no other cells."""
    if path.is_dir():
        return bool(_in_folder(path))
    if has_suffix(path.name, SUFFIX):
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _in_folder(folder: Path) -> list[Path]:
    """Return the Parquet files of cells in a folder, by name; none if it has other cells."""
    if not (folder / GENE_TABLE).is_file() and (folder / "metadata" / GENE_TABLE).is_file():
        folder /= "data"  # of a whole repository of the hub
    every = sorted(folder.iterdir()) if folder.is_dir() else []
    entries = [each for each in every if not each.name.startswith(".")]
    if any(has_suffix(each.name, *suffixes()) for each in entries):
        return []
    return [each for each in entries if _is_of_cells(each.name)]


def _is_of_cells(path: str) -> bool:
    return has_suffix(path, SUFFIX) and not path.endswith(GENE_TABLE)


def files_at(location: Location) -> list[Location]:
    """Return the files that a path, folder, pattern or URL stands for, in the order of their rows.

    Raises
    ------
    PathError
        There are none.
    RemoteError
        A server cannot be reached, or refuses the request.
    """
    if location.scheme == "hf":
        return _on_hub(location)
    if location.path is None:
        found_there = expand_url(location, [SUFFIX])
        return [each for each in found_there if _is_of_cells(each.text)] or found_there
    path = location.path.expanduser()
    if path.is_dir():
        found = _in_folder(path)
    elif path.exists():
        return [Location.of(path)]
    else:
        matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - absolute patterns too
        found = [Path(each) for each in matches if _is_of_cells(each)]
    if not found:
        raise PathError(f"{location}: no Parquet file of cells is there; check the path")
    return [Location.of(each) for each in found]


# Datasets on the HuggingFace hub.

_ON_HUB = re.compile(r"hf://datasets/([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.*))?")
_SECONDS = 30
_NEXT = re.compile(r'<([^>]+)>;\s*rel="next"')
_WILD = re.compile(r"[*?\[]")


def _on_hub(location: Location) -> list[Location]:
    """Return the URLs of files on the hub, or on the server that ``HF_ENDPOINT`` names."""
    parts = _ON_HUB.fullmatch(location.text)
    if parts is None:
        msg = f"{location}: must be of the form hf://datasets/OWNER/NAME/path"
        raise PathError(f"{msg}, perhaps with NAME@REVISION; write it so")
    name, revision, path = parts[1], parts[2] or "main", (parts[3] or "data").strip("/")
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token, options = os.environ.get("HF_TOKEN"), location.options
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    if headers:
        client = dict(options.values.get("client_options") or {})
        client["default_headers"] = {**headers, **(client.get("default_headers") or {})}
        options = replace(options, values={**options.values, "client_options": client})
    paths = [path]
    wild = _WILD.search(path)
    if wild or not has_suffix(path, SUFFIX):
        folder = path[: wild.start()].rpartition("/")[0] if wild else path
        pattern = path if wild else f"{path}/*"
        url = f"{endpoint}/api/datasets/{name}/tree/{revision}/{quote(folder)}?recursive=true"
        listed = _listed_by_hub(location, url, headers)
        paths = [each for each in listed if PurePosixPath(f"/{each}").match(f"/{pattern}")]
        paths = sorted(filter(_is_of_cells, paths))
        if not paths:
            raise PathError(f"{location}: matches no Parquet file of the dataset; check the path")
    root = f"{endpoint}/datasets/{name}/resolve/{revision}"
    return [Location(f"{root}/{quote(each)}", options) for each in paths]


def _listed_by_hub(location: Location, url: str, headers: dict[str, str]) -> list[str]:
    """Return the paths of all files in a folder of a dataset."""
    from urllib.error import HTTPError  # noqa: PLC0415 - slow to import
    from urllib.request import Request, urlopen  # noqa: PLC0415

    found = list[str]()
    while url:
        try:
            with urlopen(Request(url, headers=headers), timeout=_SECONDS) as answer:  # noqa: S310 - the endpoint is the user's
                found += [each["path"] for each in json.load(answer) if each["type"] == "file"]
                following = _NEXT.search(answer.headers.get("Link") or "")
                url = following[1] if following else ""
        except HTTPError as error:
            msg = f"{location}: the hub has no such dataset or folder, or does not show it"
            remedy = "check the name; set HF_TOKEN if it needs an account"
            raise PathError(f"{msg} (HTTP {error.code}); {remedy}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            msg = f"{location}: the hub does not list its files ({first_line(error)})"
            raise RemoteError(f"{msg}; try again, or check HF_ENDPOINT") from None
    return found


# Files and their row groups.

_TAIL_BYTES = 1 << 16  # of a file on a server, which mostly contain its footer
_END_BYTES = 8  # size of the footer, and the magic number
_FOOTERS = 64  # that are kept in memory
_AT_ONCE = 16
_BATCH_ROWS = 128  # decoded at a time: few enough to stay in the cache


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
        Byte ranges of the wanted columns in the file, int64, shape (n_groups, n_ranges).
    n_values
        Number of values in the wanted columns, int64, shape (n_groups,).
    largest
        Largest value in the first wanted column; None if a footer does not say it.
    codec
        Compression of the first wanted column.
    lists
        What `list_numbers` says of the wanted columns, if these are lists, int64, shape (n_groups,
        n_ranges, LIST_NUMBERS).
    """

    files: NDArray[np.int64]
    numbers: NDArray[np.int64]
    starts: NDArray[np.int64]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    n_values: NDArray[np.int64]
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
        self._footers = dict[int, Any]()
        self._objects: RemoteObjects | None = None
        if self.locations[0].is_remote:
            self._objects = RemoteObjects(self._location_of, self._version_of)
        self.schema = self.footer(0).schema.to_arrow_schema()

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

    def _location_of(self, file: int) -> Location:
        return self.locations[file]

    def _version_of(self, file: int) -> Version | None:
        version: Version | None = self._states[file]
        return version

    def damage_named(self, file: int, what: str) -> AbstractContextManager[None]:
        """Convert errors of pyarrow into a `FormatError` of one line."""
        msg = f"{self.locations[file].shown}: {what} cannot be read by pyarrow"
        return failures_named(msg, "copy or download it again")

    def check(self, file: int) -> None:
        """Check that a local file is as it was when it was opened."""
        location = self.locations[file]
        if location.path is None:
            return
        try:
            found = identity(os.stat(self._absolute[file]))  # noqa: PTH116 - called often
        except FileNotFoundError:
            if self._states[file] is None:
                raise PathError(f"{location}: there is no such file; put it back") from None
            raise removed(location) from None
        if self._states[file] is None:
            self._states[file] = found
        if self._states[file] != found:
            raise replaced(location)

    def footer(self, file: int) -> Any:
        """Return the `pyarrow.parquet.FileMetaData` of a file."""
        found = self._footers.get(file)
        if found is None:
            found = self._read_footer(file)
            for oldest in [*self._footers][: 1 - _FOOTERS]:
                self._footers.pop(oldest, None)
            self._footers[file] = found
        return found

    def _read_footer(self, file: int) -> Any:
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415

        location = self.locations[file]
        if self._objects is None:
            self.check(file)
            with self.damage_named(file, "its footer"):
                return pq.read_metadata(self._absolute[file])
        if self._states[file] is None:
            self._states[file] = open_object(location)
        size = self._states[file].size
        tail = self._tail(file, min(size, _TAIL_BYTES))
        with self.damage_named(file, "its footer"):
            needed = int.from_bytes(tail[-_END_BYTES:][:4], "little") + _END_BYTES
            if len(tail) < needed <= size:
                tail = self._tail(file, needed)
            return pq.read_metadata(pa.BufferReader(tail))

    def _tail(self, file: int, n_bytes: int) -> bytes:
        assert self._objects is not None  # noqa: S101 - on a server
        offset = self._states[file].size - n_bytes
        (found,) = self._objects.read_ranges(*_as_ranges(file, [offset], [n_bytes]))
        return bytes(found) if found is not None else b""

    def each(self, read: Callable[[int], Any]) -> Iterator[Any]:
        """Iterate over ``read(file)`` of all files; several are read at a time."""
        numbers = range(len(self.locations))
        if len(numbers) == 1:
            yield read(0)
            return
        with threads_until_left(_AT_ONCE, "cellfeed-open") as threads:
            yield from threads.map(read, numbers)

    def row_groups(
        self, columns: Sequence[str], dtypes: Sequence[np.dtype[Any]] | None = None
    ) -> RowGroups:
        """Read all footers; return the row groups with the places of some columns.

        Parameters
        ----------
        columns
            Names of columns.
        dtypes
            If they are lists, the dtypes of their values; otherwise all columns are read together,
            with what is between them.

        Raises
        ------
        FormatError
            A file lacks a column, has it in another type, or is damaged.
        """
        wanted = [self.schema.field(name) for name in columns]

        def read(file: int) -> tuple[list[tuple[list[int], ...]], list[int | None], str]:
            footer = self.footer(file)
            schema = footer.schema.to_arrow_schema()
            if file:
                self._check_columns(file, schema, wanted)
            fields = [schema.field(name) for name in columns]
            leaves = _leaves(footer, columns)
            own = [footer.schema.column(leaf) for leaf in leaves]
            groups, largest, codec = list[tuple[list[int], ...]](), list[int | None](), ""
            for number in range(footer.num_row_groups):
                group = footer.row_group(number)
                chunks = [group.column(leaf) for leaf in leaves]
                offsets = [_first_byte(each) for each in chunks]
                sizes = [each.total_compressed_size for each in chunks]
                n_values = sum(each.num_values for each in chunks)
                lists = list[int]()
                if dtypes is None:
                    stop = max(map(sum, zip(offsets, sizes, strict=True)))
                    offsets, sizes = [min(offsets)], [stop - min(offsets)]
                else:
                    for described in zip(chunks, own, fields, dtypes, strict=True):
                        lists += list_numbers(*described)
                groups.append(([file, number, group.num_rows, n_values], offsets, sizes, lists))
                statistics = chunks[0].statistics
                has_largest = statistics is not None and statistics.has_min_max
                largest.append(statistics.max if has_largest else None)
                codec = chunks[0].compression.lower()
            return groups, largest, codec

        groups, largest, codecs = list[tuple[list[int], ...]](), list[int | None](), list[str]()
        for some, of_groups, codec in self.each(read):
            groups.extend(some)
            largest.extend(of_groups)
            codecs.append(codec)
        groups_with_rows = [k for k, (counts, *_) in enumerate(groups) if counts[2]]
        n_ranges = len(groups[0][1]) if groups else 0
        table = np.array([groups[k][0] for k in groups_with_rows], np.int64).reshape(-1, 4)
        places = [
            np.array([groups[k][which] for k in groups_with_rows], np.int64).reshape(
                len(table), n_ranges
            )
            for which in (1, 2)
        ]
        known = [largest[k] for k in groups_with_rows if groups[k][0][3]]
        return RowGroups(
            files=table[:, 0].copy(),
            numbers=table[:, 1].copy(),
            starts=np.concatenate([[0], np.cumsum(table[:, 2])]),
            offsets=places[0],
            sizes=places[1],
            n_values=table[:, 3].copy(),
            largest=None if None in known else max(filter(None, known), default=0),
            codec=next(filter(None, codecs), "unknown").replace("uncompressed", "none"),
            lists=np.array([groups[k][3] for k in groups_with_rows], np.int64).reshape(
                len(table), -1 if len(table) else 0, LIST_NUMBERS
            ),
        )

    def _check_columns(self, file: int, schema: Any, wanted: Sequence[Any]) -> None:
        for field in wanted:
            where = self.locations[file].shown
            if field.name not in schema.names:
                msg = f"{where}: has no column {field.name!r}, which {self.locations[0].shown} has"
                raise FormatError(f"{msg}; leave the file out, or write it again")
            if not schema.field(field.name).type.equals(field.type):
                msg = f"{where}: column {field.name!r} is of type {schema.field(field.name).type}"
                other = f"but of type {field.type} in {self.locations[0].shown}"
                raise FormatError(f"{msg}, {other}; write the files with one type")

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
        with suppress(OSError, ValueError), open(self._absolute[file], "rb", buffering=0) as opened:  # noqa: PTH123
            for offset, size in zip(offsets, sizes, strict=True):
                own = memory.acquire(size).array(np.dtype(np.uint8), size)
                opened.seek(offset)
                n = 0
                while n < size:
                    n_read = opened.readinto(own[n:].data)
                    if not n_read:
                        return None
                    n += n_read
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
        source = self._source(file, groups.offsets[group], groups.sizes[group])
        with self.damage_named(file, f"row group {number}"):
            decoded = self._opened(file, source).iter_batches(
                batch_size=_BATCH_ROWS, row_groups=[number], columns=[*columns], use_threads=False
            )
            for batch in decoded:
                yield first, batch.select([*columns])
                first += batch.num_rows
            if first < n_rows:
                msg = f"has {first} rows, but its footer says {n_rows}"
                raise ValueError(msg)

    def read(self, columns: Sequence[str], *, text: Sequence[str] = ()) -> Iterator[Any]:
        """Yield a `pyarrow.Table` with whole columns of each file; ``text`` as dictionaries."""

        def read(file: int) -> Any:
            footer = self.footer(file)
            there = footer.schema.to_arrow_schema().names
            for name in columns:
                if name not in there:
                    msg = f"{self.locations[file].shown}: has no column {name!r}"
                    raise ColumnError(f"{msg}; open it alone, or leave the column out")
            leaves = _leaves(footer, columns)
            groups = [footer.row_group(k) for k in range(footer.num_row_groups)]
            chunks = [group.column(leaf) for group in groups for leaf in leaves]
            source = self._source(
                file,
                np.array([*map(_first_byte, chunks)], np.int64),
                np.array([each.total_compressed_size for each in chunks], np.int64),
            )
            with self.damage_named(file, f"columns {', '.join(map(repr, columns))}"):
                opened = self._opened(file, source, text)
                return opened.read([*columns], use_threads=False).select([*columns])

        yield from self.each(read)

    def _opened(self, file: int, source: Any, text: Sequence[str] = ()) -> Any:
        import pyarrow.parquet as pq  # noqa: PLC0415 - optional

        return pq.ParquetFile(
            source,
            metadata=self.footer(file),
            read_dictionary=[*text] or None,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    def _source(self, file: int, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> Any:
        """Return what pyarrow reads a file from, of which only some ranges are needed."""
        import pyarrow as pa  # noqa: PLC0415 - optional

        if self._objects is None:
            self.check(file)
            with self.damage_named(file, "it"):
                return pa.OSFile(self._absolute[file])
        given = offsets.tolist(), sizes.tolist()
        found = self._objects.read_ranges(*_as_ranges(file, *given))
        parts = {
            offset: _as_memory(content) for offset, content in zip(given[0], found, strict=True)
        }
        return pa.PythonFile(_Ranges(parts, self._states[file].size), mode="r")


def _as_memory(content: Any) -> memoryview:
    """Return bytes of a server; none if there is no such object."""
    return memoryview(b"" if content is None else content)


def _as_ranges(
    file: int, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    files = np.full(len(offsets), file, np.int64)
    return files, np.array(offsets, np.int64), np.array(sizes, np.int64)


def _leaves(footer: Any, columns: Sequence[str]) -> list[int]:
    """Return the numbers of the stored columns that some columns consist of."""
    wanted, found = dict.fromkeys(columns), dict[str, list[int]]()
    for number in range(footer.num_columns):
        path = footer.schema.column(number).path
        name = path if path in wanted else path.partition(".")[0]
        if name in wanted:
            found.setdefault(name, []).append(number)
    return [number for name in wanted for number in found.get(name, [])]


def _first_byte(chunk: Any) -> int:
    """Return where a column of a row group begins: with its dictionary, if it has one."""
    dictionary = chunk.dictionary_page_offset
    return int(min(dictionary or chunk.data_page_offset, chunk.data_page_offset))


class _Ranges(io.RawIOBase):
    """A file of which only some ranges are there.

    Parameters
    ----------
    parts
        The bytes of each range, by its first byte.
    size
        Size of the file in bytes.
    """

    def __init__(self, parts: dict[int, memoryview], size: int) -> None:
        super().__init__()
        self._parts, self._size, self._position = parts, size, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position."""
        begin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}
        self._position = begin[whence] + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Copy bytes of the range at the position; return their number."""
        view = memoryview(buffer).cast("B")
        for first, content in self._parts.items():
            begin = self._position - first
            if 0 <= begin < len(content):
                n = min(len(view), len(content) - begin)
                view[:n] = content[begin : begin + n]
                self._position += n
                return n
        return 0
