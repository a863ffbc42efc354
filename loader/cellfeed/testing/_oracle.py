"""The expected contents of stored cases, and their comparison with what was read."""

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._bytes._buffers import Buffer
from cellfeed._decode import ChunkReads, Decoder, Verify
from cellfeed._decode._reads import Done
from cellfeed._fetch import Part
from cellfeed._fetch._element_read import PartRows
from cellfeed._rows import (
    CategoricalColumn,
    Cells,
    CsrRows,
    ObsColumn,
    RaggedRows,
    lay_out,
    summable,
)
from cellfeed._rows._minibatch import Minibatch, RaggedTensor
from cellfeed._runs import merge_consecutive
from cellfeed._storages import StoredElement
from cellfeed._torch import torch
from cellfeed.testing._cases import GuardedPool, StoredCase

# ruff: noqa: S101 - a suite asserts


class Oracle:
    """The expected contents of a collection of cases.

    Parameters
    ----------
    cases
        The stored cases.
    dtype
        Dtype for reading; one that can hold all values if None.
    obs
        The obs columns of the collection, to decode categories.
    """

    def __init__(
        self,
        cases: Sequence[StoredCase],
        dtype: np.dtype[Any] | None = None,
        *,
        obs: Mapping[str, ObsColumn] = MappingProxyType({}),
    ) -> None:
        self._obs = obs
        self._dtype = dtype or np.result_type(*(case.dtype_in_memory for case in cases))
        self._is_sparse = any(case.layout == "csr" for case in cases)
        self._is_ragged = cases[0].layout == "ragged"
        in_memory = [case.in_memory(self._dtype) for case in cases]
        self._matrix: Any = _joined(in_memory) if self._is_ragged else np.vstack(in_memory)
        table = pd.concat([case.obs for case in cases])
        self._plates = np.array([None if pd.isna(plate) else plate for plate in table["plate"]])
        self._numbers = table["number"].to_numpy()

    def check(self, cells: Cells, rows: NDArray[np.int64]) -> None:
        """Check that these are the cells of ``rows``."""
        assert cells.rows.tolist() == rows.tolist()
        assert (self._is_sparse or self._is_ragged) != isinstance(cells.X, np.ndarray)
        self.check_matrix(cells.X, rows)
        self._check_obs(cells.obs, rows)

    def check_minibatch(self, minibatch: Minibatch | Cells, *, dense: bool) -> None:
        """Check that a minibatch, in tensors or without PyTorch, has the cells of its ``rows``."""
        if isinstance(minibatch, Cells):
            is_dense = isinstance(minibatch.X, np.ndarray)
            assert is_dense == (not self._is_ragged and (dense or not self._is_sparse))
            self.check_matrix(minibatch.X, minibatch.rows)
            self._check_obs(minibatch.obs, minibatch.rows)
            return
        rows, X = minibatch.rows.numpy(), minibatch.X
        if isinstance(X, RaggedTensor):
            ragged = RaggedRows(X.offsets.numpy(), X.values.numpy())  # noqa: PD011 - no pandas
            self.check_matrix(ragged, rows)
            self._check_obs({name: part.numpy() for name, part in minibatch.obs.items()}, rows)
            return
        assert (X.layout == torch.sparse_csr) == (self._is_sparse and not dense)
        if X.layout == torch.sparse_csr:
            parts = (X.crow_indices(), X.col_indices(), X.values())
            indptr, indices, data = (part.numpy() for part in parts)
            self.check_matrix(CsrRows(indptr, indices, data, X.shape[1]), rows)
        else:
            self.check_matrix(X.numpy(), rows)
        self._check_obs({name: part.numpy() for name, part in minibatch.obs.items()}, rows)

    def check_matrix(self, X: Any, rows: NDArray[np.int64]) -> None:
        """Check values, dtype and, for a sparse matrix, its parts."""
        expected = self._matrix[rows]
        if self._is_ragged:
            assert isinstance(X, RaggedRows)
            assert X.dtype == self._dtype
            assert X.offsets.tolist() == expected.offsets.tolist()
            np.testing.assert_array_equal(X.values, expected.values)
            return
        in_scipy = isinstance(X, sp.csr_array)
        expected_dtype = summable(self._dtype) if in_scipy else self._dtype
        assert (X if isinstance(X, np.ndarray) else X.data).dtype == expected_dtype
        if not isinstance(X, np.ndarray):
            _check_csr(X.indptr, X.indices, X.data, expected.shape)
            matrix = np.zeros(expected.shape, self._dtype)
            matrix[np.repeat(np.arange(len(rows)), np.diff(X.indptr)), X.indices] = X.data
            X = matrix
        np.testing.assert_array_equal(X, expected)

    def _check_obs(self, obs: Mapping[str, NDArray[Any]], rows: NDArray[np.int64]) -> None:
        column = self._obs["plate"]
        assert isinstance(column, CategoricalColumn)
        assert column.decode(obs["plate"]).tolist() == self._plates[rows].tolist()
        np.testing.assert_array_equal(obs["number"], self._numbers[rows])


def _joined(parts: Sequence[RaggedRows]) -> RaggedRows:
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return RaggedRows(offsets, np.concatenate([part.values for part in parts]))  # noqa: PD011 - no pandas


def _check_csr(
    indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], shape: tuple[int, ...]
) -> None:
    """Check that columns of each row ascend strictly and are within the matrix."""
    assert indptr.dtype == indices.dtype
    assert indptr[0] == 0
    assert indptr[-1] == len(indices) == len(data)
    assert len(indptr) == shape[0] + 1
    assert (np.diff(indptr) >= 0).all()
    for start, stop in itertools.pairwise(indptr):
        columns = indices[start:stop]
        assert (np.diff(columns.astype(np.int64)) > 0).all()
        assert ((columns >= 0) & (columns < shape[1])).all()


# Reading rows of an element into guarded memory, by chunks or through a library.


class GuardedRead:
    """Memory for rows of an element, in two groups.

    Parameters
    ----------
    stored, rows
        An element of a source, and distinct, ascending rows of it.
    order
        ``rows[order]`` is the order of delivery.
    dtype
        Dtype of the values.
    """

    def __init__(
        self,
        stored: StoredElement,
        rows: NDArray[np.int64],
        order: NDArray[np.intp],
        *,
        dtype: np.dtype[Any],
    ) -> None:
        self._part = Part(
            location=Location("case"),
            stored=stored,
            runs=merge_consecutive(rows),
            rows=slice(0, rows.size),
            column_map=None,
        ).as_stored(0)
        bounds = np.array([0, len(order) // 2, len(order)], np.int64)
        self._delivered = np.split(rows[order], bounds[1:-1])
        lengths = np.full(rows.size, math.prod(stored.shape[1:]), np.int64)
        if stored.layout == "csr":
            lengths[self._part.rows] = np.diff(self._part.read_rows().indptr)
        elif stored.layout == "ragged":
            lengths[self._part.rows] = self._part.read_rows().lengths
        self._groups, target, _ = lay_out(
            stored.layout, lengths, order, bounds, row_shape=stored.shape[1:], dtype=dtype
        )
        self._target = target[self._part.rows]
        self._pool = GuardedPool()
        self._buffers: list[Buffer] = [self._pool.acquire(group.n_bytes) for group in self._groups]
        self._bases = np.array([buffer.address for buffer in self._buffers], np.int64)
        self._ordered = True

    def chunk_reads(self) -> ChunkReads | None:
        """Return the chunk reads, if cellfeed can decode the chunks of the element."""
        stored = self._part.stored
        rows = PartRows.of(self._part, stored.layout, stored.shape[1:], self._target.dtype)
        if rows.chunks is None:
            return None
        reads, _, _ = rows.requests(self._target, None)
        return ChunkReads.concatenate(reads)

    def by_chunks(self, reads: ChunkReads, n_threads: int, verify: Verify) -> Done:
        """Read by chunks."""
        reads.readahead()
        with ThreadPoolExecutor(n_threads) as threads:
            decoder = Decoder(threads if n_threads > 1 else None, n_threads, verify)
            done = reads.run(self._bases, decoder)
        self._ordered = done.ascending
        return done

    def by_library(self) -> None:
        """Read through the format's own library."""
        self._ordered = self._target.bound(self._bases).put(self._part.read_rows())

    def groups(self) -> list[tuple[Any, NDArray[np.int64]]]:
        """Return the matrix of each group, and its rows; check for writes out of bounds."""
        self._pool.check()
        matrices = [
            group.over(buffer, distinct=self._ordered or group.sort(buffer))
            for group, buffer in zip(self._groups, self._buffers, strict=True)
        ]
        return list(zip(matrices, self._delivered, strict=True))
