"""Silencing zarr's warnings about the codecs of numcodecs."""

import re
import warnings

__all__ = ["expect_numcodecs"]

_FILTER = (
    "ignore",
    re.compile("Numcodecs codecs are not in the Zarr version 3", re.IGNORECASE),
    UserWarning,
    None,
    0,
)


def expect_numcodecs() -> None:
    """Silence zarr's warning that other implementations may not support codecs of numcodecs.

    The filter is permanent, since threads that open stores concurrently would undo each other's.
    """
    if warnings.filters[:1] != [_FILTER]:  # others may have come before it since
        warnings.filterwarnings("ignore", _FILTER[1].pattern, UserWarning)
