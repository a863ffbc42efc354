"""Checks of the parameters that control how a dataset reads its collection."""

import warnings
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike

from cellfeed._chunks import Verify
from cellfeed._collection import Collection
from cellfeed._errors import ParameterError
from cellfeed._layouts import Dtypes
from cellfeed._torch import HAS_TORCH, torch
from cellfeed.machine import usable_memory_bytes

__all__ = [
    "AnyDtype",
    "numpy_dtypes",
    "require_callables",
    "require_that_they_apply",
    "warn_if_too_large",
]

AnyDtype: TypeAlias = "DTypeLike | torch.dtype"


def require_that_they_apply(
    collection: Any,
    *,
    has_callback: bool,
    dense: bool,
    dtype: Dtypes,
    num_threads: int | None,
    transform: object = None,
    prefetch: int | None = None,
    prefetch_next_epoch: bool = False,
    verify: Verify = "first",
) -> None:
    """Check that parameters for reading a `Collection` are given only if cellfeed reads one.

    Raises
    ------
    ParameterError
        A given parameter would be ignored.
    """
    given = {
        "dtype": None if dtype is None else str(dtype),
        "num_threads": num_threads,
        "transform": transform,
        "prefetch": prefetch,
        "prefetch_next_epoch": prefetch_next_epoch or None,
        "verify": None if verify == "first" else verify,
    }
    if not isinstance(collection, Collection):
        given = {"dense": dense or None, **given}
        reader = f"an indexable of type {type(collection).__name__}"
    elif has_callback:
        reader = "a `fetch_callback`"
    else:
        return
    ignored = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
    if ignored:
        msg = (
            "`dense`, `dtype`, `num_threads`, `transform`, `prefetch`, `prefetch_next_epoch` "
            f"and `verify` apply only when cellfeed reads a Collection, but got {ignored} "
            f"with {reader}; leave it out, and convert in `batch_transform`"
        )
        raise ParameterError(msg)


def require_callables(**functions: object) -> None:
    """Check that each given function can be called.

    Raises
    ------
    ParameterError
        One is not callable.
    """
    for name, function in functions.items():
        if function is not None and not callable(function):
            msg = f"`{name}` must be a function, but got {function!r}"
            raise ParameterError(msg)


def warn_if_too_large(n_bytes: float) -> None:
    """Warn if fetches take more memory than is available, of which the system gives no notice."""
    available = usable_memory_bytes()
    if n_bytes > available:
        msg = (
            f"fetches take about {n_bytes / 1e6:,.0f} MB of memory, but {available / 1e6:,.0f} MB "
            "are available; choose a smaller `batch_size` or `fetch_factor`"
        )
        warnings.warn(msg, UserWarning, stacklevel=3)


def numpy_dtypes(dtype: "AnyDtype | Mapping[str, AnyDtype] | None") -> Dtypes:
    """Return dtypes of NumPy or torch, for all elements or for some by name, as NumPy dtypes.

    Raises
    ------
    ParameterError
        One is not a numeric dtype of torch.
    """
    if isinstance(dtype, Mapping):
        by_name = cast("Mapping[str, AnyDtype]", dtype)
        return {name: _numpy_dtype(each) for name, each in by_name.items()}
    return None if dtype is None else _numpy_dtype(dtype)


def _numpy_dtype(dtype: AnyDtype) -> np.dtype[Any]:
    try:
        if HAS_TORCH and isinstance(dtype, torch.dtype):
            native = torch.empty(0, dtype=dtype).numpy().dtype
        else:
            native = np.dtype(cast("DTypeLike", dtype))
    except TypeError:
        native = np.dtype(object)
    of_torch = native.isnative and native.itemsize <= np.dtype(np.float64).itemsize
    if native.kind not in "biuf" or not of_torch:
        msg = (
            f"`dtype` must be a numeric dtype that torch has, such as 'float32', but got {dtype!r}"
        )
        raise ParameterError(msg)
    return native
