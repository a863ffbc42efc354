"""Checks for values that tensors cannot hold."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ColumnError, ParameterError

__all__ = ["require_int64", "require_torch_dtype"]


def require_torch_dtype(dtype: np.dtype[Any]) -> None:
    """Check that torch has a numeric dtype; it has none above 64 bits.

    Raises
    ------
    ParameterError
        torch does not have it.
    """
    if dtype.itemsize > np.dtype(np.float64).itemsize and dtype.kind == "f":
        msg = f"values are stored as {dtype}, which torch does not support; give `dtype='float64'`"
        raise ParameterError(msg)


def require_int64(what: str, values: NDArray[Any]) -> None:
    """Check that integers of obs fit into int64, to which they are converted in torch.

    Raises
    ------
    ColumnError
        One of them is above the largest int64.
    """
    if values.dtype != np.uint64:
        return
    largest = np.iinfo(np.int64).max
    if values.size and values.max() > largest:
        msg = (
            f"{what} has {values.max()}, above {largest}, the largest int64 that tensors can "
            "hold; store it as text or as a category"
        )
        raise ColumnError(msg)
