"""Why an array is read slowly."""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["SlowRead", "byte_order"]


@dataclass(frozen=True, slots=True)
class SlowRead:
    """Why cellfeed does not decode an array, which the format's library reads slowly instead.

    Parameters
    ----------
    library
        The library, such as ``"h5py"``.
    reason
        The reason, such as ``"filter blosc2 is not supported"``.
    remedy
        What the user can do so that it is read fast.

    Examples
    --------
    >>> print(SlowRead("h5py", "filter blosc2 is not supported"))
    through h5py: filter blosc2 is not supported
    """

    library: str
    reason: str
    remedy: str = "write it again with anndata"

    def __str__(self) -> str:
        return f"through {self.library}: {self.reason}"


def byte_order(dtype: np.dtype[Any]) -> str:
    """Return the byte order of a non-native dtype.

    Examples
    --------
    >>> byte_order(np.dtype(">f4"))
    'big-endian'
    """
    return "big-endian" if dtype.byteorder == ">" else "little-endian"
