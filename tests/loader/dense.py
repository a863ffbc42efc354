"""Values to compare, whatever holds them."""

from typing import Any

import numpy as np
import scipy.sparse as sp


def dense(values: Any) -> np.ndarray:
    """What a tensor, a sparse matrix or an array holds."""
    if sp.issparse(values):
        return np.asarray(values.toarray())
    return np.asarray(values.to_dense() if hasattr(values, "to_dense") else values)
