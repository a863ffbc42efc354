"""Record batches of Arrow files: where the lists of their rows lie."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, PathError
from cellfeed._sources._base import import_arrow

__all__ = ["EXTRA", "ListColumns", "batches_of", "list_columns", "open_table", "type_of_lists"]

EXTRA = "huggingface"


@dataclass(frozen=True, slots=True, eq=False)
class ListColumns:
    """Where the lists of two columns lie in some files; arrays have a row for each batch.

    Parameters
    ----------
    files, n_rows
        File of each record batch, and how many rows it has, int64, shape (n_batches,).
    offsets, values
        First byte of the offsets, and of the values, of both columns, int64, shape (n_batches, 2).
    sizes
        How many values there are of both, int64, shape (n_batches, 2).
    offset_dtypes, dtypes
        Dtypes of offsets and of values of both.
    """

    files: NDArray[np.int64]
    n_rows: NDArray[np.int64]
    offsets: NDArray[np.int64]
    values: NDArray[np.int64]
    sizes: NDArray[np.int64]
    offset_dtypes: tuple[np.dtype[Any], ...]
    dtypes: tuple[np.dtype[Any], ...]


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise PathError(f"{path}: there is no such file; put it back") from error
    except (OSError, ValueError) as error:  # Arrow's are of these
        said = str(error).splitlines()[0]
        raise FormatError(f"{path}: no whole Arrow stream ({said}); copy it again") from error


def batches_of(arrow: Any, path: Path) -> Iterator[tuple[Any, int, int]]:
    """Yield the record batches of a file, with the address where it is mapped, and its size."""
    with _damage_named(path), arrow.memory_map(str(path)) as mapped:
        n_bytes = mapped.size()
        whole = mapped.read_buffer(n_bytes)
        mapped.seek(0)
        for batch in arrow.ipc.open_stream(mapped):
            yield batch, whole.address, n_bytes


def open_table(location: Location, paths: Sequence[Path]) -> Any:
    """Return all rows of some files as a `pyarrow.Table`, mapped into memory."""
    arrow = import_arrow(location, EXTRA)
    tables = []
    for path in paths:
        with _damage_named(path):
            tables.append(arrow.ipc.open_stream(arrow.memory_map(str(path))).read_all())
    return arrow.concat_tables(tables)


def type_of_lists(arrow: Any, location: Location, schema: Any, name: str) -> Any:
    """Return the type of a column of lists of numbers.

    Raises
    ------
    FormatError
        It is another.
    """
    found = schema.field(name).type
    is_list = arrow.types.is_list(found) or arrow.types.is_large_list(found)
    of = found.value_type if is_list else None
    if of is None or not (arrow.types.is_integer(of) or arrow.types.is_floating(of)):
        msg = f"{location}: column {name!r} is of type {found}, and no list of numbers"
        raise FormatError(f"{msg} for each cell; name another")
    return found


def list_columns(
    location: Location, paths: Sequence[Path], names: tuple[str, str]
) -> ListColumns | None:
    """Return where the lists of two columns lie; None if not as they are in memory.

    Parameters
    ----------
    location
        For messages.
    paths
        The files.
    names
        The columns.
    """
    arrow = import_arrow(location, EXTRA)
    found, types = list[list[int]](), None
    for number, path in enumerate(paths):
        for batch, address, n_bytes in batches_of(arrow, path):
            if types is None:
                types = [type_of_lists(arrow, location, batch.schema, name) for name in names]
            row = [number, batch.num_rows]
            for name in names:
                column = batch.column(name)
                lists = column.buffers()[1], column.values.buffers()[1], len(column.values)
                if column.null_count or column.values.null_count:
                    raise FormatError(
                        f"{path}: column {name!r}: not every cell has a list of numbers; "
                        "leave those cells out"
                    )
                for buffer in lists[:2]:
                    at = buffer.address - address if buffer is not None and buffer.size else 0
                    if not 0 <= at <= n_bytes - (buffer.size if buffer is not None else 0):
                        return None  # it was decompressed
                    row.append(at)
                row.append(lists[2])
            found.append(row)
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
