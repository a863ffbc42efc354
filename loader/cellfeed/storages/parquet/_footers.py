"""The footer of a Parquet file: its columns, their types, and where they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.extending import ColumnError
from cellfeed.sources import failures_named
from cellfeed.sources.arrow import kind, values_of
from cellfeed.storages.parquet._column_chunks import ColumnChunks

END_BYTES = 8  # size of the footer, and the magic number


@dataclass(frozen=True, slots=True, eq=False)
class Footer:
    """The footer of a Parquet file.

    Parameters
    ----------
    where
        The file, for messages.
    metadata
        Its `pyarrow.parquet.FileMetaData`. Of its columns in row groups, `chunks` says more safely
        the same.
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

    def refused_in_obs(self, field: Any) -> str:
        """Return a message why the type of a column cannot be in obs; empty if it can."""
        if kind(field.type):
            return ""
        msg = f"{self.where}: column {field.name!r} is of type {field.type}"
        return f"{msg}, neither numbers, booleans nor text; write it as text"

    def leaves(self, names: Sequence[str]) -> list[int]:
        """Return the numbers of the stored columns that some columns consist of."""
        at = [self.schema.get_field_index(self.field(name).name) for name in names]
        if len(self.schema) == self.metadata.num_columns:  # none is nested
            return at
        stops = np.cumsum([_n_leaves(each) for each in self.schema.types]).tolist()
        return [leaf for k in at for leaf in range(stops[k - 1] if k else 0, stops[k])]

    def chunks(self, leaves: Sequence[int]) -> ColumnChunks:
        """Return where stored columns are in each row group.

        Raises
        ------
        FormatError
            The footer is damaged.
        """
        metadata, stored = self.metadata, [self.metadata.schema.column(leaf) for leaf in leaves]
        is_nested = np.array([each.max_repetition_level > 0 for each in stored], bool)
        sizes = metadata.num_columns, metadata.num_row_groups
        msg = f"{self.where}: its footer is damaged"
        with failures_named(msg, "copy or download it again", (ValueError,)):
            found = ColumnChunks.read(self.content, leaves, *sizes)
            if int(found.n_rows.sum()) != metadata.num_rows:
                raise ValueError("its row groups have other numbers of rows than it says")
            found.check(self.n_bytes, [each.path for each in stored], is_nested)
        return found


def _n_leaves(found: Any) -> int:
    """Return the number of stored columns of a type."""
    if hasattr(found, "storage_type"):  # an extension
        found = found.storage_type
    children = [found.field(k) for k in range(found.num_fields)]
    return sum(_n_leaves(each.type) for each in children) if children else 1


# What types are, for matrices.


def dtype_of(found: Any) -> np.dtype[Any] | None:
    """Return the dtype of a number for each cell; None if it is none."""
    is_number = kind(found) in ("numbers", "booleans")
    return np.dtype(found.to_pandas_dtype()) if is_number else None


def dtype_in_lists(found: Any) -> np.dtype[Any] | None:
    """Return the dtype of lists of numbers, void if all are empty; None if they are none."""
    from pyarrow import types  # noqa: PLC0415 - optional

    tests = (
        types.is_list, types.is_large_list, types.is_fixed_size_list,
        types.is_list_view, types.is_large_list_view,
    )  # fmt: skip
    if not any(test(found) for test in tests):
        return None
    values = values_of(found.value_type)
    if types.is_null(values):
        return np.dtype(np.void)
    return dtype_of(values) if kind(values) == "numbers" else None
