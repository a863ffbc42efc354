"""Arrays in memory, as chunks that need no reading."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, Location
from cellfeed._chunks import ChunkedArray, Pieces, pieced_array

__all__ = ["array_in_memory"]


class _Memory(ByteStore):
    """One array."""

    def __init__(self, location: Location, values: NDArray[Any]) -> None:
        self._location, self._values = location, values

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location for messages."""
        return self._location

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the array in bytes."""
        return np.full(len(files), self._values.nbytes, np.int64)

    def read_ranges(
        self,
        files: NDArray[np.int64],  # noqa: ARG002 - there is one
        offsets: NDArray[np.int64],
        sizes: NDArray[np.int64],
    ) -> list[NDArray[np.uint8]]:
        """Return views of the array."""
        content = self._values.reshape(-1).view(np.uint8)
        stops = offsets + sizes
        ranges = zip(offsets.tolist(), stops.tolist(), strict=True)
        return [content[first:stop] for first, stop in ranges]


def array_in_memory(location: Location, name: str, values: NDArray[Any]) -> ChunkedArray:
    """Return an array as chunks, which are copied directly from its memory.

    Parameters
    ----------
    location, name
        For messages.
    values
        Of native dtype, in C order; a two-dimensional array is flattened.
    """
    size = math.prod(values.shape)
    pieces = Pieces(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([size]), values.itemsize)
    return pieced_array(name, pieces, values.dtype, _Memory(location, values))
