"""Interface to the files or objects from which the bytes of chunks are read."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes._identity import LastingIdentity
from cellfeed._bytes._location import Location

__all__ = ["Arrival", "ByteStore", "UnreadableRangeError"]


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """Byte ranges that arrive together.

    Parameters
    ----------
    ranges
        Indices of the ranges among the requested ones, shape (n,).
    is_here
        A future that is done once `ByteStore.read_ranges` returns or raises without waiting.
    owner
        An object that keeps the requests and the received bytes alive.
    """

    ranges: NDArray[np.intp]
    is_here: Future[None]
    owner: object


class UnreadableRangeError(OSError):
    """The system cannot read a range of an existing file; ``range`` is the index of the range."""

    def __init__(self, range_: int) -> None:
        super().__init__(f"range {range_} cannot be read")
        self.range = range_


class ByteStore(ABC):
    """The files or objects of an array, numbered from 0; one for HDF5, many for zarr.

    Derive from it to decode chunks whose bytes are not in local files. Override either `handles`,
    for files that compiled threads read themselves, or `read_ranges`, which returns bytes in
    memory, from which chunks are decoded without a copy.
    """

    @abstractmethod
    def location_of(self, file: int) -> Location:
        """Return the location of a file, for messages."""

    @abstractmethod
    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sizes of files in bytes, -1 for missing files, int64, shape (n,)."""

    def identity(self) -> LastingIdentity | None:
        """Return an identifier that changes when the files are replaced.

        Tables that locate chunks are cached under it between openings; if it is None, they are not
        cached.
        """
        return None

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object] | None:  # noqa: ARG002 - for subclasses
        """Return handles with which compiled threads read files; None to use `read_ranges`.

        Parameters
        ----------
        files
            Numbers of files, int64, shape (n,).

        Returns
        -------
        For each file, its descriptor, or minus the address of its null-terminated path; and an
        owner object, which is kept alive while the files are read.

        Raises
        ------
        FormatError
            A file was replaced since the array was opened.
        """
        return None

    def expect(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> object | None:
        """Start requesting byte ranges that `read_ranges` will read, without waiting.

        This is called from another thread than `read_ranges`, for several fetches before the first
        of them is read.

        Parameters
        ----------
        files, offsets, sizes
            All ranges of one fetch, in the order in which its chunks are decoded; see
            `read_ranges`. These ranges, or parts of them, are read later in any order, possibly
            twice or never.

        Returns
        -------
        An object that keeps the requests alive. When it is dropped, bytes that have not been read
        are discarded. None if nothing is requested ahead.
        """
        return None

    def arrivals(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> Sequence[Arrival] | None:
        """Return the arrivals of byte ranges, so that early ones are decoded while others arrive.

        This also starts requesting ranges that were not expected, without waiting.

        Parameters
        ----------
        files, offsets, sizes
            See `read_ranges`.

        Returns
        -------
        Arrivals that contain each range once; None to call `read_ranges` once for all ranges.
        """
        return None

    def read_ranges(
        self,
        files: NDArray[np.int64],
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> Sequence[bytes | memoryview | NDArray[np.uint8] | None]:
        """Read byte ranges of files.

        Parameters
        ----------
        files, offsets, sizes
            Number of the file, first byte and number of bytes of each range, int64, shape (n,).

        Returns
        -------
        For each range its bytes, in memory that does not change while they are referenced, such as
        `bytes` or a slice of a larger `memoryview`; fewer bytes if the file ends before the range,
        and None if there is no such file.

        Raises
        ------
        FormatError
            A file was replaced since the array was opened, or cannot be read.
        UnreadableRangeError
            A range cannot be read; the caller's message locates it.
        """
        raise NotImplementedError(f"{type(self).__name__} must override `handles` or `read_ranges`")
