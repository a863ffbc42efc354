"""A DataLoader made again with other settings, and what is known of it without reading.

`torch.utils.data.DataLoader` keeps each argument of its constructor in an attribute of the same
name. So it is made again by that constructor, from these attributes and the changed settings.
Attributes that a subclass added are copied; its own constructor, whose arguments are unknown, is
not called.
"""

import inspect
from collections.abc import Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import DataLoader, IterableDataset

from cellfeed import ParameterError

# Not `shuffle`, which has become a sampler.
_ARGUMENTS = tuple(
    name
    for name in inspect.signature(DataLoader.__init__).parameters
    if name not in {"self", "shuffle"}
)
_OF_WORKERS = {
    "prefetch_factor": None,
    "persistent_workers": False,
    "multiprocessing_context": None,
}


def remade(loader: DataLoader[Any], **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader of the same class with other arguments.

    What only exists with workers (``prefetch_factor``, ``persistent_workers``,
    ``multiprocessing_context``, ``timeout``) is left out without any.

    Raises
    ------
    ParameterError
        It is no DataLoader, or cannot be made again from its attributes.
    """
    arguments = {**_arguments_of(loader), **changed}
    if not arguments["num_workers"]:
        arguments |= {**_OF_WORKERS, "timeout": 0}
    kind = type(loader)
    made: DataLoader[Any] = object.__new__(kind)
    try:
        DataLoader.__init__(made, **arguments)
        vars(made).update({n: each for n, each in vars(loader).items() if n not in vars(made)})
    except (AttributeError, TypeError, ValueError) as error:
        raise ParameterError(_cannot_be_made(kind, changed, str(error))) from error
    if made.num_workers != arguments["num_workers"]:
        raise ParameterError(_cannot_be_made(kind, changed, "it has a num_workers of its own"))
    return made


def _cannot_be_made(kind: type, changed: dict[str, Any], why: str) -> str:
    names = {name: each for name, each in changed.items() if name not in {"dataset", "sampler"}}
    settings = ", ".join(f"{name}={each!r}" for name, each in names.items()) or "its own settings"
    return (
        f"{kind.__name__} cannot be made again with {settings} ({why}); pass a plain "
        "torch.utils.data.DataLoader of the same dataset"
    )


def _arguments_of(loader: Any) -> dict[str, Any]:
    """Return the arguments that make a DataLoader again."""
    kind = type(loader)
    if not isinstance(loader, DataLoader):
        msg = (
            f"`loader` must be a torch.utils.data.DataLoader, but got {kind.__name__}; tune other "
            "loaders with `autotune`, as a `Tunable`"
        )
        raise ParameterError(msg)
    if hasattr(loader, "base_dataloader"):
        msg = f"{kind.__name__} wraps another DataLoader; tune that one, before it is prepared"
        raise ParameterError(msg)
    missing = [name for name in _ARGUMENTS if not hasattr(loader, name)]
    if missing:
        msg = (
            f"{kind.__name__} has no attribute `{missing[0]}`, from which it would be made again; "
            "call DataLoader's constructor in its own"
        )
        raise ParameterError(msg)
    if isinstance(loader.dataset, IterableDataset):
        left_out = {"sampler", "batch_sampler"}
    elif loader.batch_size is not None:
        left_out = {"batch_sampler"}  # which DataLoader makes from the sampler
    elif loader.batch_sampler is not None:
        left_out = {"batch_size", "sampler", "drop_last"}
    else:
        left_out = {"batch_sampler", "drop_last"}
    return {name: getattr(loader, name) for name in _ARGUMENTS if name not in left_out}


@dataclass(frozen=True, slots=True)
class Epoch:
    """What is known of an epoch.

    Parameters
    ----------
    unit
        What is counted: "rows", if the DataLoader makes minibatches of ``batch_size`` rows, or else
        "minibatches", whose sizes are unknown.
    batch_size
        Rows of a minibatch; 1 if minibatches are counted.
    n_minibatches, n_rows
        Of an epoch; None if unknown or infinite.
    is_iterable
        Whether each worker iterates over its own copy of the dataset.
    """

    unit: str
    batch_size: int
    n_minibatches: int | None
    n_rows: int | None
    is_iterable: bool

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> "Epoch":
        """Return what is known of a DataLoader's epochs."""
        is_iterable = isinstance(loader.dataset, IterableDataset)
        unit, batch_size = ("rows", loader.batch_size) if loader.batch_size else ("minibatches", 1)
        if is_iterable:  # whose length need not be true
            return cls(unit, batch_size, None, None, is_iterable)
        try:
            n_minibatches = len(loader)
            n_rows = n_minibatches * batch_size
            if loader.batch_size and not loader.drop_last:
                n_rows = len(cast("Sized", loader.sampler))
        except (TypeError, NotImplementedError):
            return cls(unit, batch_size, None, None, is_iterable)
        return cls(unit, batch_size, n_minibatches, n_rows, is_iterable)
