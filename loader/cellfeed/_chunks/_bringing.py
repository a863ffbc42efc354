"""Reading the bytes of chunks into memory, if compiled threads do not read them themselves."""

from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import LOOK_UP_SECONDS, ByteStore, UnreadableRangeError, is_awaited
from cellfeed._chunks import _kernels as kernels

__all__ = ["Piece", "ShortRangeError", "are_brought", "brought_bytes", "expect", "pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Chunks that can be decoded without waiting.

    Parameters
    ----------
    rows
        Their row numbers in the table, shape (n,).
    chunks
        Their rows, with addresses in place of offsets for chunks in memory.
    owners
        Objects that own this memory.
    """

    rows: NDArray[np.intp]
    chunks: NDArray[np.int64]
    owners: Sequence[object] = ()


class ShortRangeError(Exception):
    """A chunk is incomplete; ``failure`` is the code of the kernels."""

    def __init__(self, chunk: int, failure: int) -> None:
        super().__init__(chunk, failure)
        self.chunk, self.failure = chunk, failure


def pieces(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore], expected: NDArray[np.int64]
) -> Iterator[Piece]:
    """Yield all chunks, each as soon as its bytes are available.

    Chunks that threads read themselves come first, chunks of stores as they arrive.

    Parameters
    ----------
    chunks
        A table of the kernels. Chunks with the flag `IN_MEMORY` have the number of their file in
        place of a descriptor.
    stores
        The byte store of each array.
    expected
        Decompressed size of a chunk of each array in bytes, int64.

    Raises
    ------
    ShortRangeError
        A file ends before the end of a chunk, or has the wrong size.
    """
    at_hand = np.flatnonzero(~_wanted(chunks))
    if at_hand.size == len(chunks):
        yield Piece(at_hand, chunks)
        return
    coming, later = dict[Future[None], list[_Coming]](), list[_Coming]()
    for store, rows in _by_store(chunks, stores):
        _check_own_files(chunks, rows, store, expected)
        arrivals = store.arrivals(*_ranges(chunks, rows))
        if arrivals is None:
            later.append(_Coming(store, rows))
        else:
            for each in arrivals:
                own = _Coming(store, rows[each.ranges], each.owner)
                coming.setdefault(each.is_here, []).append(own)
    if at_hand.size:
        yield Piece(at_hand, chunks[at_hand])
    if later:
        yield _read(chunks, later)
    while coming:
        arrived = wait(coming, LOOK_UP_SECONDS, FIRST_COMPLETED).done
        if not arrived and not is_awaited():
            arrived = set(coming)  # the store says so
        if arrived:
            yield _read(chunks, [own for each in arrived for own in coming.pop(each)])


def expect(chunks: NDArray[np.int64], stores: Sequence[ByteStore]) -> list[object]:
    """Start the requests of `pieces` to stores; return the object that keeps them alive.

    Parameters
    ----------
    chunks, stores
        See `pieces`.
    """
    ahead = [store.expect(*_ranges(chunks, rows)) for store, rows in _by_store(chunks, stores)]
    return [each for each in ahead if each is not None]


def are_brought(chunks: NDArray[np.int64]) -> bool:
    """Whether a store reads any of these chunks into memory."""
    return bool((chunks[:, kernels.FLAGS] & kernels.IN_MEMORY).any())


def brought_bytes(chunks: NDArray[np.int64]) -> int:
    """Return the number of bytes requested from stores; an upper bound for files of one chunk."""
    return int(chunks[:, kernels.SIZE][_wanted(chunks)].sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """Chunks that arrive together from a store, and the owner of their requests."""

    store: ByteStore
    rows: NDArray[np.intp]
    owner: object = None


def _read(chunks: NDArray[np.int64], arrived: Sequence[_Coming]) -> Piece:
    """Return chunks whose bytes have arrived."""
    rows = np.concatenate([each.rows for each in arrived])
    found, owners = chunks[rows], list[object]()
    contents = (content for each in arrived for content in _contents(chunks, each))
    for k, content in enumerate(contents):
        _put(found[k], int(rows[k]), content, owners)
    return Piece(rows, found, owners)


def _contents(
    chunks: NDArray[np.int64], arrived: _Coming
) -> Sequence[bytes | memoryview | NDArray[np.uint8] | None]:
    """Return the bytes of chunks that arrived together."""
    try:
        return arrived.store.read_ranges(*_ranges(chunks, arrived.rows))
    except UnreadableRangeError as error:
        raise ShortRangeError(int(arrived.rows[error.range]), kernels.UNREADABLE) from error


def _wanted(chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which chunks must be read by stores."""
    flags = chunks[:, kernels.FLAGS]
    wanted: NDArray[np.bool_] = (flags & kernels.IN_MEMORY) != 0
    wanted &= (flags & (kernels.ABSENT | kernels.LOST)) == 0
    return wanted


def _by_store(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore]
) -> Iterator[tuple[ByteStore, NDArray[np.intp]]]:
    """Iterate over stores and their chunks, all of one store together."""
    distinct = {id(store): store for store in stores}
    numbers = {each: number for number, each in enumerate(distinct)}
    number_of_array = np.array([numbers[id(store)] for store in stores], np.intp)
    wanted = np.flatnonzero(_wanted(chunks))
    number_of_chunk = number_of_array[chunks[wanted, kernels.ARRAY]]
    for number, store in enumerate(distinct.values()):
        rows = wanted[number_of_chunk == number]
        if rows.size:
            yield store, rows


def _ranges(
    chunks: NDArray[np.int64], rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return file, first byte and size of each chunk."""
    table = np.ascontiguousarray(chunks[rows][:, [kernels.FD, kernels.OFFSET, kernels.SIZE]].T)
    return table[0], table[1], table[2]


def _put(
    chunk: NDArray[np.int64],
    row: int,
    buffer: bytes | memoryview | NDArray[np.uint8] | None,
    owners: list[object],
) -> None:
    """Write the address of a chunk's bytes to its row of the table."""
    if buffer is None:
        chunk[kernels.FLAGS] |= kernels.LOST
        return
    stored = np.frombuffer(buffer, np.uint8)
    if stored.size > chunk[kernels.SIZE]:
        raise ValueError(f"{stored.size} bytes were read, but {chunk[kernels.SIZE]} expected")
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
    """Check that files that contain one uncompressed chunk have its size."""
    alone = rows[(chunks[rows, kernels.FLAGS] & kernels.OWN_FILE) != 0]
    sizes = store.sizes(np.ascontiguousarray(chunks[alone, kernels.FD]))
    wrong = alone[(sizes >= 0) & (sizes != expected[chunks[alone, kernels.ARRAY]])]
    if wrong.size:
        raise ShortRangeError(int(wrong[0]), kernels.WRONG_SIZE)
