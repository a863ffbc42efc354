"""Estimating whether bytes are already in the page cache, so that readahead is not needed."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import LOOK_UP_SECONDS, ByteStore, UnreadableRangeError, is_awaited
from cellfeed._decode import _kernels as kernels
from cellfeed._decode._decoder import Decoder
from cellfeed._decode._kernels import _fields as fields
from cellfeed._decode._placing import out_of_bounds, scratch_bytes, selecting_row

_FEWEST = 2048  # chunks; to tell the system of fewer takes less than 3 ms
_SAMPLES = 64
_NO_WAITING = getattr(os, "RWF_NOWAIT", 0)  # of Linux


def seem_to_be_in_memory(chunks: NDArray[Any]) -> bool:
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
    return bool((chunks[:, fields.FLAGS] & fields.IN_MEMORY).any())


def brought_bytes(chunks: NDArray[np.int64]) -> int:
    """Return the number of bytes requested from stores; an upper bound for files of one chunk."""
    return int(chunks[:, fields.SIZE][_wanted(chunks)].sum())


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
        raise ShortRangeError(int(arrived.rows[error.range]), fields.UNREADABLE) from error


def _wanted(chunks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which chunks must be read by stores."""
    flags = chunks[:, fields.FLAGS]
    wanted: NDArray[np.bool_] = (flags & fields.IN_MEMORY) != 0
    wanted &= (flags & (fields.ABSENT | fields.LOST)) == 0
    return wanted


def _by_store(
    chunks: NDArray[np.int64], stores: Sequence[ByteStore]
) -> Iterator[tuple[ByteStore, NDArray[np.intp]]]:
    """Iterate over stores and their chunks, all of one store together."""
    distinct = {id(store): store for store in stores}
    numbers = {each: number for number, each in enumerate(distinct)}
    number_of_array = np.array([numbers[id(store)] for store in stores], np.intp)
    wanted = np.flatnonzero(_wanted(chunks))
    number_of_chunk = number_of_array[chunks[wanted, fields.ARRAY]]
    for number, store in enumerate(distinct.values()):
        rows = wanted[number_of_chunk == number]
        if rows.size:
            yield store, rows


def _ranges(
    chunks: NDArray[np.int64], rows: NDArray[np.intp]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return file, first byte and size of each chunk."""
    table = np.ascontiguousarray(chunks[rows][:, [fields.FD, fields.OFFSET, fields.SIZE]].T)
    return table[0], table[1], table[2]


def _put(
    chunk: NDArray[np.int64],
    row: int,
    buffer: bytes | memoryview | NDArray[np.uint8] | None,
    owners: list[object],
) -> None:
    """Write the address of a chunk's bytes to its row of the table."""
    if buffer is None:
        chunk[fields.FLAGS] |= fields.LOST
        return
    stored = np.frombuffer(buffer, np.uint8)
    if stored.size > chunk[fields.SIZE]:
        raise ValueError(f"{stored.size} bytes were read, but {chunk[fields.SIZE]} expected")
    if stored.size < chunk[fields.SIZE] and not chunk[fields.FLAGS] & fields.WHOLE_FILE:
        raise ShortRangeError(row, fields.TRUNCATED)
    owners.append(stored)
    chunk[fields.OFFSET], chunk[fields.SIZE] = stored.ctypes.data, stored.size


def _check_own_files(
    chunks: NDArray[np.int64],
    rows: NDArray[np.intp],
    store: ByteStore,
    expected: NDArray[np.int64],
) -> None:
    """Check that files that contain one uncompressed chunk have its size."""
    alone = rows[(chunks[rows, fields.FLAGS] & fields.OWN_FILE) != 0]
    sizes = store.sizes(np.ascontiguousarray(chunks[alone, fields.FD]))
    wrong = alone[(sizes >= 0) & (sizes != expected[chunks[alone, fields.ARRAY]])]
    if wrong.size:
        raise ShortRangeError(int(wrong[0]), fields.WRONG_SIZE)


# Selecting elements of sparse rows, after their column indices have been read.


@dataclass(frozen=True, slots=True, eq=False)
class KeptElements:
    """The kept elements of sparse rows.

    Parameters
    ----------
    starts
        Start of each row in the arrays below, int64, shape (n_rows + 1,).
    columns
        Columns in the collection, ascending in each row, int32, shape (n_kept,).
    entries
        For each kept element, in stored order, its position in the stored row in the upper 32 bits,
        and its slot in the resulting row in the lower 32 bits, int64, shape (n_kept,).
    ascending
        Whether the columns of each row are distinct.
    """

    starts: NDArray[np.int64]
    columns: NDArray[np.int32]
    entries: NDArray[np.int64]
    ascending: bool

    def __getitem__(self, rows: slice) -> "KeptElements":
        starts = self.starts[rows.start : rows.stop + 1]
        own = slice(starts[0], starts[-1])
        return KeptElements(
            starts - starts[0], self.columns[own], self.entries[own], self.ascending
        )

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Number of kept elements in each row, int64, shape (n_rows,)."""
        return np.diff(self.starts)


def gathered(
    segments: NDArray[np.int64],
    kept: NDArray[np.int64],
    lengths: NDArray[np.int64],
    decoder: Decoder,
) -> KeptElements:
    """Return the kept elements of rows, from the segments that the kernels have filled.

    Parameters
    ----------
    segments
        Segments of all rows, row by row.
    kept
        The list to which they refer.
    lengths
        Number of stored elements in each row, int64, shape (n_rows,).
    decoder
        The decoder.
    """
    row_firsts = np.flatnonzero(segments[:, fields.WITHIN] == 0)
    n_segments = np.diff(row_firsts, append=len(segments))
    rows = np.repeat(np.flatnonzero(lengths), n_segments)
    counts = np.bincount(rows, segments[:, fields.COUNT], minlength=lengths.size)
    starts = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
    memory = decoder.pool.acquire(12 * kept.size)
    entries = memory.array(np.dtype(np.int64), kept.size)
    columns = memory.array(np.dtype(np.int32), kept.size, start=entries.nbytes)

    def gather(first: int, stop: int) -> bool:
        own = slice(first, stop)
        return bool(kernels.gather(segments[own], rows[own], starts, kept, columns, entries))

    if decoder.threads is None or not row_firsts.size:
        ascending = gather(0, len(segments))
    else:
        shares = np.linspace(0, row_firsts.size, decoder.n_threads, endpoint=False).astype(int)
        bounds = [*np.unique(row_firsts[shares]).tolist(), len(segments)]
        ascending = all(list(decoder.threads.map(gather, bounds[:-1], bounds[1:])))
    return KeptElements(starts, columns, entries, ascending)


def kept_of(
    indices: NDArray[Any], lengths: NDArray[np.int64], column_map: NDArray[np.int32]
) -> KeptElements:
    """Return the kept elements of rows whose column indices are in memory.

    Parameters
    ----------
    indices, lengths
        Concatenated column indices of all rows, and the number in each row.
    column_map
        New index of each column, -1 to leave it out, int32, shape (n_columns,).

    Raises
    ------
    ValueError
        A column index is out of bounds.
    """
    indices = np.ascontiguousarray(indices, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    _, _, segments, _ = kernels.plan_flat(
        starts, lengths, np.zeros_like(starts), max(1, indices.size), 0
    )
    kept = np.empty(indices.size, np.int64)
    report = np.zeros(fields.N_REPORTS, np.int64)
    report[fields.KEPT] = kept.ctypes.data
    array, tables = selecting_row(indices.dtype, column_map)
    array[fields.DECODED_BYTES] = indices.nbytes
    scratch = np.empty(scratch_bytes(array[None]), np.uint8)
    kernels.place(indices.ctypes.data, segments, array, report, scratch.ctypes.data)
    del tables  # whose addresses were used by now
    if report[fields.FAILURE]:
        raise ValueError(out_of_bounds(column_map.size))
    return gathered(segments, kept[: report[fields.N_KEPT]], lengths, Decoder())
