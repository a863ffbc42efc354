"""Matrices of 10x Genomics in HDF5. They are CSC with a column for each cell: CSR by cell.

Format: https://www.10xgenomics.com/support/software/cell-ranger/latest/analysis/outputs/cr-outputs-h5-matrices
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.extending import FormatError, ParameterError, pd
from cellfeed.sources import Storage, as_text
from cellfeed.sources.anndata import (
    FileSource,
    H5File,
    LocalH5File,
    RemoteH5File,
    StoredCsr,
    check_sizes,
    damage_named,
    frames,
    is_group,
    own_members,
)

_MATRIX = "matrix"  # the group since Cell Ranger 3; before, there was one for each genome
_BARCODES, _FEATURES = f"{_MATRIX}/barcodes", f"{_MATRIX}/features"
_ARRAYS = {"barcodes", "indptr"}  # by which a matrix of one genome is recognized
_WRITER = "Cell Ranger"
# Columns of var, as scanpy names them, and the arrays that hold them.
_COLUMNS = {"gene_ids": "id", "feature_types": "feature_type", "genome": "genome"}
_LIBRARY = "library"  # the obs column that files have


def _is_matrix(root: h5py.Group) -> bool:
    """Return whether a file has a matrix of 10x Genomics, of any version."""
    groups = {name: each for name, each in own_members(root).items() if is_group(each)}
    return "features" in groups.get(_MATRIX, ()) or any(
        each.keys() >= _ARRAYS for each in groups.values()
    )


class TenxCsr(StoredCsr):
    """The matrix of a file."""

    _writer = _WRITER

    def __init__(self, file: H5File) -> None:
        super().__init__(file, _MATRIX, f"{_FEATURES}/name", _BARCODES)
        self.var = "var"

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the features, str, shape (n_columns,)."""
        with self._damage_named(path := f"{_FEATURES}/name"):
            names = frames.read_names(self._file, path)
        return names if self.stored_columns is None else names[self.stored_columns >= 0]

    def of_features(self, modality: str, are_wanted: NDArray[np.bool_]) -> TenxCsr:
        """Return the matrix of some of its features, which shares its tables.

        Parameters
        ----------
        modality
            The name of these features.
        are_wanted
            Whether each feature is one of them, shape (n_columns,).
        """
        selected, n_columns = copy(self), int(np.count_nonzero(are_wanted))
        selected.var, selected.shape = f"mod/{modality}/var", (self.shape[0], n_columns)
        if n_columns < self.shape[1]:
            numbers = np.where(are_wanted, np.cumsum(are_wanted) - 1, -1)
            selected.stored_columns = numbers.astype(np.int32)
        return selected

    def _shape_of(self, group: Any) -> tuple[int, int]:
        shape = group["shape"]
        if shape.size != 2 or shape.dtype.kind not in "iu":  # noqa: PLR2004 - rows and columns
            what = f"has shape {shape.shape} and dtype {shape.dtype}"
            raise self._inconsistent(f"its `shape` is not two numbers, but {what}")
        n_features, n_cells = shape[()].ravel().tolist()
        return n_cells, n_features


class TenxSource(FileSource):
    """A feature-barcode matrix of 10x Genomics, as Cell Ranger and compatible programs write it.

    Pass it to `open_collection` in place of a path, to add annotations of cells; otherwise the path
    suffices. Cells are named by their barcodes, and features by their names, as
    `scanpy.read_10x_h5` does. Files are those of Cell Ranger 3 and later. The obs column
    ``library`` is what Cell Ranger calls the library of a cell, or the number of its GEM well where
    the file does not name libraries.

    Parameters
    ----------
    file
        The ``.h5`` file: a path, or a URL.
    obs
        Annotations of cells, a data frame indexed by barcode, whose columns become obs columns and
        stay in memory. Values are missing for cells that it lacks; rows of other cells are ignored.
    storage_options
        See `open_collection`.

    Attributes
    ----------
    elements
        ``"X"``, all features; and ``"mod/FEATURE_TYPE/X"`` for each type of features, such as
        ``"mod/Antibody Capture/X"``.

    Raises
    ------
    PathError
        There is no such file.
    FormatError
        It is not such a file, was written before Cell Ranger 3, or is damaged.
    ParameterError
        ``obs`` has a barcode twice, or none of the file.

    Examples
    --------
    >>> import h5py, pandas as pd, tempfile
    >>> from cellfeed import open_collection
    >>> path = f"{tempfile.mkdtemp()}/filtered_feature_bc_matrix.h5"
    >>> with h5py.File(path, "w") as file:
    ...     group = file.create_group("matrix")
    ...     group["barcodes"] = np.array([b"AAAC-1", b"AAAG-1"])
    ...     for name, values in {"id": b"ENSG1", "name": b"CD4", "genome": b"GRCh38"}.items():
    ...         group[f"features/{name}"] = np.array([values])
    ...     group["features/feature_type"] = np.array([b"Gene Expression"])
    ...     group["data"], group["indices"] = np.array([7], "i4"), np.array([0])
    ...     group["indptr"], group["shape"] = np.array([0, 0, 1]), np.array([1, 2], "i4")
    >>> obs = pd.DataFrame({"cell_type": ["T", "B"]}, index=["AAAG-1", "AAAC-1"])
    >>> collection = open_collection(TenxSource(path, obs=obs), obs=["cell_type"])
    >>> collection[[1]].X.toarray(), collection.obs_names([1])
    (array([[7]], dtype=int32), array(['AAAG-1'], dtype=object))
    """

    _file: H5File

    def __init__(
        self,
        file: str | os.PathLike[str] | H5File,
        *,
        obs: pd.DataFrame | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(file, H5File):
            location = Location.of(file, storage_options)
            file = RemoteH5File(location) if location.path is None else LocalH5File(location.path)
        super().__init__(file)
        with damage_named(self.location, _MATRIX, writer=_WRITER):
            is_known = _FEATURES in self._file()
        if not is_known:
            msg = f"{self.location}: is no feature-barcode matrix of Cell Ranger 3 or later; give"
            msg = f"{msg} filtered_feature_bc_matrix.h5, or convert an older matrix:"
            raise FormatError(f"{msg} scanpy.read_10x_h5(path).write_h5ad(...)")
        X = TenxCsr(self._file)
        types = self._read(f"{_FEATURES}/feature_type")
        if types.shape != (X.shape[1],):
            msg = f"{self.location}: `{_MATRIX}` has {X.shape[1]:,} features, but types of"
            raise FormatError(f"{msg} {types.size:,}; copy or download it again")
        self.elements = {"X": X} | {
            f"mod/{each}/X": X.of_features(each, types == each)
            for each in dict.fromkeys(types.tolist())
        }
        self._obs, self._obs_rows = obs, None if obs is None else self._matched(obs)

    def stored_elements(self) -> dict[str, str]:
        """Return the encoding of ``X``, which contains the features of all types."""
        return {"X": "csr"}

    def obs_names(self) -> list[str]:
        """Return ``library``, and the names of the columns of the given ``obs``."""
        given = [] if self._obs is None else [*map(str, self._obs)]
        return given if _LIBRARY in given else [_LIBRARY, *given]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return columns, with missing values for cells that the given ``obs`` lacks."""
        table = self._annotations(columns, slice(None))
        if _LIBRARY in columns and _LIBRARY not in table:
            table[_LIBRARY] = self._libraries
        return table[[*columns]]

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return rows of columns, indexed by barcode."""
        with self._damage_named(_BARCODES):
            barcodes = frames.read_rows(self._file.stored(_BARCODES), rows)
        table = self._annotations(columns, rows)
        if _LIBRARY in columns and _LIBRARY not in table:
            table[_LIBRARY] = self._libraries[rows]
        return as_text(table[[*columns]].set_axis(pd.Index(barcodes, dtype=object), axis=0))

    def read_var(self) -> pd.DataFrame:
        """Read the table of features: ids, types, genomes, and what else the file says of them."""
        n_features = self.elements["X"].shape[1]
        names = pd.Index(self.elements["X"].var_names(), dtype=object)
        with self._damage_named(_FEATURES):
            stored = {
                name: f"{_FEATURES}/{name}"
                for name, each in self._file.stored(_FEATURES).items()
                if not is_group(each) and each.shape == (n_features,)
            }
        known = {column: stored.pop(name) for column, name in _COLUMNS.items() if name in stored}
        others = {name: path for name, path in stored.items() if name != "name"}
        paths = known | others
        return pd.DataFrame({name: self._read(each) for name, each in paths.items()}, index=names)

    def _read(self, path: str) -> NDArray[Any]:
        """Read an array of text, or of numbers."""
        with self._damage_named(path):
            check_sizes(self._file, path)
            stored = self._file.stored(path)
            is_text = stored.dtype.kind not in "biuf"
            values = (stored.asstr() if is_text else stored)[()]
            return np.array(values, object) if is_text else np.asarray(values)

    def _matched(self, obs: pd.DataFrame) -> NDArray[np.int32]:
        """Return the row of each cell in ``obs``, -1 for those that it lacks."""
        index = pd.Index(obs.index.astype(str), dtype=object)
        repeated = index[index.duplicated()]
        if len(repeated):
            msg = f"`obs` has the barcode {repeated[0]!r} twice; give one row for each cell"
            raise ParameterError(f"{self.location}: {msg}")
        barcodes = self._read(_BARCODES)
        rows = np.asarray(index.get_indexer(pd.Index(barcodes, dtype=object)), np.int32)
        if barcodes.size and (rows < 0).all():
            shown = f"{index[0]!r}" if len(index) else "empty"
            msg = f"`obs` has none of its barcodes: its index is {shown}, not {barcodes[0]!r}"
            raise ParameterError(f"{self.location}: {msg}; index it by barcode")
        return rows

    @cached_property
    def _libraries(self) -> pd.Categorical:
        """The library of each cell; a barcode ends in the number of its GEM well, as in -1."""
        barcodes = self._read(_BARCODES)
        with self._damage_named(_MATRIX):
            stored = np.atleast_1d(self._file().attrs.get("library_ids", []))
            ids = [each.decode() if isinstance(each, bytes) else str(each) for each in stored]
        if not barcodes.size:
            return pd.Categorical([])
        parts = np.char.rpartition(barcodes.astype(str), "-")
        of_barcodes = np.where(parts[:, 1] == "", "1", parts[:, 2])
        wells, numbers = np.unique(of_barcodes, return_inverse=True)
        known = {str(number): name for number, name in enumerate(ids, 1)}
        names, of_well = np.unique([known.get(each, each) for each in wells], return_inverse=True)
        return pd.Categorical.from_codes(of_well[numbers], pd.Index(names.astype(object)))

    def _annotations(
        self, columns: Sequence[str], which: slice | NDArray[np.int64]
    ) -> pd.DataFrame:
        """Return those of the columns that the given ``obs`` has."""
        if self._obs is None or self._obs_rows is None:
            n_rows = np.arange(self.n_rows)[which].size
            return pd.DataFrame(index=pd.RangeIndex(n_rows))
        given = self._obs.rename(columns=str)
        table = given[[name for name in columns if name in given]]
        rows = self._obs_rows[which]
        if (self._obs_rows < 0).any():  # integers and booleans have no value that is missing
            whole = [name for name in table if table[name].dtype.kind in "iub"]
            table = table.astype({name: table[name].convert_dtypes().dtype for name in whole})
        table = table.reset_index(drop=True)
        return table.reindex(rows).reset_index(drop=True)

    def _damage_named(self, element: str) -> AbstractContextManager[None]:
        return damage_named(self.location, element, writer=_WRITER)


# Its files are HDF5, and are recognized by what is in them.

TENX = Storage(
    name="10x Genomics",
    open=lambda location, _: [TenxSource(location)],
    recognizes=lambda _: False,
    open_hdf5=lambda file: TenxSource(file) if _is_matrix(file()) else None,
)
