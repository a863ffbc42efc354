"""Memory that a worker process lends to the process that uses its minibatches."""

import errno
import os
from bisect import bisect_right
from dataclasses import dataclass

from cellfeed._buffers._pool import Buffer, BufferPool, Bytes, locked, sizes_replaced
from cellfeed._buffers._segment import MOST_PIECES, PAGE, Segment
from cellfeed._errors import ParameterError

__all__ = ["Piece", "SharedPool"]

_SEGMENT_BYTES = 1 << 25
_SHARE_OF_ALL = 4  # so that few descriptors are taken, however much memory is


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of a segment.

    Parameters
    ----------
    segment, index
        Which it is.
    """

    segment: Segment
    index: int

    @property
    def is_lent(self) -> bool:
        """Whether the other process has it."""
        return bool(self.segment.is_lent[self.index])

    @property
    def memory(self) -> Bytes:
        """What it consists of."""
        return self.segment.piece(self.index)


class SharedPool(BufferPool):
    """Hands out pieces of shared memory, and takes each back when both processes have let it go.

    A piece is used again once no array over it is left here, and its mark `Segment.is_lent` is
    not set, which the process that it was lent to clears. Memory that is taken in place of some
    that is free, since that is too small, makes the other return to the system.
    """

    def __init__(self) -> None:
        super().__init__()
        self._of_forks = BufferPool()
        self.unsent = dict[int, int]()
        """Descriptors of segments that the other process does not have yet, by number."""
        self._at = dict[int, Piece]()  # by address
        self._addresses = list[int]()  # ascending
        self._lent = list[Piece]()
        self._kept = dict[int, list[Piece]]()  # free, by size
        self._empty = dict[int, list[Piece]]()  # free, and without memory
        self.n_segments = 0
        self._n_bytes = 0

    def acquire(self, n_bytes: int) -> Buffer:
        """See `BufferPool`; a fork of the process, which shares its memory too, gets other."""
        if self._process != os.getpid():
            return self._of_forks.acquire(n_bytes)
        return super().acquire(n_bytes)

    def find(self, address: int) -> tuple[Piece, int] | None:
        """Return the piece that has an address, and how many bytes from its start that is."""
        with locked():
            k = bisect_right(self._addresses, address) - 1
            if k < 0:
                return None
            start = self._addresses[k]
            piece = self._at[start]
        offset = address - start
        return (piece, offset) if offset < piece.segment.piece_bytes else None

    def _collect(self) -> None:
        while self._returned:
            lease = self._returned.popleft()
            self._leased.discard(lease)
            piece = self._at[lease.memory.ctypes.data]
            if piece.is_lent:
                self._lent.append(piece)
            else:
                self._kept.setdefault(lease.memory.size, []).append(piece)

    def _take(self, capacity: int) -> Bytes:
        size = -(-capacity // PAGE) * PAGE
        piece = self._fitting(self._kept, size)
        if piece is None:
            self._take_back()
            piece = self._fitting(self._kept, size)
        if piece is None:
            self._discard_for(size)
            piece = self._fitting(self._empty, size) or self._new(size)
        return piece.memory

    def _take_back(self) -> None:
        """Note what the other process has let go."""
        lent, self._lent = self._lent, []
        for piece in lent:
            if piece.is_lent:
                self._lent.append(piece)
            else:
                self._kept.setdefault(piece.segment.piece_bytes, []).append(piece)

    @staticmethod
    def _fitting(free: dict[int, list[Piece]], size: int) -> Piece | None:
        fitting = min((each for each, some in free.items() if some and each >= size), default=0)
        return free[fitting].pop() if size <= fitting <= 2 * size else None

    def _discard_for(self, n_bytes: int) -> None:
        """Give memory back to the system that new memory takes the place of."""
        for size in sizes_replaced(self._kept, n_bytes):
            piece = self._kept[size].pop()
            piece.segment.discard(piece.index)
            self._empty.setdefault(size, []).append(piece)

    def _new(self, size: int) -> Piece:
        """Return a piece of a new segment; its others are empty."""
        wanted = max(_SEGMENT_BYTES, self._n_bytes // _SHARE_OF_ALL)
        n_pieces = max(1, min(MOST_PIECES, wanted // size))
        try:
            segment, descriptor = Segment.create(self.n_segments, size, n_pieces)
        except OSError as error:
            if error.errno == errno.EMFILE:
                msg = (
                    f"shared memory for rows cannot be opened ({error}); allow more open files, "
                    "for example with `ulimit -n 65536`, or use num_workers=0"
                )
                raise ParameterError(msg) from error
            msg = (
                f"cannot allocate {size:,} bytes of shared memory for rows ({error}); read fewer "
                "at a time, for example with a lower `fetch_factor`, or use num_workers=0"
            )
            raise ParameterError(msg) from error
        self.unsent[segment.number] = descriptor
        self.n_segments += 1
        self._n_bytes += size * n_pieces
        pieces = [Piece(segment, index) for index in range(n_pieces)]
        self._at.update({segment.address_of(each.index): each for each in pieces})
        self._addresses = sorted(self._at)
        self._empty.setdefault(size, []).extend(reversed(pieces[1:]))
        return pieces[0]
