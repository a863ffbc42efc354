"""Transforms of values where rows lie, of the groups of one element."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import CsrRows
from cellfeed._chunks import RowAddresses, ValueSteps
from cellfeed._layouts import Layout
from cellfeed.transforms import Transform

__all__ = ["ElementTransforms", "Transforms", "as_stored", "transform_groups"]

Transforms = Mapping[str, Sequence[Transform]]
"""Transforms by the name of the element, in the order in which they are applied."""


def as_stored(transforms: Sequence[Transform], layout: Layout) -> Sequence[Transform]:
    """Return the first ones, which rows go through as they are stored.

    Those after them take sparse rows that were made dense.

    Examples
    --------
    >>> from cellfeed.transforms import Log1p, Scale
    >>> as_stored([Log1p(), Scale([1.0], [2.0])], "csr")
    [Log1p()]
    """
    if layout == "dense":
        return transforms
    return list(takewhile(lambda each: each.keeps_zeros, transforms))


@dataclass(frozen=True, slots=True, eq=False)
class ElementTransforms:
    """Transforms of one element, compiled.

    Parameters
    ----------
    stored
        What rows go through as they are stored.
    dense
        What sparse rows go through after that, once they are dense.
    """

    stored: ValueSteps
    dense: ValueSteps

    @classmethod
    def of(cls, transforms: Sequence[Transform], layout: Layout, dtype: np.dtype[Any]) -> Self:
        """Return what is done with rows of a layout and of a dtype, float32 or float64."""
        stored = as_stored(transforms, layout)
        dense = transforms[len(stored) :]
        return cls(ValueSteps(stored, dtype), ValueSteps(dense, dtype))


def transform_groups(
    steps: ValueSteps,
    groups: Sequence[CsrRows | NDArray[Any]],
    threads: Executor | None = None,
    n_threads: int = 1,
) -> None:
    """Change the values of groups of rows of one element where they are.

    Parameters
    ----------
    steps
        What is done.
    groups
        All sparse, or all dense.
    threads, n_threads
        Who does it, and how many of them; the calling thread if None.
    """
    if not steps or not groups:
        return
    found = [_sparse(each) if isinstance(each, CsrRows) else _dense(each) for each in groups]
    values, columns, lengths = np.concatenate(found, axis=1)
    first = groups[0]
    index_itemsize = first.indices.itemsize if isinstance(first, CsrRows) else 0
    rows = RowAddresses(
        values=values, columns=columns, lengths=lengths, index_itemsize=index_itemsize
    )
    steps.apply(rows, threads, n_threads)


def _sparse(rows: CsrRows) -> NDArray[np.int64]:
    """Return the addresses of values and columns of each row, and its length."""
    starts = rows.indptr[:-1].astype(np.int64)
    return np.stack(
        [
            rows.data.ctypes.data + starts * rows.data.itemsize,
            rows.indices.ctypes.data + starts * rows.indices.itemsize,
            np.diff(rows.indptr).astype(np.int64),
        ]
    )


def _dense(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the addresses of the values of each row, zeros, and its length."""
    n_values = rows.size // max(1, len(rows))
    starts = np.arange(len(rows), dtype=np.int64) * n_values
    values = rows.ctypes.data + starts * rows.itemsize
    return np.stack([values, np.zeros_like(starts), np.full_like(starts, n_values)])
