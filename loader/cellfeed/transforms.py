"""Transforms of values: what a training loop does to expression before a model sees it.

`CellDataset` takes one of them, or a sequence that is applied in order. The threads that decode
apply them to the rows of each minibatch where those lie, without a copy. What is sparse stays
sparse where zeros stay zeros: of sparse rows, the elements that are stored are changed, as scanpy
does (so that zeros stay zeros beside NaN as well).
"""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError

__all__ = ["Binarize", "Log1p", "NormalizeTotal", "Scale", "Transform"]


class Transform(ABC):
    """What the transforms here have in common: those below are all that are compiled.

    A function of your own is the ``batch_transform`` of a `CellDataset`.
    """

    @property
    @abstractmethod
    def keeps_zeros(self) -> bool:
        """Whether zeros stay zeros, so that sparse rows stay sparse."""


@dataclass(frozen=True)
class NormalizeTotal(Transform):
    """Multiply each row so that its values sum to ``target_sum``, as `scanpy.pp.normalize_total`.

    A row's total is the sum, in float64, of the values that are delivered: where genes are
    selected, of these genes alone, as in scanpy on the same selection. A row whose total is 0
    stays as it is.

    Parameters
    ----------
    target_sum
        What each row sums to. (scanpy's default, the median of all totals, would take a reading of
        the whole collection.)

    Raises
    ------
    ParameterError
        ``target_sum`` is not a finite number above 0.
    """

    target_sum: float = 1e4

    def __post_init__(self) -> None:
        """Check the sum."""
        object.__setattr__(self, "target_sum", _positive("target_sum", self.target_sum))

    @property
    def keeps_zeros(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class Log1p(Transform):
    """Take the natural logarithm of 1 + value, as `scanpy.pp.log1p` does.

    Correct to one unit in the last place. Below -1 it is NaN, and at -1 it is -infinity, as in
    NumPy.
    """

    @property
    def keeps_zeros(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class Binarize(Transform):
    """Set values above ``threshold`` to 1 and all others, NaN among them, to 0.

    Elements of sparse rows that become 0 stay stored.

    Parameters
    ----------
    threshold
        Compared in the dtype of the values. Below 0, zeros become 1, so that a sparse element
        takes ``dense=True``.

    Raises
    ------
    ParameterError
        ``threshold`` is not a finite number.
    """

    threshold: float = 0.0

    def __post_init__(self) -> None:
        """Check the threshold."""
        object.__setattr__(self, "threshold", _finite("threshold", self.threshold))

    @property
    def keeps_zeros(self) -> bool:
        """Whether the threshold is not below 0."""
        return self.threshold >= 0


@dataclass(frozen=True, eq=False, repr=False)
class Scale(Transform):
    """Subtract each column's mean and divide by its standard deviation, as `scanpy.pp.scale`.

    Columns whose standard deviation is 0 are divided by 1.

    Parameters
    ----------
    mean, std
        Mean and standard deviation of each column of the element, in the order in which it is
        delivered, such as those of the training cells; finite, shape (n_columns,). The mean may
        be None without ``zero_center``.
    max_value
        What scaled values are clipped to; with ``zero_center``, to its negative as well.
    zero_center
        Whether the mean is subtracted. Zeros do not stay zeros then, so that a sparse element takes
        ``dense=True``.

    Raises
    ------
    ParameterError
        ``mean`` and ``std`` are not such numbers or of different shapes, or ``max_value`` is not a
        finite number above 0.
    """

    mean: ArrayLike | None
    std: ArrayLike
    max_value: float | None = None
    zero_center: bool = True

    def __post_init__(self) -> None:
        """Check the parameters, and keep copies of the arrays that nobody can write to."""
        std = _columns("std", self.std)
        if (std < 0).any():
            msg = f"`std >= 0` must hold, but got std={std.min()!r} among {std.size:,} columns"
            raise ParameterError(msg)
        object.__setattr__(self, "std", std)
        if self.mean is not None:
            mean = _columns("mean", self.mean)
            if mean.size != std.size:
                msg = f"`mean` and `std` must be as long, but got {mean.size:,} and {std.size:,}"
                raise ParameterError(msg)
            object.__setattr__(self, "mean", mean)
        elif self.zero_center:
            msg = "`mean` must be given with `zero_center`, but got mean=None"
            raise ParameterError(msg)
        if self.max_value is not None:
            object.__setattr__(self, "max_value", _positive("max_value", self.max_value))

    @property
    def keeps_zeros(self) -> bool:
        """Whether no mean is subtracted."""
        return not self.zero_center

    @property
    def n_columns(self) -> int:
        """Columns that it is for."""
        return len(np.asarray(self.std))

    def __repr__(self) -> str:
        mean, std = _digest(self.mean), _digest(self.std)
        return (
            f"Scale(mean={mean}, std={std}, max_value={self.max_value!r}, "
            f"zero_center={self.zero_center!r})"
        )


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        msg = f"`{name}` must be a finite number, but got {name}={value!r}"
        raise ParameterError(msg)
    return float(value)


def _positive(name: str, value: Any) -> float:
    if _finite(name, value) <= 0:
        msg = f"`{name} > 0` must hold, but got {name}={value!r}"
        raise ParameterError(msg)
    return float(value)


def _columns(name: str, values: Any) -> NDArray[np.float64]:
    """Return a number for each column, which nobody can write to."""
    try:
        columns = np.array(values, np.float64)
    except (TypeError, ValueError):
        columns = np.array(np.nan)
    if columns.ndim != 1 or not np.isfinite(columns).all():
        msg = f"`{name}` must be one finite number for each column, but got {name}={values!r}"
        raise ParameterError(msg)
    columns.setflags(write=False)
    return columns


def _digest(columns: ArrayLike | None) -> str:
    """Return which numbers these are, of which there may be too many to write out."""
    if columns is None:
        return "None"
    values = np.asarray(columns)
    return f"<{values.size:,} columns, sha256 {hashlib.sha256(values.tobytes()).hexdigest()[:16]}>"
