"""Bytes of chunks: which are in the page cache, and requests to stores that read them to memory."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed.bytes import LOOK_UP_SECONDS, ByteStore, is_cancelled
from cellfeed.decode._kernels import _fields as fields

# The page cache: whether bytes are already in it, so that readahead is not needed.

_FEWEST = 2048  # chunks; to tell the system of fewer takes less than 3 ms
_SAMPLES = 64
_NO_WAITING = getattr(os, "RWF_NOWAIT", 0)  # of Linux


def seem_to_be_in_memory(chunks: NDArray[np.int64]) -> bool:
    """Return whether chunks of local files seem to be in the page cache, judging by a sample.

    If a tenth of the chunks is not, the answer is wrongly true once in a thousand times. These
    chunks are then read without readahead.

    Parameters
    ----------
    chunks
        A table of the kernels, int64, shape (n_chunks, n_columns).
    """
    if len(chunks) < _FEWEST or not _NO_WAITING:
        return False
    byte = [bytearray(1)]
    for k in range(0, len(chunks), len(chunks) // _SAMPLES):
        fd, flags = int(chunks[k, fields.FD]), int(chunks[k, fields.FLAGS])
        if fd < 0 or flags & fields.IN_MEMORY:
            return False
        try:
            os.preadv(fd, byte, int(chunks[k, fields.OFFSET]), _NO_WAITING)
        except OSError:  # it would wait, or the file system cannot tell
            return False
    return True


# Reading the bytes of chunks into memory, if compiled threads do not read them themselves.

_Requested = tuple[ByteStore, NDArray[np.intp], object]
"""A store, chunks whose bytes it returns together, and the owner of their requests."""

_Damage = Callable[[int, int], FormatError]
"""The error for a failure, a code of the kernels, and the chunk that fails."""

Arrived = tuple[NDArray[np.intp], NDArray[np.int64], Sequence[object]]


def chunks_as_they_arrive(
    chunks: NDArray[np.int64],
    stores: Sequence[ByteStore],
    decoded_bytes: NDArray[np.int64],
    damage: _Damage,
) -> Iterator[Arrived]:
    """Yield all chunks, each as soon as it can be decoded without waiting.

    Chunks that threads read themselves come first, chunks of stores as they arrive.

    Parameters
    ----------
    chunks
        A table of the kernels. Chunks with the flag `IN_MEMORY` have the number of their file in
        place of a descriptor.
    stores
        The byte store of each array.
    decoded_bytes
        Decompressed size of a chunk of each array in bytes, int64.
    damage
        Returns the error for an incomplete chunk.

    Yields
    ------
    Row numbers in the table, shape (n,); these rows, with addresses in place of offsets for chunks
    in memory; and objects that own this memory.

    Raises
    ------
    FormatError
        A file ends before the end of a chunk, or has the wrong size.
    """
    is_requested = are_requested(chunks)
    if not is_requested.any():
        yield np.arange(len(chunks)), chunks, ()
        return
    pending, later = dict[Future[None], list[_Requested]](), list[_Requested]()
    for store, rows in _by_store(chunks, stores):
        _check_own_files(chunks, rows, store, decoded_bytes, damage)
        arrivals = store.arrivals(*_ranges(chunks, rows))
        if arrivals is None:
            later.append((store, rows, None))
        else:
            for each in arrivals:
                together = pending.setdefault(each.is_here, [])
                together.append((store, rows[each.ranges], each.owner))
    at_hand = np.flatnonzero(~is_requested)
    if at_hand.size:
        yield at_hand, chunks[at_hand], ()
    if later:
        yield _read(chunks, later, damage)
    while pending:
        arrived = wait(pending, LOOK_UP_SECONDS, FIRST_COMPLETED).done
        if not arrived and is_cancelled():
            arrived = set(pending)  # the store raises the error
        if arrived:
            yield _read(chunks, [own for each in arrived for own in pending.pop(each)], damage)


def begin_requests(chunks: NDArray[np.int64], stores: Sequence[ByteStore]) -> list[object]:
    """Start the requests of `chunks_as_they_arrive`; return the objects that keep them alive.

    Parameters
    ----------
    chunks, stores
        See `chunks_as_they_arrive`.
    """
    begun = [store.expect(*_ranges(chunks, rows)) for store, rows in _by_store(chunks, stores)]
    return [each for each in begun if each is not None]


def are_requested(chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which chunks have bytes that a store reads into memory."""
    flags = chunks[:, fields.FLAGS]
    others = fields.AT_HAND | fields.ABSENT | fields.LOST
    are_requested: NDArray[np.bool_] = flags & (fields.IN_MEMORY | others) == fields.IN_MEMORY
    return are_requested


def _by_store(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore]
) -> Iterator[tuple[ByteStore, NDArray[np.intp]]]:
    """Iterate over stores and their chunks, all of one store together."""
    distinct = {id(store): store for store in stores}
    numbers = {each: number for number, each in enumerate(distinct)}
    number_of_array = np.array([numbers[id(store)] for store in stores], np.intp)
    requested = np.flatnonzero(are_requested(chunks))
    number_of_chunk = number_of_array[chunks[requested, fields.ARRAY]]
    for number, store in enumerate(distinct.values()):
        rows = requested[number_of_chunk == number]
        if rows.size:
            yield store, rows


def _ranges(
    chunks: NDArray[np.int64], rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return file, first byte and size of each chunk."""
    table = np.ascontiguousarray(chunks[rows][:, [fields.FD, fields.OFFSET, fields.SIZE]].T)
    return table[0], table[1], table[2]


def _read(chunks: NDArray[np.int64], arrived: Sequence[_Requested], damage: _Damage) -> Arrived:
    """Return chunks whose bytes have arrived, with the addresses of the bytes."""
    rows = np.concatenate([own for _, own, _ in arrived])
    found, owners = chunks[rows], list[object]()
    contents = (
        content for store, own, _ in arrived for content in store.read_ranges(*_ranges(chunks, own))
    )
    for chunk, row, content in zip(found, rows.tolist(), contents, strict=True):
        if content is None:
            chunk[fields.FLAGS] |= fields.LOST
            continue
        stored, expected = np.frombuffer(content, np.uint8), int(chunk[fields.SIZE])
        if stored.size > expected:
            raise ValueError(f"{stored.size} bytes were read, but {expected} expected")
        if stored.size < expected and not chunk[fields.FLAGS] & fields.WHOLE_FILE:
            raise damage(fields.TRUNCATED, row)
        owners.append(stored)
        chunk[fields.OFFSET], chunk[fields.SIZE] = stored.ctypes.data, stored.size
    return rows, found, owners


def _check_own_files(
    chunks: NDArray[np.int64],
    rows: NDArray[np.intp],
    store: ByteStore,
    decoded_bytes: NDArray[np.int64],
    damage: _Damage,
) -> None:
    """Check that files that contain one uncompressed chunk have its size."""
    alone = rows[(chunks[rows, fields.FLAGS] & fields.OWN_FILE) != 0]
    sizes = store.sizes(np.ascontiguousarray(chunks[alone, fields.FD]))
    wrong = alone[(sizes >= 0) & (sizes != decoded_bytes[chunks[alone, fields.ARRAY]])]
    if wrong.size:
        raise damage(fields.WRONG_SIZE, int(wrong[0]))
