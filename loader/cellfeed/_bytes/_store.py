"""The seam for bytes: what chunks ask of the files or objects that they lie in."""

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
        Which of those that were asked about, shape (n,).
    is_here
        Done once `ByteStore.read_ranges` need not wait for them, whatever it finds.
    owner
        What keeps them coming, and here.
    """

    ranges: NDArray[np.intp]
    is_here: Future[None]
    owner: object


class UnreadableRangeError(OSError):
    """The system cannot read a range of a file that is there; ``range`` says which of several."""

    def __init__(self, range_: int) -> None:
        super().__init__(f"range {range_} cannot be read")
        self.range = range_


class ByteStore(ABC):
    """The files or objects that an array lies in, numbered from 0; one of HDF5, many of zarr.

    Derive from it to decode chunks whose bytes are elsewhere than in files of this machine. Bytes
    come either by `handles`, from files that compiled threads read themselves, or by `read_ranges`,
    into memory, where the chunks are decoded without being copied.
    """

    @abstractmethod
    def location_of(self, file: int) -> Location:
        """Return where a file is, for messages."""

    @abstractmethod
    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes of files, -1 for those that are not there, int64, shape (n,)."""

    def identity(self) -> LastingIdentity | None:
        """Return what tells these files from others that are put in their place.

        Tables that say where chunks lie are kept by it from one opening to the next; not at all
        if it is None.
        """
        return None

    def handles(self, files: NDArray[np.int64]) -> tuple[NDArray[np.int64], object] | None:  # noqa: ARG002 - for subclasses
        """Return how compiled threads open files; None if they cannot, but `read_ranges` can.

        Parameters
        ----------
        files
            Numbers of files, int64, shape (n,).

        Returns
        -------
        For each the descriptor, or minus the address of its path, which ends with a zero; and
        the owner of these, which lives while they are read.

        Raises
        ------
        FormatError
            A file is not the one that was there when the array was opened.
        """
        return None

    def expect(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> object | None:
        """Begin to bring byte ranges that `read_ranges` will be asked for, and do not wait.

        Called from another thread than `read_ranges`, for several fetches before the first of
        them is read.

        Parameters
        ----------
        files, offsets, sizes
            As of `read_ranges`: all ranges of one fetch, in the order in which its chunks are
            decoded. They, or parts of them, are then read in any order, perhaps twice or never.

        Returns
        -------
        What keeps them coming. When it is let go, what nobody has read by then is given up. None
        if nothing is brought before it is read.
        """
        return None

    def arrivals(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - for subclasses
        offsets: NDArray[np.int64],  # noqa: ARG002
        sizes: NDArray[np.int64],  # noqa: ARG002
    ) -> Sequence[Arrival] | None:
        """Return how byte ranges arrive, so that the first are decoded while others are awaited.

        It begins to bring those that were not expected, and does not wait.

        Parameters
        ----------
        files, offsets, sizes
            As of `read_ranges`.

        Returns
        -------
        Arrivals that have each range once; None if `read_ranges` is to be asked for all at once.
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
        For each range its bytes, in memory that stays as it is while they are referred to, such as
        `bytes` or a slice of a larger `memoryview`; fewer where its file ends before it does, and
        None where there is no such file.

        Raises
        ------
        FormatError
            A file is not the one that was there when the array was opened, or cannot be read.
        UnreadableRangeError
            A range cannot be read, of which a message says where it is.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither `handles` nor `read_ranges`")
