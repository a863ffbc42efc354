"""The expected contents of stored cases, and their comparison with what was read."""

import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import scipy.sparse as sp
from numpy.typing import NDArray

from cellfeed._torch import torch
from cellfeed.rows import CategoricalColumn, Cells, CsrRows, ObsColumn, RaggedRows, summable
from cellfeed.rows._minibatch import Minibatch, RaggedTensor
from cellfeed.testing._cases import StoredCase

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
