"""Cells in objects of other libraries: in memory, or where these objects locate them."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError, ParameterError
from cellfeed._lazy import pd, sp
from cellfeed.bytes import ByteStore, Location
from cellfeed.decode import ChunkedArray, Pieces, pieced_array
from cellfeed.rows import CsrChunks, DenseChunks
from cellfeed.sources._registry import opened_by
from cellfeed.sources._source import ChunkedElement, Source, StoredElement, as_names
from cellfeed.sources.anndata._open import open_sources

# Arrays in memory, as chunks that need no reading.


class _Memory(ByteStore):
    """One array."""

    def __init__(self, location: Location, values: NDArray[Any]) -> None:
        self._location, self._values = location, values

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The bytes of the array."""
        return self._values.reshape(-1).view(np.uint8)

    def location_of(self, file: int) -> Location:  # noqa: ARG002 - there is one
        """Return the location for messages."""
        return self._location

    def sizes(self, files: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the size of the array in bytes."""
        return np.full(len(files), self._values.nbytes, np.int64)


def array_in_memory(location: Location, name: str, values: NDArray[Any]) -> ChunkedArray:
    """Return an array of native dtype, in C order, as chunks that are copied from its memory."""
    pieces = Pieces.one(0, values.size, values.itemsize)
    return pieced_array(name, pieces, values.dtype, _Memory(location, values))


# Matrices in memory.


class MatrixInMemory(ChunkedElement):
    """A CSR matrix of SciPy, or a NumPy array of numbers.

    Parameters
    ----------
    location, name
        For messages.
    matrix
        The matrix.
    columns
        Names of its columns, str; None if they have none.

    Raises
    ------
    FormatError
        It is something else.
    """

    def __init__(
        self, location: Location, name: str, matrix: Any, columns: NDArray[np.object_] | None
    ) -> None:
        is_sparse = sp.issparse(matrix)
        if is_sparse and (kind := getattr(matrix, "format", "sparse")) != "csr":
            msg = f"{location}: `{name}` is stored by gene ({kind}), which is slow by cell"
            raise FormatError(f"{msg}; make it CSR with `.tocsr()`")
        if not is_sparse and not (_is_array(matrix) and matrix.ndim > 1):
            msg = f"{location}: `{name}` is a {type(matrix).__name__}, not a matrix of numbers"
            raise FormatError(f"{msg}; make it a NumPy array or CSR")
        self.layout = "csr" if is_sparse else "dense"
        self.var = None if columns is None else "raw/var" if name == "raw/X" else "var"
        self.column_names = columns
        self.shape = tuple(int(n) for n in matrix.shape)
        self.dtype = matrix.dtype.newbyteorder("=")
        stored = [matrix.indices, matrix.data] if is_sparse else [matrix]
        stored = [np.ascontiguousarray(each, each.dtype.newbyteorder("=")) for each in stored]
        arrays = [array_in_memory(location, name, each) for each in stored]
        self._n_bytes: int = sum(each.nbytes for each in stored)
        if is_sparse:
            indptr = np.asarray(matrix.indptr, np.int64)
            self._chunks = CsrChunks(indptr, arrays[0], arrays[1], self.shape[1])
            self._n_bytes += indptr.nbytes
        else:
            self._chunks = DenseChunks(arrays[0], math.prod(self.shape[1:]))

    def codec(self) -> str:
        """Return that nothing is compressed."""
        return "none"

    def stored_bytes(self) -> int:
        """Return its size in memory, in bytes."""
        return self._n_bytes


# AnnData objects: in memory, or backed by a file.

_NAMES_LOOKED_AT = 4096
_BYTES_LOOKED_AT = 8 << 20


class AnnDataObjectSource(Source):
    """Some elements of an AnnData object, with its obs in memory.

    Parameters
    ----------
    adata
        The object; if it is backed, its file is read.
    elements
        Names of the elements to read.

    Raises
    ------
    FormatError
        It lacks an element, or an element is no matrix that can be read by cell; or it is a view of
        a backed object.
    """

    def __init__(self, adata: Any, elements: Sequence[str]) -> None:
        self._obs, self._var = adata.obs, adata.var
        self._version: str | None = None
        if adata.isbacked:
            self.location = Location.of(adata.filename)
            if adata.is_view:
                msg = f"{self.location}: is a view of a backed AnnData"
                raise FormatError(
                    f"{msg}; give the whole object, and select rows of the collection"
                )
            (source,) = open_sources(self.location, elements)
            self.elements = source.elements
            return
        self.location = Location("memory://AnnData")
        self.elements = {name: self._element(adata, name) for name in elements}
        self._version = _fingerprint(adata)

    def version(self) -> str | None:
        """Return a digest of a sample of the contents in memory; None if the object is backed.

        The digest covers the shape, 4,096 names of cells, and at most 8 MiB of ``X``, in rows
        spread from the first to the last, if ``X`` is CSR or a NumPy array; it does not depend on
        the elements. It distinguishes most objects, but not those that differ only in few cells.
        """
        return self._version

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return [str(name) for name in self._obs]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some obs columns."""
        table: pd.DataFrame = self._obs[[*columns]].reset_index(drop=True)
        return table

    def read_obs_rows(self, columns: Sequence[str], rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return some rows of obs columns, indexed by the names of the cells."""
        names = self._obs.index[rows].astype(str)
        return super().read_obs_rows(columns, rows).set_axis(names.astype(object), axis=0)

    def read_var(self) -> pd.DataFrame:
        """Return the table of genes."""
        table: pd.DataFrame = self._var
        return table

    def _element(self, adata: Any, name: str) -> StoredElement:
        folder, _, key = name.partition("/")
        owner = adata.raw if folder == "raw" else adata
        if folder in ("layers", "obsm"):
            found = getattr(adata, folder).get(key)
        else:
            found = owner.X if name in ("X", "raw/X") and owner is not None else None
        if found is None:
            there = [
                f"`{each}/{key}`"
                for each in ("layers", "obsm")
                for key in getattr(adata, each)
                if key is not None  # X again, from anndata 0.13
            ]
            there = [*(["`X`"] if adata.X is not None else []), *there]
            there += ["`raw/X`"] if adata.raw is not None else []
            listed = f"its elements are: {', '.join(there)}" if there else "it has no elements"
            raise FormatError(f"{self.location}: has no `{name}`; {listed}")
        columns = None if folder == "obsm" else as_names(owner.var_names)
        return MatrixInMemory(self.location, name, found, columns)


def _fingerprint(adata: Any) -> str:
    n_rows, n_columns = adata.shape
    names = adata.obs_names[_spread(n_rows, _NAMES_LOOKED_AT)]
    digest = hashlib.blake2b(repr((adata.shape, [*map(str, names)])).encode(), digest_size=16)
    n_looked_at = _BYTES_LOOKED_AT // max(1, n_columns * np.dtype(np.float64).itemsize)
    matrix = adata.X
    is_csr = sp.issparse(matrix) and getattr(matrix, "format", None) == "csr"
    if is_csr or _is_array(matrix):
        values = matrix[_spread(n_rows, n_looked_at)]
        for part in (values.indptr, values.indices, values.data) if is_csr else (values,):
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


def _is_array(matrix: Any) -> bool:
    is_masked = isinstance(matrix, np.ma.MaskedArray)
    return isinstance(matrix, np.ndarray) and not is_masked and matrix.dtype.kind in "biuf"


def _spread(n_rows: int, most: int) -> NDArray[np.int64]:
    """Return up to this many rows, at least one, spread from the first to the last."""
    n = min(n_rows, max(1, most))
    return np.linspace(0, max(0, n_rows - 1), n).astype(np.int64)


# Converting objects of other libraries to sources, or to the locations of their cells.

_ANNCOLLECTION = "anndata.experimental.multi_files._anncollection"


def locations_or_sources(given: Any, elements: Sequence[str]) -> list[str | Source] | None:
    """Return the sources of an object, or its paths and URLs; None for other objects.

    Parameters
    ----------
    given
        `anndata.AnnData`, `anndata.experimental.AnnCollection`, `datasets.Dataset`, or BioNeMo's
        ``SingleCellMemMapDataset``. Objects are recognised without importing their libraries.
    elements
        Names of the elements to read.

    Raises
    ------
    FormatError, ParameterError
        The object cannot be read, or only in another form.
    """
    if _is_of(given, "anndata", "AnnData"):
        return [AnnDataObjectSource(given, elements)]
    if _is_of(given, _ANNCOLLECTION, "AnnCollectionView"):
        msg = "a view of an AnnCollection cannot be opened"
        raise ParameterError(f"{msg}; give the whole object, and select rows of the collection")
    if _is_of(given, _ANNCOLLECTION, "AnnCollection"):
        return [AnnDataObjectSource(adata, elements) for adata in given.adatas]
    if hasattr(given, "data_path") and hasattr(given, "row_index"):  # of BioNeMo
        return [str(given.data_path)]
    source: Source | None = opened_by("open_object", given)
    return None if source is None else [source]


def _is_of(given: Any, module: str, *names: str) -> bool:
    """Return whether an object is of a class of a module, which then is imported already."""
    loaded = sys.modules.get(module)
    classes = (getattr(loaded, name, None) for name in names)
    return any(isinstance(given, each) for each in classes if isinstance(each, type))
