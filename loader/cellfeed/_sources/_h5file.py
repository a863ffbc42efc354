"""An HDF5 file that is opened on first use in each process."""

import os
from pathlib import Path
from typing import Any

import h5py

from cellfeed._errors import FormatError, PathError

__all__ = ["H5File"]


class H5File:
    """A read-only HDF5 file, opened lazily, never shared between processes.

    HDF5 handles do not survive a fork, and cannot be pickled. The handle is therefore kept
    beside the number of the process that opened it, and left out of a pickle.

    Parameters
    ----------
    path
        The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: h5py.File | None = None
        self._process = -1

    def __call__(self) -> h5py.File:
        """Return the open file.

        Raises
        ------
        PathError
            There is no such file, or it may not be read.
        FormatError
            The file is truncated, or is not HDF5.
        """
        if self._file is None or self._process != os.getpid():
            self._file, self._process = _open(self.path), os.getpid()
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None, "_process": -1}


def _open(path: Path) -> h5py.File:
    if not path.is_file():
        msg = f"{path}: no such file"
        raise PathError(msg)
    try:
        # HDF5's default locking: another would clash with a handle that the user has open.
        return h5py.File(path, "r")
    except PermissionError as error:
        msg = f"{path}: may not be read; check its permissions"
        raise PathError(msg) from error
    except OSError as error:
        if "truncated file" in str(error):
            msg = f"{path}: the file is truncated; copy or download it again"
        elif not h5py.is_hdf5(path):
            msg = f"{path}: not an HDF5 file, so not .h5ad; give the AnnData files themselves"
        else:
            msg = f"{path}: cannot be opened as HDF5 ({error}); copy or download it again"
        raise FormatError(msg) from error
