"""The elements of a token stream: tokens, spans, and the metadata of spans."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import RaggedRows
from cellfeed._chunks import RowExtents, RowRanges, SlowRead, can_cast
from cellfeed._layouts import DenseChunks, RaggedRanges
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import StoredElement, read_ragged
from cellfeed._sources._tokens._format import METADATA, SPANS, TOKENS
from cellfeed._sources._tokens._rows import Documents, TokenRows, Windows, pieces_of
from cellfeed._sources._tokens._shards import Shards
from cellfeed._sources._tokens._spans import SPAN, SpanReader

__all__ = ["DocumentTokens", "MetadataElement", "SpansElement", "WindowTokens"]


class _Tokens(StoredElement):
    """Tokens of rows, read by compiled threads: one read for each shard in which a row lies."""

    var = None
    stored_as = TOKENS

    def __init__(self, shards: Shards, rows: TokenRows) -> None:
        self._shards, self._rows = shards, rows
        self.dtype = shards.dtype
        self._files = shards.files(TOKENS)

    def stored_bytes(self) -> int:
        """Return the size of all tokens in bytes."""
        return self._shards.n_tokens * self.dtype.itemsize

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:
        """Return why values of this dtype are not decoded here; None if they are."""
        if can_cast(self.dtype, dtype):
            return None
        reason = f"cellfeed does not convert {self.dtype} to {dtype}"
        return SlowRead("NumPy", reason, f"read it as {self.dtype}, or write it as {dtype}")

    def _pieces(self, rows: NDArray[np.int64]) -> RowExtents:
        return pieces_of(self._shards.bounds, *self._rows.ranges(rows))

    @property
    def _ranges(self) -> RowRanges:
        return RowRanges(
            name="tokens",
            shape=self.shape,
            dtype=self.dtype,
            files=self._files,
            pieces=self._pieces,
        )


class WindowTokens(_Tokens):
    """Windows of equal length.

    Parameters
    ----------
    shards, rows, window
        The shards of the stream, its windows, and the number of tokens of each.
    """

    layout = "dense"

    def __init__(self, shards: Shards, rows: Windows, window: int) -> None:
        super().__init__(shards, rows)
        self.shape = (rows.n_rows, window)

    def chunked(self) -> DenseChunks:
        """Return where windows lie."""
        return DenseChunks(self._ranges, self.shape[1])

    def read_rows(self, runs: Runs) -> NDArray[Any]:
        """Read windows, in this thread."""
        rows = read_ragged(RaggedRanges(self._ranges), expand(runs))
        return rows.values.reshape(len(rows), self.shape[1])


class DocumentTokens(_Tokens):
    """Documents, of any length.

    Parameters
    ----------
    shards, rows
        The shards of the stream, and its documents.
    """

    layout = "ragged"

    def __init__(self, shards: Shards, rows: Documents) -> None:
        super().__init__(shards, rows)
        self.shape = (rows.n_rows,)

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of tokens of each document."""
        return self._rows.ranges(expand(runs))[1]

    def chunked(self) -> RaggedRanges:
        """Return where documents lie."""
        return RaggedRanges(self._ranges)

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read documents, in this thread."""
        return read_ragged(self.chunked(), expand(runs))


class SpansElement(StoredElement):
    """The spans that overlap each row, whose number is known only after they are read.

    Parameters
    ----------
    shards, rows, reader
        The shards of the stream, its rows, and the reader of spans.
    """

    layout = "ragged"
    var = None
    dtype: np.dtype[Any] = SPAN
    stored_as = SPANS

    def __init__(self, shards: Shards, rows: TokenRows, reader: SpanReader) -> None:
        self._shards, self._reader = shards, reader
        self.shape = (rows.n_rows,)

    def stored_bytes(self) -> int:
        """Return the size of all records in bytes."""
        sizes = (header.files.get(self.stored_as, (0, 0))[0] for header in self._shards.headers)
        return sum(sizes)

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read the spans of rows."""
        return self._reader.spans(expand(runs))


class MetadataElement(SpansElement):
    """The metadata of the spans of each row, encoded and concatenated."""

    dtype = np.dtype(np.uint8)
    stored_as = METADATA

    def read_rows(self, runs: Runs) -> RaggedRows:
        """Read the metadata of the spans of rows."""
        return self._reader.metadata(expand(runs))
