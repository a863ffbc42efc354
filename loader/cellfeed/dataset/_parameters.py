"""The parameters that control how a dataset reads its collection, checked and converted."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, get_args

import numpy as np
import psutil
from numpy.typing import DTypeLike

from cellfeed._errors import ParameterError, require_one_of, require_positive
from cellfeed._torch import HAS_TORCH, torch
from cellfeed.decode import Verify
from cellfeed.fetch import RowTransform, Transforms, split_steps
from cellfeed.machine import usable_memory_bytes
from cellfeed.rows import Dtypes, Element
from cellfeed.transforms import Log1p, NormalizeTotal, Transform

AnyDtype: TypeAlias = "DTypeLike | torch.dtype"
Step: TypeAlias = Transform | RowTransform
AnyTransform: TypeAlias = Step | Sequence[Step] | Mapping[str, Step | Sequence[Step]]

_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How each process reads a `Collection`. Nothing here changes minibatches or their order.

    Parameters
    ----------
    num_threads
        Number of threads in each process that read and decode. If None, the number of processors
        available to this process, divided among its worker processes and the ranks on this
        machine.
    prefetch
        How many fetches are planned and requested beyond the one being decoded, which is itself one
        ahead of the one being delivered. If None, 1 for local files, and 8 if any file is on a
        server or in an object store.
    prefetch_bytes
        Maximum number of compressed bytes in flight from servers and object stores, in each
        process, whatever ``prefetch`` is. One fetch may always be in flight.
    verify
        How often to decompress a chunk to its end, where its checksum is and where its size can be
        checked: ``"first"``, the first time that each process reads the chunk (forked workers
        share what they have checked), and after that only as far as its rows are needed;
        ``"always"``, each time; or ``"never"``, which is fastest from the first epoch on, and
        delivers the contents of a damaged chunk as long as it can be decompressed that far.

    Raises
    ------
    ParameterError
        A number is below one, or ``verify`` is another word.

    Examples
    --------
    >>> ReadOptions(num_threads=4).prefetch_bytes
    268435456
    """

    num_threads: int | None = None
    prefetch: int | None = None
    prefetch_bytes: int = 256 * 2**20
    verify: Verify = "first"

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("num_threads", "prefetch", "prefetch_bytes"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        require_one_of("verify", self.verify, get_args(Verify))


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


def check_memory(n_bytes: float) -> None:
    """Warn if fetches take more memory than is available, of which the system gives no notice.

    Raises
    ------
    ParameterError
        They take more than this machine has.
    """
    available, there_is = usable_memory_bytes(), psutil.virtual_memory().total
    remedy = "choose a smaller `batch_size` or `fetch_factor`"
    taken = f"fetches take about {n_bytes / 1e6:,.0f} MB of memory"
    if n_bytes > there_is:
        msg = f"{taken}, but this machine has {there_is / 1e6:,.0f} MB; {remedy}"
        raise ParameterError(msg)
    if n_bytes > available:
        msg = f"{taken}, but {available / 1e6:,.0f} MB are available; {remedy}"
        warnings.warn(msg, UserWarning, stacklevel=3)


def numpy_dtypes(dtype: AnyDtype | Mapping[str, AnyDtype] | None) -> Dtypes:
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


def transforms_of(
    transform: AnyTransform | None,
    elements: Mapping[str, Element],
    *,
    are_placed: bool,
) -> Transforms:
    """Return the transforms of each element that has any.

    Parameters
    ----------
    transform
        Transforms of the first element, or of some elements by name; see `CellDataset`.
    elements
        The elements to read.
    are_placed
        Whether rows are read directly into minibatches.

    Raises
    ------
    ParameterError
        ``transform`` has something else, names a missing element, or does not fit an element.
    """
    if transform is None:
        return {}
    by_name = transform if isinstance(transform, Mapping) else {next(iter(elements)): transform}
    found = {name: _sequence(each) for name, each in by_name.items()}
    for name, transforms in found.items():
        if name not in elements:
            there = ", ".join(map(repr, elements))
            msg = f"`transform` names {name!r}, which is not among the elements read: {there}"
            raise ParameterError(msg)
        of_values, of_rows = split_steps(transforms)
        if of_values:
            _require_numbers(elements[name])
        if of_rows is not None:
            of_rows.require_fit(elements[name])
            if not are_placed:
                msg = (
                    f"{of_rows!r} is applied to whole minibatches; leave out `fetch_transform` and "
                    "`batch_callback`, or use `batch_transform`"
                )
                raise ParameterError(msg)
    replaced = [name for name, each in found.items() if split_steps(each)[1] is not None]
    if len(replaced) > 1:
        msg = (
            f"one element may have a tokenizer, but {replaced[0]!r} and {replaced[1]!r} have; "
            "make the tokens of the other in `batch_transform`"
        )
        raise ParameterError(msg)
    return {name: transforms for name, transforms in found.items() if transforms}


def _sequence(transform: Any) -> tuple[Step, ...]:
    given = transform if isinstance(transform, Sequence) else [transform]
    for each in given:
        if not isinstance(each, NormalizeTotal | Log1p | RowTransform):
            msg = (
                "`transform` must be from `cellfeed.transforms` or `cellfeed.tokenizers`, but got "
                f"{each!r}; give functions as `batch_transform`, masks as `masking=` of a tokenizer"
            )
            raise ParameterError(msg)
    are_of_rows = [isinstance(each, RowTransform) for each in given]
    if are_of_rows != sorted(are_of_rows) or sum(are_of_rows) > 1:
        msg = "`transform` must have transforms of values first, then at most one of rows, such as"
        raise ParameterError(f"{msg} a tokenizer, but got {list(given)!r}")
    return tuple(given)


def _require_numbers(element: Element) -> None:
    if element.layout == "ragged" or element.dtype.names is not None:
        what = "rows of any length" if element.layout == "ragged" else "values with fields"
        msg = (
            f"{element.name!r} has {what}, which `transform` does not support; use "
            "`batch_transform`"
        )
        raise ParameterError(msg)


def float_dtypes(elements: Mapping[str, Element], dtype: Dtypes, transforms: Transforms) -> Dtypes:
    """Return the dtypes for reading, float32 or float64 for transformed elements.

    Other stored values, such as integer counts, are read as float32.

    Raises
    ------
    ParameterError
        Another dtype is requested.
    """
    as_floats = dict[str, np.dtype[Any]]()
    for name in transforms:
        asked = dtype.get(name) if isinstance(dtype, Mapping) else dtype
        if asked is not None and asked not in _FLOATS:
            msg = (
                f"`dtype` must be float32 or float64 with a `transform`, but got {asked} for "
                f"{name!r}; leave it out to read such values as float32"
            )
            raise ParameterError(msg)
        if asked is None and elements[name].dtype not in _FLOATS:
            as_floats[name] = _FLOATS[0]
    if not as_floats:
        return dtype
    return as_floats | (dict(dtype) if isinstance(dtype, Mapping) else {})
