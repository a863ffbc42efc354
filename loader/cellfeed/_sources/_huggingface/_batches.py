"""Record batches of Arrow files: where the lists of their rows lie."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, PathError
from cellfeed._sources._base import import_arrow

__all__ = [
    "EXTRA",
    "ListColumns",
    "batches_in_files",
    "batches_in_memory",
    "list_columns",
    "open_table",
    "type_of_lists",
]

EXTRA = "huggingface"

Placed = tuple[Any, Callable[[int, int], tuple[int, int] | None]]


@dataclass(frozen=True, slots=True, eq=False)
class ListColumns:
    """Where the lists of two columns lie in some files; arrays have one row per record batch.

    Parameters
    ----------
    files, n_rows
        File of each record batch, and its number of rows, int64, shape (n_batches,).
    offsets, values
        First byte of the offsets, and of the values, of both columns, int64, shape (n_batches, 2).
    sizes
        Number of values of both columns, int64, shape (n_batches, 2).
    offset_dtypes, dtypes
        Dtypes of offsets and of values of both columns.
    """

    files: NDArray[np.int64]
    n_rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offset_dtypes: tuple[np.dtype[Any], ...]
    dtypes: tuple[np.dtype[Any], ...]

    def of_files(self, paths: Sequence[Path]) -> "tuple[list[Path], ListColumns]":
        """Return the files that are needed, and the columns with file numbers among these."""
        used, files = np.unique(self.files, return_inverse=True)
        return [paths[file] for file in used.tolist()], replace(self, files=files.astype(np.int64))


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise PathError(f"{path}: there is no such file; put it back") from error
    except (OSError, ValueError) as error:  # the base classes of Arrow's errors
        said = str(error).splitlines()[0]
        raise FormatError(
            f"{path}: is not a complete Arrow stream ({said}); copy it again"
        ) from error


def batches_in_files(location: Location, paths: Sequence[Path]) -> Iterator[Placed]:
    """Yield the record batches of files, each with a function that locates a buffer in them."""
    arrow = import_arrow(location, EXTRA)
    for number, path in enumerate(paths):
        with _damage_named(path), arrow.memory_map(str(path)) as mapped:
            whole = mapped.read_buffer(mapped.size())
            mapped.seek(0)
            place = partial(_within, number, whole.address, whole.size)
            for batch in arrow.ipc.open_stream(mapped):
                yield batch, place


def batches_in_memory(table: Any) -> tuple[list[Path], Iterator[Placed]]:
    """Return the files that are mapped into this process, and batches as `batches_in_files`.

    Parameters
    ----------
    table
        A `pyarrow.Table`, all or part of which may be in memory instead of a file.
    """
    paths, regions = _mapped_files()
    begins = np.array([region[0] for region in regions], np.int64)

    def place(address: int, n_bytes: int) -> tuple[int, int] | None:
        at = int(np.searchsorted(begins, address, side="right")) - 1
        if at < 0:
            return None
        begin, end, offset, file = regions[at]
        return (file, offset + address - begin) if address + n_bytes <= end else None

    return paths, ((batch, place) for batch in table.to_batches())


def _within(
    number: int, begin: int, size: int, address: int, n_bytes: int
) -> tuple[int, int] | None:
    is_there = begin <= address and address + n_bytes <= begin + size
    return (number, address - begin) if is_there else None


def _mapped_files() -> tuple[list[Path], list[tuple[int, int, int, int]]]:
    """Return mapped files, and begin, end, offset and file of each mapped region; Linux only."""
    paths, regions = dict[str, int](), list[tuple[int, int, int, int]]()
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, _, offset, _, inode, *name = line.split(maxsplit=5)
        if inode == "0" or not name or not name[0].startswith("/") or name[0].endswith("(deleted)"):
            continue
        begin, end = (int(each, 16) for each in span.split("-"))
        regions.append((begin, end, int(offset, 16), paths.setdefault(name[0], len(paths))))
    return [Path(name) for name in paths], regions


def open_table(location: Location, paths: Sequence[Path]) -> Any:
    """Return all rows of some files as a memory-mapped `pyarrow.Table`."""
    arrow = import_arrow(location, EXTRA)
    tables = []
    for path in paths:
        with _damage_named(path):
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
    return arrow.concat_tables(tables)


def type_of_lists(arrow: Any, location: Location, schema: Any, name: str) -> Any:
    """Return the type of a column, which must contain lists of numbers.

    Raises
    ------
    FormatError
        The column has another type.
    """
    found = schema.field(name).type
    is_list = arrow.types.is_list(found) or arrow.types.is_large_list(found)
    of = found.value_type if is_list else None
    if of is None or not (arrow.types.is_integer(of) or arrow.types.is_floating(of)):
        msg = f"{location}: column {name!r} is of type {found}, not a list of numbers"
        raise FormatError(f"{msg} for each cell; give another column")
    return found


def list_columns(
    location: Location, batches: Iterable[Placed], names: tuple[str, str]
) -> ListColumns | None:
    """Return where the lists of two columns lie; None if files do not store them uncompressed.

    Parameters
    ----------
    location
        For messages.
    batches
        Record batches, each with a function from address and size of a buffer to its file and first
        byte; it returns None if the buffer is in no file.
    names
        Names of the columns.
    """
    arrow = import_arrow(location, EXTRA)
    found, types = list[list[int]](), None
    for batch, place in batches:
        if types is None:
            types = [type_of_lists(arrow, location, batch.schema, name) for name in names]
        row, files = list[int](), set[int]()
        for name, of_type in zip(names, types, strict=True):
            column = batch.column(name)
            if column.null_count or column.flatten().null_count:
                msg = f"{location}: column {name!r}: not every cell has a list of numbers"
                raise FormatError(f"{msg}; leave those cells out")
            itemsize = 8 if arrow.types.is_large_list(of_type) else 4
            for buffer, skipped in (
                (column.buffers()[1], column.offset * itemsize),
                (column.values.buffers()[1], 0),
            ):
                at = (
                    None
                    if buffer is None or not buffer.size
                    else place(buffer.address, buffer.size)
                )
                if at is None and buffer is not None and buffer.size:
                    return None
                row.append(0 if at is None else at[1] + skipped)
                files |= set() if at is None else {at[0]}
            row.append(len(column.values))
        if len(files) > 1:
            return None
        found.append([next(iter(files), 0), batch.num_rows, *row])
    if types is None:
        return None
    table = np.array(found, np.int64)
    is_large = [arrow.types.is_large_list(each) for each in types]
    return ListColumns(
        files=table[:, 0].copy(),
        n_rows=table[:, 1].copy(),
        offsets=table[:, [2, 5]],
        values=table[:, [3, 6]],
        sizes=table[:, [4, 7]],
        offset_dtypes=tuple(np.dtype(np.int64 if large else np.int32) for large in is_large),
        dtypes=tuple(np.dtype(each.value_type.to_pandas_dtype()) for each in types),
    )
