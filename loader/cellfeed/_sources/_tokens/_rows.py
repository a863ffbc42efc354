"""The rows of a stream: windows, or documents."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import RowExtents
from cellfeed._errors import FormatError
from cellfeed._runs import expand
from cellfeed._sources._tokens._format import DOCUMENTS
from cellfeed._sources._tokens._shards import Shards

__all__ = ["Documents", "TokenRows", "Windows", "pieces_of", "require_rows"]


class TokenRows(Protocol):
    """Rows of a stream."""

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        ...

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where rows begin in the stream, and the number of tokens of each."""
        ...

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shard in which each row begins."""
        ...

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the document of a shard that each row is, or in which it begins."""
        ...


class Windows:
    """Windows of equal length, which may cross shards; a shorter last window is left out.

    Parameters
    ----------
    shards
        The shards of the stream.
    window, stride
        Number of tokens of a window, and between the starts of consecutive windows.
    """

    def __init__(self, shards: Shards, window: int, stride: int) -> None:
        self._shards, self._window, self._stride = shards, window, stride
        self._offsets = shards.table(DOCUMENTS, "<i8")
        self.n_rows = max(0, (shards.n_tokens - window) // stride + 1)

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `TokenRows`."""
        return rows * self._stride, np.full(rows.size, self._window, np.int64)

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        starts = rows * self._stride
        return np.asarray(np.searchsorted(self._shards.bounds, starts, side="right") - 1)

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        starts = rows * self._stride - self._shards.bounds[shard]
        return np.asarray(np.searchsorted(self._offsets.of(shard), starts, side="right") - 1)


class Documents:
    """Documents, in the order in which they were appended to the shards.

    Parameters
    ----------
    shards
        The shards of the stream, all of which have documents.
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        counts = [header.n_documents or 0 for header in shards.headers]
        self._firsts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._offsets = shards.table(DOCUMENTS, "<i8")
        self._longest = np.array([each.longest_document for each in shards.headers], np.int64)
        self.n_rows = int(self._firsts[-1])

    def ranges(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """See `TokenRows`."""
        shards = self.shards_of(rows)
        own = rows - self._firsts[shards]
        starts, stops = self._offsets.rows(shards, own), self._offsets.rows(shards, own + 1)
        sizes = np.diff(self._shards.bounds)[shards]
        wrong = (starts < 0) | (stops < starts) | (stops > sizes)
        wrong |= stops - starts > self._longest[shards]
        if wrong.any():
            bad = int(np.flatnonzero(wrong)[0])
            what = f"document {own[bad]} has tokens {starts[bad]} to {stops[bad]}"
            raise self._shards.damaged(int(shards[bad]), DOCUMENTS, what)
        return self._shards.bounds[shards] + starts, stops - starts

    def shards_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        return np.asarray(np.searchsorted(self._firsts, rows, side="right") - 1)

    def documents_of(self, shard: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """See `TokenRows`."""
        return np.asarray(rows - self._firsts[shard])


def pieces_of(
    bounds: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> RowExtents:
    """Return ranges of a stream by shard.

    Parameters
    ----------
    bounds
        Where each shard begins, ascending, int64, shape (n_shards + 1,).
    starts, lengths
        The ranges: first token and number of tokens, int64, shape (n,).

    Examples
    --------
    >>> pieces_of(np.array([0, 4, 10]), np.array([1, 3]), np.array([2, 4])).files.tolist()
    [0, 0, 1]
    """
    first = np.searchsorted(bounds, starts, side="right") - 1
    stop = np.searchsorted(bounds, starts + lengths, side="left")
    n_pieces = np.where(lengths > 0, stop - first, 0)
    rows = np.repeat(np.arange(starts.size), n_pieces)
    shards = expand(np.stack([first, first + n_pieces], axis=1))
    begins = np.maximum(starts[rows], bounds[shards])
    counts = np.minimum((starts + lengths)[rows], bounds[shards + 1]) - begins
    there = np.flatnonzero(counts)  # shards may be empty
    rows, shards, begins = rows[there], shards[there], begins[there]
    return RowExtents(
        rows=rows,
        files=shards,
        firsts=begins - bounds[shards],
        counts=counts[there],
        within=begins - starts[rows],
    )


def require_rows(shards: Shards, rows: TokenRows, window: int | None) -> None:
    """Check that the stream has rows.

    Raises
    ------
    FormatError
        It has none.
    """
    if rows.n_rows:
        return
    what = "document" if window is None else f"window of {window:,} tokens"
    remedy = "append some" if window is None else "give a smaller `window`"
    raise FormatError(f"{shards.location}: has {shards.n_tokens:,} tokens but no {what}; {remedy}")
