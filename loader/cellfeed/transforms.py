"""Transforms of expression values, such as normalization, applied while minibatches are read.

`CellDataset` takes a transform, or a sequence of them that is applied in order. The decoding
threads apply them to the rows of each minibatch in place. Sparse rows stay sparse if the transform
keeps zeros; only their stored elements change, as in scanpy (so zeros stay zeros also in rows with
NaN).
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
    """Base class of the transforms in this module, which are compiled.

    Pass a function of your own to `CellDataset` as ``batch_transform``.
    """

    @property
    @abstractmethod
    def keeps_zeros(self) -> bool:
        """Whether zeros stay zero, so that sparse rows stay sparse."""


@dataclass(frozen=True)
class NormalizeTotal(Transform):
    """Scale each row so that its values sum to ``target_sum``, like `scanpy.pp.normalize_total`.

    A row's total is the sum, in float64, of the delivered values: if genes are selected, of these
    genes only, as in scanpy on the same selection. A row whose total is 0 is not changed.

    Parameters
    ----------
    target_sum
        The sum of each row. (scanpy's default, the median of all totals, would require reading the
        whole collection first.)

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
    """Take the natural logarithm of 1 + value, like `scanpy.pp.log1p`.

    The result is correct to one unit in the last place. It is NaN below -1 and -infinity at -1, as
    in NumPy; a `CellDataset` warns once with the number of such values, since data that are scaled
    already have them.
    """

    @property
    def keeps_zeros(self) -> bool:
        """True."""
        return True


@dataclass(frozen=True)
class Binarize(Transform):
    """Set values above ``threshold`` to 1, and all others, including NaN, to 0.

    Elements of sparse rows that become 0 remain stored.

    Parameters
    ----------
    threshold
        The threshold, compared in the dtype of the values. If it is below 0, zeros become 1, so
        sparse elements require ``dense=True``.

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
    """Subtract each column's mean and divide by its standard deviation, like `scanpy.pp.scale`.

    Columns whose standard deviation is 0 are divided by 1.

    Parameters
    ----------
    mean, std
        Mean and standard deviation of each delivered column of the element, in the order of
        delivery, for example over the training cells; finite, shape (n_columns,). ``mean`` may be
        None without ``zero_center``.
    max_value
        Scaled values are clipped to at most ``max_value`` and, with ``zero_center``, to at least
        its negative.
    zero_center
        Whether to subtract the mean. Zeros then change, so sparse elements require ``dense=True``.

    Raises
    ------
    ParameterError
        ``mean`` or ``std`` is not finite, ``std`` is negative, their shapes differ, or
        ``max_value`` is not a finite number above 0.
    """

    mean: ArrayLike | None
    std: ArrayLike
    max_value: float | None = None
    zero_center: bool = True

    def __post_init__(self) -> None:
        """Check the parameters, and keep read-only copies of the arrays."""
        std = _columns("std", self.std)
        if (std < 0).any():
            msg = (
                f"`std >= 0` must hold, but the smallest of {std.size:,} columns is "
                f"std={std.min()!r}"
            )
            raise ParameterError(msg)
        object.__setattr__(self, "std", std)
        if self.mean is not None:
            mean = _columns("mean", self.mean)
            if mean.size != std.size:
                msg = (
                    f"`mean` and `std` must have the same length, but got {mean.size:,} and "
                    f"{std.size:,}"
                )
                raise ParameterError(msg)
            object.__setattr__(self, "mean", mean)
        elif self.zero_center:
            msg = "`mean` must be given with `zero_center`, but got mean=None"
            raise ParameterError(msg)
        if self.max_value is not None:
            object.__setattr__(self, "max_value", _positive("max_value", self.max_value))

    @property
    def keeps_zeros(self) -> bool:
        """True unless the mean is subtracted."""
        return not self.zero_center

    @property
    def n_columns(self) -> int:
        """Number of columns."""
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
    """Return a read-only array with a number for each column."""
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
    """Return a digest of numbers, which may be too many to write out."""
    if columns is None:
        return "None"
    values = np.asarray(columns)
    return f"<{values.size:,} columns, sha256 {hashlib.sha256(values.tobytes()).hexdigest()[:16]}>"
