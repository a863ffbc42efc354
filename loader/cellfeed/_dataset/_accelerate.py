"""Accelerate, which leaves our loaders as they are, and has to know where they are.

Accelerate makes a new DataLoader of any that it prepares, and divides what that delivers among
ranks. Ours are divided already, so that they say that they are prepared.
"""

import sys
from collections.abc import Generator, Iterator
from typing import Any

from cellfeed._errors import ParameterError, StateError

__all__ = ["accumulating", "require_kept_whole"]


def accumulating(loader: Any, minibatches: Iterator[Any]) -> Generator[Any, None, None]:
    """Pass minibatches on, without keeping the last, as those of Accelerate's active DataLoader.

    At the end of it, gradients are synchronised that were accumulated.
    """
    from accelerate.state import GradientState  # noqa: PLC0415 - only where it is used

    gradients = GradientState()
    gradients._add_dataloader(loader)  # noqa: SLF001 - as its own DataLoaders do
    try:
        yield from minibatches
    finally:
        gradients._remove_dataloader(loader)  # noqa: SLF001


def require_kept_whole(dataset: Any, *, world_size: int, goes_on_elsewhere: bool) -> None:
    """Check that a data set, if Accelerate iterates over it, comes in a loader of its own.

    Parameters
    ----------
    dataset
        The data set.
    world_size
        Among how many ranks it is divided.
    goes_on_elsewhere
        Whether a state was loaded, which an epoch that is set would drop.

    Raises
    ------
    ParameterError
        Accelerate divides it a second time.
    StateError
        Accelerate's own count of epochs drops the place in the state.
    """
    if not _is_remade(dataset):
        return
    if world_size > 1:
        msg = (
            f"Accelerate divides a DataLoader among {world_size} ranks, but the data set is "
            "already divided among them, so cells would be missing; pass "
            "`dataset.loader(...)` to `accelerator.prepare`"
        )
        raise ParameterError(msg)
    if goes_on_elsewhere:
        msg = (
            "Accelerate counts the epochs of a DataLoader from 0, which would discard the "
            "loaded state; pass `dataset.loader(...)` to `accelerator.prepare`"
        )
        raise StateError(msg)


def _is_remade(dataset: Any) -> bool:
    """Return whether Accelerate begins to iterate over a DataLoader that it made of another."""
    loaders, state = (sys.modules.get(f"accelerate.{name}") for name in ("data_loader", "state"))
    if loaders is None or state is None:
        return False
    active = state.GradientState().active_dataloader
    if not isinstance(active, loaders.DataLoaderAdapter):
        return False
    iterated = active.dataset
    return iterated is dataset or getattr(iterated, "dataset", None) is dataset
