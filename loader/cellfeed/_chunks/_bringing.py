"""Bytes of chunks that compiled threads do not read themselves are brought to memory."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore
from cellfeed._chunks import _kernels as kernels

__all__ = ["Brought", "ShortRangeError", "bring"]

Brought = tuple[NDArray[np.int64], Sequence[object]]


class ShortRangeError(Exception):
    """The bytes of a chunk are not all there; ``failure`` is what the kernels call that."""

    def __init__(self, chunk: int, failure: int) -> None:
        super().__init__(chunk, failure)
        self.chunk, self.failure = chunk, failure


def bring(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore], expected: NDArray[np.int64]
) -> Brought:
    """Return a table of chunks whose bytes are in memory where it says so, and what owns them.

    Parameters
    ----------
    chunks
        A kernels' table. Chunks that are `IN_MEMORY` have the number of their file in place of a
        descriptor; those that are brought have an address in place of the offset.
    stores
        That of each array.
    expected
        Bytes of a chunk of each array once it is decompressed, int64.

    Raises
    ------
    ShortRangeError
        A file ends before a chunk does, or has another size than it must have.
    """
    flags = chunks[:-1, kernels.FLAGS]  # the last row only ends the table
    wanted = (flags & kernels.IN_MEMORY) != 0
    if not wanted.any():
        return chunks, ()
    wanted &= (flags & (kernels.ABSENT | kernels.LOST)) == 0
    chunks, owners = chunks.copy(), list[object]()
    rows_of = dict[int, list[NDArray[np.intp]]]()  # all of one store's at once
    for number, store in enumerate(stores):
        own = np.flatnonzero(wanted & (chunks[:-1, kernels.ARRAY] == number))
        rows_of.setdefault(id(store), []).append(own)
    for store in {id(each): each for each in stores}.values():
        rows = np.concatenate(rows_of[id(store)])
        files, offsets, sizes = (
            np.ascontiguousarray(chunks[rows, column])
            for column in (kernels.FD, kernels.OFFSET, kernels.SIZE)
        )
        _check_own_files(chunks, rows, store, expected)
        found = store.read_ranges(files, offsets, sizes) if rows.size else ()
        for row, buffer in zip(rows.tolist(), found, strict=True):
            _put(chunks[row], row, buffer, owners)
    return chunks, owners


def _put(
    chunk: NDArray[np.int64],
    row: int,
    buffer: bytes | memoryview | NDArray[np.uint8] | None,
    owners: list[object],
) -> None:
    """Say in a row of the table where the bytes are."""
    if buffer is None:
        chunk[kernels.FLAGS] |= kernels.LOST
        return
    stored = np.frombuffer(buffer, np.uint8)
    if stored.size > chunk[kernels.SIZE]:
        raise ValueError(f"{stored.size} bytes were read in place of {chunk[kernels.SIZE]}")
    if stored.size < chunk[kernels.SIZE] and not chunk[kernels.FLAGS] & kernels.WHOLE_FILE:
        raise ShortRangeError(row, kernels.TRUNCATED)
    owners.append(stored)
    chunk[kernels.OFFSET], chunk[kernels.SIZE] = stored.ctypes.data, stored.size


def _check_own_files(
    chunks: NDArray[np.int64],
    rows: NDArray[np.intp],
    store: ByteStore,
    expected: NDArray[np.int64],
) -> None:
    """Check that files which hold one chunk as it is have its size."""
    alone = rows[(chunks[rows, kernels.FLAGS] & kernels.OWN_FILE) != 0]
    sizes = store.sizes(np.ascontiguousarray(chunks[alone, kernels.FD]))
    wrong = alone[(sizes >= 0) & (sizes != expected[chunks[alone, kernels.ARRAY]])]
    if wrong.size:
        raise ShortRangeError(int(wrong[0]), kernels.WRONG_SIZE)
