"""What the footer of a Parquet file says of some of its columns.

pyarrow reads the same, but ends the process where a footer has a number that it does not know.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed.storages.parquet import _kernels as kernels
from cellfeed.storages.parquet._kernels import _fields as fields

# Names of codecs, by their numbers in footers.
_CODECS = ("none", "snappy", "gzip", "lzo", "brotli", "lz4_hadoop", "zstd", "lz4")
_MAGIC_BYTES = 4

_PLAIN, _PLAIN_DICTIONARY, _RLE, _RLE_DICTIONARY = 0, 2, 3, 8  # encodings
_PLAIN_OR_DICTIONARIES = 1 << _PLAIN | 1 << _PLAIN_DICTIONARY | 1 << _RLE | 1 << _RLE_DICTIONARY


@dataclass(frozen=True, slots=True, eq=False)
class ColumnChunks:
    """Some stored columns of a Parquet file, in each row group.

    Parameters
    ----------
    footer
        The footer, without its size and the magic number.
    n_rows
        Number of rows of each row group, int64, shape (n_groups,).
    chunks
        What `fields` lists of each column in each row group, int64, shape (n_groups, n_columns,
        N_CHUNK_FIELDS); -1 where the footer does not say it.
    """

    footer: NDArray[np.uint8]
    n_rows: NDArray[np.int64]
    chunks: NDArray[np.int64]

    @classmethod
    def read(
        cls, footer: NDArray[np.uint8], columns: Sequence[int], n_columns: int, n_groups: int
    ) -> Self:
        """Read a footer.

        Parameters
        ----------
        footer
            See above.
        columns
            The numbers of the wanted columns.
        n_columns, n_groups
            Number of its stored columns, and of its row groups.

        Raises
        ------
        ValueError
            The footer is damaged, or a column is encrypted.
        """
        places = np.full(n_columns, -1, np.int64)
        places[[*columns]] = np.arange(len(columns))
        n_rows = np.full(n_groups, -1, np.int64)
        chunks = np.full((n_groups, len(columns), fields.N_CHUNK_FIELDS), -1, np.int64)
        tables = places, n_rows, chunks
        if kernels.read_footer(footer.ctypes.data, footer.size, *tables) < 0 or (n_rows < 0).any():
            raise ValueError("its row groups are not as it says")
        return cls(footer, n_rows, chunks)

    def check(self, n_bytes: int, names: Sequence[str], is_nested: NDArray[np.bool_]) -> None:
        """Check that all columns are within the file, and have a value or more for each row.

        Parameters
        ----------
        n_bytes
            Number of bytes of the file before its footer.
        names
            Names of the columns, for messages.
        is_nested
            Which columns may have several values for a row, shape (n_columns,).

        Raises
        ------
        ValueError
            They are not, or are compressed by an unknown codec.
        """
        n_rows, n_entries = self.n_rows[:, None], self.n_entries
        is_whole = np.where(is_nested, n_entries >= n_rows, n_entries == n_rows)
        is_whole &= (self.begins >= _MAGIC_BYTES) & (self.sizes >= 0)
        is_whole &= self.sizes <= n_bytes - self.begins
        is_whole &= self.chunks[:, :, fields.CHUNK_BYTES] >= 0
        codecs = self.chunks[:, :, fields.CHUNK_CODEC]
        is_known = (codecs >= 0) & (codecs < len(_CODECS))
        for group, column in np.argwhere(~(is_whole & is_known) & (n_rows > 0))[:1].tolist():
            codec = int(codecs[group, column])
            what = "is not in the file" if is_known[group, column] else f"has codec number {codec}"
            msg = f"row group {group}: column {names[column]!r} {what}"
            raise ValueError(msg)

    @property
    def n_entries(self) -> NDArray[np.int64]:
        """Number of values, and of lists without any, int64, shape (n_groups, n_columns)."""
        return self.chunks[:, :, fields.N_CHUNK_ENTRIES]

    @property
    def begins(self) -> NDArray[np.int64]:
        """First byte: of the dictionary, if there is one, int64, shape (n_groups, n_columns)."""
        begins = self.chunks[:, :, fields.DATA_OFFSET]
        dictionaries = self.chunks[:, :, fields.DICTIONARY_OFFSET]
        return np.where(dictionaries > 0, np.minimum(dictionaries, begins), begins)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of bytes, int64, shape (n_groups, n_columns)."""
        return self.chunks[:, :, fields.STORED_BYTES]

    @property
    def are_plain_or_dictionaries(self) -> NDArray[np.bool_]:
        """Whether values are plain, or indices into a dictionary, shape (n_groups, n_columns)."""
        others = self.chunks[:, :, fields.ENCODINGS] & ~_PLAIN_OR_DICTIONARIES
        return np.asarray(others == 0, np.bool_)

    def codec(self, group: int, column: int) -> str:
        """Return the name of a codec."""
        return _CODECS[self.chunks[group, column, fields.CHUNK_CODEC]]

    def largest(self, group: int, column: int, dtype: np.dtype[Any]) -> int | None:
        """Return the largest value of a column of integers; None if the footer does not say it.

        Return -1 if it has none; all lists of a void dtype are empty.
        """
        chunk = self.chunks[group, column]
        if dtype.kind == "V" or chunk[fields.N_NULLS] == chunk[fields.N_CHUNK_ENTRIES]:
            return -1
        begin, size = int(chunk[fields.MAX_BEGIN]), int(chunk[fields.MAX_SIZE])
        is_signed = dtype.kind == "i"
        if size not in (4, 8) or (chunk[fields.MAX_IS_SIGNED] == 1 and not is_signed):
            return None
        stored = self.footer[begin : begin + size].tobytes()
        return int.from_bytes(stored, "little", signed=is_signed)
