"""The interface to file formats; h5ad and zarr differ only in its implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from cellfeed._bytes import Location
from cellfeed._chunks import ChunkedArray, SlowRead
from cellfeed._lazy import pd
from cellfeed._tables import KeptTables

__all__ = ["AnnDataFile"]


class AnnDataFile(Protocol):
    """A stored AnnData object, opened lazily in each process, and never for writing.

    h5py and zarr have groups and arrays with the same interface, so these are not wrapped.
    """

    library: str
    """The library that reads arrays that cellfeed does not decode: ``"h5py"`` or ``"zarr"``."""

    @property
    def location(self) -> Location:
        """The file, folder or URL."""
        ...

    def __call__(self) -> Any:
        """Return the group that contains ``X``, ``obs`` and ``var``."""
        ...

    def watch(self, names: Sequence[str]) -> None:
        """Record where these arrays are stored, so that changes are noticed.

        Raises
        ------
        ValueError
            An array is impossible: its chunks take more memory than it could need.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that the storage has not changed since it was first opened in any process.

        Raises
        ------
        FormatError
            It was replaced or written to.
        """
        ...

    def bring(self, names: Sequence[str]) -> None:
        """Prefetch arrays and tables that are about to be read completely, if worthwhile."""
        ...

    def stored(self, name: str) -> Any:
        """Return an array or group; other files that it lies in, or refers to, are watched.

        Raises
        ------
        FormatError
            It refers to a file that is missing, or that cellfeed cannot follow.
        KeyError
            There is no such element.
        """
        ...

    def read(self, name: str) -> Any:
        """Return an element as anndata reads it."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Return the compressed size of an array's elements in storage, in bytes."""
        ...

    def codec(self, name: str) -> str:
        """Return the compression of an array, as text."""
        ...

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only the format's own library can read an array; None if cellfeed can."""
        ...

    def n_lost(self, name: str) -> int:
        """Return how many chunks of an array, or their files, are missing.

        Libraries read their elements as zeros, which may be correct, since chunks of zeros need not
        be written.
        """
        ...

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return a chunked array; None if `slow_read` gives a reason.

        Parameters
        ----------
        name
            Path of the array in the group.
        lost_is_zero
            See `ChunkedArray`.
        """
        ...

    def kept_tables(self, name: str) -> KeptTables:
        """Return the cache for tables of an array between openings."""
        ...

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a format that anndata no longer writes."""
        ...
