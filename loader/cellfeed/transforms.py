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

__all__ = ["Log1p", "NormalizeTotal", "Transform"]


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
        given: Any = self.target_sum
        is_number = isinstance(given, Real) and not isinstance(given, bool)
        if not is_number or not 0 < given < math.inf:
            msg = f"`target_sum` must be a finite number above 0, but got target_sum={given!r}"
            raise ParameterError(msg)
        object.__setattr__(self, "target_sum", float(given))


@dataclass(frozen=True)
class Log1p(Transform):
    """Take the natural logarithm of 1 + value, like `scanpy.pp.log1p`.

    The result is correct to one unit in the last place. It is NaN below -1 and -infinity at -1, as
    in NumPy; a `CellDataset` warns once with the number of such values, since data that are scaled
    already have them.
    """
