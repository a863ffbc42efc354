"""HDF5 filters from hdf5plugin, such as ``hdf5plugin.FILTERS["zstd"]``.

anndata applies them to all arrays that it compresses, including names and columns of obs, which
only HDF5 can read. hdf5plugin registers its filters when it is imported, in each process.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import h5py
from h5py import h5z

__all__ = ["lacking_filter"]

with contextlib.suppress(ImportError):
    import hdf5plugin  # noqa: F401 - registers its filters

_REMEDY = "install it with `pip install hdf5plugin`"
_OTHER_REMEDY = "write the file with another compression, such as gzip"


def lacking_filter(path: Path | None, element: str) -> str | None:
    """Return why HDF5 cannot decompress an element, and the remedy; None if it can.

    Parameters
    ----------
    path
        The file, or a zarr store, which has no such filters; None for a URL.
    element
        Path of a dataset or a group in it.
    """
    # Who asks has an error at hand already, which is told if the file cannot be opened either.
    with contextlib.suppress(Exception):
        if path is not None and path.is_file():
            with h5py.File(path, "r") as file:
                return _lacking_filter(file[element])
    return None


def _lacking_filter(element: Any) -> str | None:
    if isinstance(element, h5py.Group):
        return next(filter(None, map(_lacking_filter, element.values())), None)
    created = element.id.get_create_plist()
    for number, _, _, name in (created.get_filter(k) for k in range(created.get_nfilters())):
        if not h5z.filter_avail(number):
            words = name.decode(errors="replace").split(";")[0] or "a filter"
            if sys.modules.get("hdf5plugin") is None:
                return f"{words} ({number}), which HDF5 only reads with hdf5plugin; {_REMEDY}"
            return (
                f"{words} ({number}), which neither HDF5 nor hdf5plugin supports; {_OTHER_REMEDY}"
            )
    return None
