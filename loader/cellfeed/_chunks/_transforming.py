"""Transforms as compiled code takes them, applied to rows by many threads at once."""

from collections.abc import Sequence
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import _kernels as kernels
from cellfeed.transforms import Binarize, Log1p, NormalizeTotal, Scale, Transform

__all__ = ["RowAddresses", "ValueSteps"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowAddresses:
    """Where rows lie in memory, as long as it does: int64 arrays of shape (n_rows,).

    Parameters
    ----------
    values
        Address of the first value of each row.
    columns
        Address of its first column index; 0 if the row is dense.
    lengths
        How many values it has.
    index_itemsize
        Bytes of a column index.
    """

    values: NDArray[np.int64]
    columns: NDArray[np.int64]
    lengths: NDArray[np.int64]
    index_itemsize: int


class ValueSteps:
    """Transforms of the values of one element.

    Parameters
    ----------
    transforms
        In the order in which they are applied.
    dtype
        Dtype of the values: float32 or float64.
    """

    def __init__(self, transforms: Sequence[Transform], dtype: np.dtype[Any]) -> None:
        steps, moments = list[tuple[int, int, float]](), list[NDArray[np.float64]]()
        for each in transforms:
            if isinstance(each, NormalizeTotal):
                steps.append((kernels.NORMALIZED, 0, each.target_sum))
            elif isinstance(each, Log1p) and steps and steps[-1][0] == kernels.NORMALIZED:
                # In one pass, which does not round in between.
                steps[-1] = (kernels.NORMALIZED_LOG1P, 0, steps[-1][2])
            elif isinstance(each, Log1p):
                steps.append((kernels.LOG1P, 0, 0.0))
            elif isinstance(each, Binarize):
                steps.append((kernels.BINARIZED, 0, float(dtype.type(each.threshold))))
            elif isinstance(each, Scale):
                kind = kernels.CENTRED if each.zero_center else kernels.SCALED
                most = np.inf if each.max_value is None else each.max_value
                steps.append((kind, len(moments), most))
                moments.append(_moments(each))
        self._itemsize = dtype.itemsize
        self._steps = np.array([step[:2] for step in steps], np.int64).reshape(-1, 2)
        self._numbers = np.array([step[2] for step in steps], np.float64)
        self._moments = np.array(moments) if moments else np.empty((0, 2, 0))

    def __bool__(self) -> bool:
        return len(self._steps) > 0

    def apply(
        self, rows: RowAddresses, threads: Executor | None = None, n_threads: int = 1
    ) -> None:
        """Change the values of rows where they are.

        Parameters
        ----------
        rows
            Where they are, of the dtype stated.
        threads, n_threads
            Who does it, and how many of them; the calling thread if None.
        """
        taken = np.zeros(1, np.int64)

        def work() -> None:
            kernels.transform_rows(
                rows.values,
                rows.columns,
                rows.lengths,
                self._itemsize,
                rows.index_itemsize,
                self._steps,
                self._numbers,
                self._moments,
                taken,
            )

        if threads is None:
            work()
            return
        n_tasks = -(-rows.lengths.size // kernels.ROWS_OF_A_TASK)
        jobs = [threads.submit(work) for _ in range(min(n_threads, n_tasks))]
        try:
            for job in jobs:
                job.result()
        except BaseException:
            # The other threads write into memory that the caller is about to let go.
            taken[0] = rows.lengths.size
            wait(jobs)
            raise


def _moments(scale: Scale) -> NDArray[np.float64]:
    """Return what is subtracted from each column, and its divisor, shape (2, n_columns)."""
    std = np.asarray(scale.std)
    mean = np.asarray(scale.mean) if scale.zero_center else np.zeros_like(std)
    return np.stack([mean, np.where(std == 0, 1.0, std)])
