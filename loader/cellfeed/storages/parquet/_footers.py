"""The footer of a Parquet file: its columns, their types, and where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.extending import ColumnError, FormatError
from cellfeed.sources import failures_named
from cellfeed.sources.arrow import MISSING, kind, values_of
from cellfeed.storages.parquet import _kernels as kernels
from cellfeed.storages.parquet._kernels import _fields as fields
from cellfeed.storages.parquet._lists import CODECS

END_BYTES = 8  # size of the footer, and the magic number
_MAGIC_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """The footer of a Parquet file.

    Parameters
    ----------
    where
        The file, for messages.
    metadata
        Its `pyarrow.parquet.FileMetaData`. Of its columns in row groups, `row_groups` says the
        same; pyarrow ends the process where it has a number that pyarrow does not know.
    schema
        Its `pyarrow.Schema`.
    content
        Its bytes, without its size and the magic number.
    n_bytes
        Number of bytes of the file before it.
    """

    where: str
    metadata: Any
    schema: Any
    content: NDArray[np.uint8]
    n_bytes: int

    @classmethod
    def read(cls, where: str, tail: bytes, size: int) -> Footer:
        """Read the last bytes of a file of some size; errors are pyarrow's."""
        import pyarrow as pa  # noqa: PLC0415 - optional
        import pyarrow.parquet as pq  # noqa: PLC0415

        metadata = pq.read_metadata(pa.BufferReader(tail))
        schema = metadata.schema.to_arrow_schema()
        if sum(map(_n_leaves, schema.types)) != metadata.num_columns or metadata.num_rows < 0:
            raise ValueError("its columns are not as it says")
        _ = schema.names  # which may be no text
        n_bytes = int.from_bytes(tail[-END_BYTES:][:4], "little")
        content = np.frombuffer(tail, np.uint8)[-END_BYTES - n_bytes : -END_BYTES]
        return cls(where, metadata, schema, content, size - END_BYTES - n_bytes)

    def field(self, name: str) -> Any:
        """Return a `pyarrow.Field`.

        Raises
        ------
        ColumnError
            There is no such column, or there are several.
        """
        at = self.schema.get_field_index(name)
        if at < 0:
            n = len(self.schema.get_all_field_indices(name))
            if n:
                msg = f"{self.where}: has {n} columns named {name!r}"
                raise ColumnError(f"{msg}; write the file with other names for all but one")
            msg = f"{self.where}: has no column {name!r}, which other files have"
            raise ColumnError(f"{msg}; leave the file or the column out")
        return self.schema.field(at)

    def leaves(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the stored columns that some columns consist of."""
        sizes = [*map(_n_leaves, self.schema.types)]
        stops = np.cumsum(sizes).tolist()
        at = [self.schema.get_field_index(self.field(name).name) for name in names]
        return [leaf for k in at for leaf in range(stops[k] - sizes[k], stops[k])]

    def row_groups(self, leaves: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return what the footer says of some stored columns.

        Returns
        -------
        Number of rows of each row group, int64, shape (n_groups,); and what `fields` lists of each
        column in it, int64, shape (n_groups, n_columns, N_CHUNK_FIELDS), -1 where the footer does
        not say it. `fields.DATA_OFFSET` is that of the dictionary, if there is one.

        Raises
        ------
        FormatError
            The footer is damaged.
        """
        metadata, stored = self.metadata, [self.metadata.schema.column(leaf) for leaf in leaves]
        is_nested = np.array([each.max_repetition_level > 0 for each in stored], bool)
        places = np.full(metadata.num_columns, -1, np.int64)
        places[[*leaves]] = np.arange(len(leaves))
        n_rows = np.full(metadata.num_row_groups, -1, np.int64)
        chunks = np.full((n_rows.size, len(leaves), fields.N_CHUNK_FIELDS), -1, np.int64)
        msg, address = f"{self.where}: its footer is damaged", self.content.ctypes.data
        with failures_named(msg, "copy or download it again", (ValueError,)):
            n = kernels.read_footer(address, self.content.size, places, n_rows, chunks)
            if n < 0 or (n_rows < 0).any():
                raise ValueError("its row groups are not as it says")
            if int(n_rows.sum()) != metadata.num_rows:
                raise ValueError("its row groups have other numbers of rows than it says")
            # All columns are in the file, with a value or more for each row, and a known codec.
            by_field = np.moveaxis(chunks, -1, 0)
            begins, dictionaries = by_field[[fields.DATA_OFFSET, fields.DICTIONARY_OFFSET]]
            np.minimum(begins, dictionaries, out=begins, where=dictionaries > 0)
            by_field[fields.DATA_OFFSET] = begins
            sizes, codecs = by_field[fields.STORED_BYTES], by_field[fields.CHUNK_CODEC]
            n_more = by_field[fields.N_CHUNK_ENTRIES] - n_rows[:, None]
            is_there = (begins >= _MAGIC_BYTES) & (sizes >= 0) & (sizes <= self.n_bytes - begins)
            is_there &= (n_more == 0) | (is_nested & (n_more > 0))
            is_there &= (by_field[fields.CHUNK_BYTES] >= 0) & (codecs >= 0) & (codecs < len(CODECS))
            for group, column in np.argwhere(~is_there & (n_rows[:, None] > 0))[:1].tolist():
                what = f"is not in the file, or has codec number {codecs[group, column]}"
                msg = f"row group {group}: column {stored[column].path!r} {what}"
                raise ValueError(msg)
        return n_rows, chunks

    def largest(self, chunk: NDArray[np.int64], dtype: np.dtype[Any]) -> int | None:
        """Return the largest value of a column of integers; None if the footer does not say it.

        Return -1 if it has none; all lists of a void dtype are empty.
        """
        if dtype.kind == "V" or chunk[fields.N_NULLS] == chunk[fields.N_CHUNK_ENTRIES]:
            return -1
        begin, size = int(chunk[fields.MAX_BEGIN]), int(chunk[fields.MAX_SIZE])
        is_signed = dtype.kind == "i"
        if size not in (4, 8) or (chunk[fields.MAX_IS_SIGNED] == 1 and not is_signed):
            return None
        stored = self.content[begin : begin + size].tobytes()
        return int.from_bytes(stored, "little", signed=is_signed)

    def dtype_in_lists(self, field: Any) -> np.dtype[Any]:
        """Return the dtype of the values of a column of lists; void if all are empty.

        Raises
        ------
        FormatError
            They are no lists of numbers.
        """
        if hasattr(field.type, "value_field"):
            values = values_of(field.type.value_type)
            if kind(values) in ("numbers", MISSING):
                return np.dtype(np.void if kind(values) == MISSING else values.to_pandas_dtype())
        msg = f"{self.where}: column {field.name!r} is of type {field.type}, not a list of numbers"
        raise FormatError(f"{msg} for each cell; give another column")


def _n_leaves(found: Any) -> int:
    """Return the number of stored columns of a type."""
    if hasattr(found, "storage_type"):  # an extension
        found = found.storage_type
    children = [found.field(k) for k in range(found.num_fields)]
    return sum(_n_leaves(each.type) for each in children) if children else 1
