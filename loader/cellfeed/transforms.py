"""Transforms of expression values, such as normalization, applied while minibatches are read.

`CellDataset` takes a transform, or a sequence of them that is applied in order. The decoding
threads apply them to the rows of each minibatch in place. Sparse rows stay sparse: only their
stored elements change, as in scanpy (so zeros stay zeros also in rows with NaN).
"""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from cellfeed._errors import ParameterError

__all__ = ["Binarize", "Log1p", "NormalizeTotal", "Transform"]


class Transform:
    """Base class of the transforms in this module, which are compiled.

    Pass a function of your own to `CellDataset` as ``batch_transform``, such as one that subtracts
    each column's mean from dense minibatches and divides by its standard deviation.
    """


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
        object.__setattr__(self, "target_sum", _finite("target_sum", self.target_sum))
        if self.target_sum <= 0:
            msg = f"`target_sum > 0` must hold, but got target_sum={self.target_sum!r}"
            raise ParameterError(msg)


@dataclass(frozen=True)
class Log1p(Transform):
    """Take the natural logarithm of 1 + value, like `scanpy.pp.log1p`.

    The result is correct to one unit in the last place. It is NaN below -1 and -infinity at -1, as
    in NumPy; a `CellDataset` warns once with the number of such values, since data that are scaled
    already have them.
    """


@dataclass(frozen=True)
class Binarize(Transform):
    """Set values above ``threshold`` to 1, and all others, including NaN, to 0.

    Elements of sparse rows that become 0 remain stored.

    Parameters
    ----------
    threshold
        The threshold, compared in the dtype of the values.

    Raises
    ------
    ParameterError
        ``threshold`` is not a finite number, or is below 0, so that zeros would become 1.
    """

    threshold: float = 0.0

    def __post_init__(self) -> None:
        """Check the threshold."""
        object.__setattr__(self, "threshold", _finite("threshold", self.threshold))
        if self.threshold < 0:
            msg = f"`threshold >= 0` must hold, but got threshold={self.threshold!r}"
            raise ParameterError(msg)


def _finite(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        msg = f"`{name}` must be a finite number, but got {name}={value!r}"
        raise ParameterError(msg)
    return float(value)
