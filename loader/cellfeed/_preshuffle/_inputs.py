"""The input files: what tells that they are the same as before, and how they are opened."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from numpy.typing import NDArray

from cellfeed._bytes import identity
from cellfeed._errors import MismatchError, PathError
from cellfeed._preshuffle._row_reading import pick, runs_with_gaps

__all__ = ["InputFile", "file_labels", "opened", "stored_elements", "stored_row_lengths"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """A file, and what changes when it does.

    Parameters
    ----------
    path
        Absolute.
    n_bytes
        Its size; of a folder (a zarr store) that of its metadata.
    modified_ns
        When it was last written to, in nanoseconds; of a folder, its metadata.
    """

    path: str
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path) -> "InputFile":
        """Describe a file as it is now.

        Raises
        ------
        PathError
            There is none.
        """
        absolute = path.absolute()
        stamped = absolute
        if absolute.is_dir():  # zarr 3 or 2
            stamped = absolute / ("zarr.json" if (absolute / "zarr.json").exists() else ".zgroup")
        try:
            n_bytes, modified_ns = identity(stamped.stat())
        except OSError as error:
            msg = f"{path}: no such file; give a path that every worker can read"
            raise PathError(msg) from error
        return cls(path=str(absolute), n_bytes=n_bytes, modified_ns=modified_ns)

    def check(self) -> None:
        """Check that the file is what it was.

        Raises
        ------
        PathError
            There is no such file.
        MismatchError
            It has changed.
        """
        if InputFile.of(Path(self.path)) != self:
            msg = (
                f"{self.path}: has changed since its cells began to be shuffled; "
                "remove the output, or choose another, and begin anew"
            )
            raise MismatchError(msg)


@contextmanager
def opened(path: str) -> Iterator[Any]:
    """Open an AnnData file or store for reading, and close it."""
    if Path(path).is_dir():
        yield zarr.open_group(path, mode="r")
        return
    with h5py.File(path, "r") as file:
        yield file


def stored_elements(path: str, element: str) -> int:
    """Return how many elements a CSR matrix stores."""
    with opened(path) as file:
        return int(file[element]["data"].shape[0])


def stored_row_lengths(path: str, element: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many elements each of some ascending rows of a CSR matrix stores."""
    if not rows.size:
        return rows
    runs = runs_with_gaps(rows)
    runs[:, 1] += 1  # the end of the last row
    with opened(path) as file:
        pointer = file[element]["indptr"]
        ends = np.unique(np.concatenate([rows, rows + 1]))
        values = pick(pointer, ends, runs).astype(np.int64)
    return values[np.searchsorted(ends, rows + 1)] - values[np.searchsorted(ends, rows)]


def file_labels(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return short names of files: without the folder, if that tells them apart.

    Examples
    --------
    >>> file_labels(("/data/a.h5ad", "/data/b.h5ad"))
    ('a.h5ad', 'b.h5ad')
    >>> file_labels(("/data/1/a.h5ad", "/data/2/a.h5ad"))
    ('/data/1/a.h5ad', '/data/2/a.h5ad')
    """
    names = tuple(Path(path).name for path in paths)
    return names if len(set(names)) == len(names) else paths
