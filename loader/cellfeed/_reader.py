"""Reading rows of a collection into buffers that are used again."""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._minibatch import Cells
from cellfeed._obs import ObsColumn
from cellfeed._runs import Runs, merge_consecutive
from cellfeed._sources import CsrBuffer, DenseBuffer, Layout, RowBuffer

__all__ = ["Reader"]


class Readable(Protocol):
    """What a `Reader` asks of a collection."""

    @property
    def n_vars(self) -> int: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def obs(self) -> Mapping[str, ObsColumn]: ...

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]: ...

    def read_into(self, runs: Runs, out: RowBuffer) -> None: ...


class Reader:
    """Reads fetches of one collection, one after the other, into the same memory.

    Parameters
    ----------
    collection
        Where rows come from.
    """

    def __init__(self, collection: Readable) -> None:
        self._collection = collection
        self._room: dict[str, NDArray[Any]] = {}

    def read(self, rows: NDArray[np.int64]) -> Cells:
        """Read rows; the result is valid until the next call.

        Parameters
        ----------
        rows
            Strictly ascending, within the collection.

        Raises
        ------
        FormatError
            A file is truncated or damaged.
        """
        matrix = (
            self._read_csr(rows) if self._collection.layout == "csr" else self._read_dense(rows)
        )
        obs = {name: column.values[rows] for name, column in self._collection.obs.items()}
        return Cells(matrix, obs, rows)

    def _read_csr(self, rows: NDArray[np.int64]) -> sp.csr_array:
        runs = merge_consecutive(rows)
        lengths = self._collection.row_lengths(runs)
        n_elements = int(lengths.sum())
        # SciPy and torch want one dtype for both; int32 halves the memory while it suffices.
        index_dtype = np.int32 if n_elements <= np.iinfo(np.int32).max else np.int64
        pointer = np.zeros(rows.size + 1, dtype=index_dtype)
        np.cumsum(lengths, out=pointer[1:])
        indices = self._reuse(f"indices {index_dtype.__name__}", n_elements, np.dtype(index_dtype))
        data = self._reuse("data", n_elements, self._collection.dtype)
        self._collection.read_into(runs, CsrBuffer(indices, data))
        matrix = sp.csr_array((data, indices, pointer), shape=(rows.size, self._collection.n_vars))
        # torch takes columns to ascend and to be distinct; files need not have them so.
        matrix.sum_duplicates()
        return matrix

    def _read_dense(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        shape = (rows.size, self._collection.n_vars)
        data = self._reuse("data", shape[0] * shape[1], self._collection.dtype).reshape(shape)
        self._collection.read_into(merge_consecutive(rows), DenseBuffer(data))
        return data

    def _reuse(self, name: str, n_elements: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        room = self._room.get(name)
        if room is None or room.size < n_elements:
            self._room.pop(name, None)  # free the old memory before asking for the new
            room = self._room[name] = np.empty(n_elements + n_elements // 8, dtype=dtype)
        return room[:n_elements]
