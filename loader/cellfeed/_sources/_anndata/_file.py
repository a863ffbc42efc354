"""What the matrix sources ask of a file format: h5ad and zarr differ in this, and in no more."""

from collections.abc import Sequence
from typing import Any, Protocol

import pandas as pd

from cellfeed._bytes import Location
from cellfeed._chunks import ChunkedArray, SlowRead
from cellfeed._tables import KeptTables

__all__ = ["AnnDataFile"]


class AnnDataFile(Protocol):
    """One AnnData object in storage, opened lazily in each process, and never for writing.

    h5py and zarr give groups and arrays of the same form, so what is found in them is not
    wrapped.
    """

    library: str
    """What reads arrays that are not decoded here: ``"h5py"`` or ``"zarr"``."""

    @property
    def location(self) -> Location:
        """The file, folder or URL."""
        ...

    def __call__(self) -> Any:
        """Return the group that holds ``X``, ``obs`` and ``var``."""
        ...

    def watch(self, names: Sequence[str]) -> None:
        """Remember where these arrays are stored, so that a change is noticed.

        Raises
        ------
        ValueError
            One of them cannot be: its chunks take more memory than it could need.
        """
        ...

    def check_unchanged(self) -> None:
        """Check that storage is still what was opened first, in any process.

        Raises
        ------
        FormatError
            It was replaced or written to.
        """
        ...

    def bring(self, names: Sequence[str]) -> None:
        """Bring arrays and tables that are about to be read as a whole, if that is worth it."""
        ...

    def array(self, name: str) -> Any:
        """Return an array, for reading slices of it."""
        ...

    def stored_bytes(self, name: str) -> int:
        """Return how many bytes the elements of an array take in storage, compressed."""
        ...

    def codec(self, name: str) -> str:
        """Return how an array is compressed, in words."""
        ...

    def slow_read(self, name: str) -> SlowRead | None:
        """Return why only the format's own library can read an array; None if chunks can be."""
        ...

    def n_lost(self, name: str) -> int:
        """Return how many chunks, or files of them, of an array are not there.

        Libraries take their elements to be zero, which they may be: a chunk of nothing but
        zeros need not be written.
        """
        ...

    def chunked_array(self, name: str, *, lost_is_zero: bool) -> ChunkedArray | None:
        """Return an array as chunks, None where `slow_read` gives a reason.

        Parameters
        ----------
        name
            Path of the array in the group.
        lost_is_zero
            See `ChunkedArray`.
        """
        ...

    def kept_tables(self, name: str) -> KeptTables:
        """Return where tables that are made of an array are kept from one opening to the next."""
        ...

    def read_old_frame(self, name: str) -> pd.DataFrame:
        """Read ``obs``, ``var`` or ``raw/var`` in a form that anndata no longer writes."""
        ...
