"""What CSR and dense h5ad sources share: annotations, and words for damage."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray, hdf5_array
from cellfeed._errors import CellfeedError, FormatError
from cellfeed._runs import Runs
from cellfeed._sources import _h5ad_annotations as annotations
from cellfeed._sources._h5file import H5File

__all__ = ["H5adSource", "damage_named", "native"]


class H5adSource:
    """Base of the h5ad sources: one matrix element of one file, and its annotations."""

    def __init__(self, file: H5File, element: str) -> None:
        self._file = file
        self._element = element
        self._chunked_arrays: dict[str, ChunkedArray | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chunked_arrays": {}}

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def _stored(self) -> h5py.Group | h5py.Dataset:
        return self._file()[self._element]

    def var_names(self) -> NDArray[np.object_]:
        """Return the gene names, str, shape (n_vars,)."""
        with self._damage_named("var"):
            return annotations.read_var_names(self._file())

    def obs_names(self) -> tuple[str, ...]:
        """Return the names of the obs columns."""
        with self._damage_named("obs"):
            return annotations.obs_names(self._file())

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read some obs columns, and nothing else."""
        with self._damage_named("obs"):
            return annotations.read_obs(self._file(), columns)

    def _chunked_array(self, name: str) -> ChunkedArray | None:
        """Return an array of the file as chunks; the chunk table is read once."""
        if name not in self._chunked_arrays:
            with self._damage_named(name):
                self._chunked_arrays[name] = hdf5_array(
                    self._file()[name], name, self._file.descriptors, self._file.paths
                )
        return self._chunked_arrays[name]

    @contextmanager
    def _damage_named(self, element: str, runs: Runs | None = None) -> Iterator[None]:
        with damage_named(self.path, element, runs):
            yield

    def _inconsistent(self, what: str) -> FormatError:
        msg = f"{self.path}: `{self._element}` is inconsistent: {what}; write the file anew"
        return FormatError(msg)


@contextmanager
def damage_named(path: Path, element: str, runs: Runs | None = None) -> Iterator[None]:
    """Turn what h5py and anndata raise on damaged bytes into one line that says where they are."""
    try:
        yield
    except (CellfeedError, MemoryError):
        raise
    except Exception as error:  # they have no common base, nor a list of what they raise
        rows = "" if runs is None or not len(runs) else f", rows {runs[0, 0]} to {runs[-1, 1]}"
        msg = (
            f"{path}: `{element}`{rows} cannot be read ({error}); "
            "the file is damaged, copy or download it again"
        )
        raise FormatError(msg) from error


def native(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return ``dtype`` in the machine's byte order."""
    return dtype.newbyteorder("=")
