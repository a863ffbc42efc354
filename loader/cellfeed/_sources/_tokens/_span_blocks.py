"""Spans by blocks of tokens, so that the spans of a window are contiguous.

A block lists the spans that overlap it: those that began before it, and those that begin in it.
Their metadata has the same order. So a window needs one range of records and one range of
metadata, however long the spans that reach into it, and an index with two numbers per block
locates these ranges.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._runs import expand
from cellfeed._sources._tokens._files import WrittenFile
from cellfeed._sources._tokens._format import SPAN_RECORD

__all__ = ["ADDED", "SpansToWrite"]

ADDED = np.dtype([("start", "<i8"), ("stop", "<i8"), ("first_byte", "<i8"), ("n_bytes", "<i8")])
"""A span in the order of addition, and the position of its metadata."""

_PAIRS_AT_ONCE = 1 << 18
_BYTES_AT_ONCE = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SpansToWrite:
    """Spans of a shard in the order in which they were added.

    Parameters
    ----------
    spans, metadata
        Files of `ADDED`, and of the bytes of the spans' metadata.
    n_tokens, block
        Number of tokens of the shard, and of a block.
    """

    spans: Path
    metadata: Path
    n_tokens: int
    block: int

    def write(self, index: WrittenFile, records: WrittenFile, metadata: WrittenFile) -> None:
        """Write the spans by block."""
        added = np.fromfile(self.spans, ADDED)
        spans, blocks = self._pairs(added)
        n_blocks = -(-self.n_tokens // self.block)
        ends = np.concatenate([[0], np.cumsum(added["n_bytes"][spans])])
        firsts = np.searchsorted(blocks, np.arange(n_blocks + 1))
        index.write(np.stack([firsts, ends[firsts]], axis=1).astype("<i8"))
        for first in range(0, spans.size, _PAIRS_AT_ONCE):
            some = slice(first, first + _PAIRS_AT_ONCE)
            records.write(self._records(added, spans[some], blocks[some], ends[:-1][some]))
        stored = np.memmap(self.metadata, np.uint8) if self.metadata.stat().st_size else b""
        _copy(added, spans, ends, stored, metadata.write)

    def _pairs(self, added: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each span with each block that it overlaps, sorted by block and start."""
        order = np.argsort(added["start"], kind="stable")
        first = added["start"][order] // self.block
        stop = (added["stop"][order] - 1) // self.block + 1
        blocks = expand(np.stack([first, stop], axis=1))
        by_block = np.argsort(blocks, kind="stable")
        return np.repeat(order, stop - first)[by_block], blocks[by_block]

    def _records(
        self,
        added: NDArray[Any],
        spans: NDArray[np.int64],
        blocks: NDArray[np.int64],
        first_bytes: NDArray[np.int64],
    ) -> NDArray[Any]:
        records = np.zeros(spans.size, SPAN_RECORD)
        for name in ("start", "stop", "n_bytes"):
            records[name] = added[name][spans]
        records["id"], records["first_byte"] = spans, first_bytes
        records["began_before"] = records["start"] < blocks * self.block
        return records


def _copy(
    added: NDArray[Any],
    spans: NDArray[np.int64],
    ends: NDArray[np.int64],
    stored: Any,
    write: Callable[[NDArray[np.uint8]], None],
) -> None:
    """Copy the metadata of spans, a limited number of bytes at a time."""
    first = 0
    while first < spans.size:
        stop = int(np.searchsorted(ends, ends[first] + _BYTES_AT_ONCE))
        stop = min(max(stop, first + 1), spans.size)
        some = added[spans[first:stop]]
        runs = np.stack([some["first_byte"], some["first_byte"] + some["n_bytes"]], axis=1)
        if ends[stop] > ends[first]:
            write(stored[expand(runs)])
        first = stop
