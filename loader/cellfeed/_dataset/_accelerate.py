"""Integration with Accelerate, which does not replace our loaders but must track their position.

Accelerate replaces each DataLoader that it prepares, and divides its minibatches among ranks. Our
loaders are divided already, so they report that they are prepared.
"""

import sys
from collections.abc import Generator, Iterator
from typing import Any

from cellfeed._errors import ParameterError, StateError

__all__ = ["accumulating", "require_kept_whole"]


def accumulating(loader: Any, minibatches: Iterator[Any]) -> Generator[Any, None, None]:
    """Yield minibatches without keeping the last, as those of Accelerate's active DataLoader.

    At its end, Accelerate synchronises accumulated gradients.
    """
    from accelerate.state import GradientState  # noqa: PLC0415 - only where it is used

    gradients = GradientState()
    gradients._add_dataloader(loader)  # noqa: SLF001 - as its own DataLoaders do
    try:
        yield from minibatches
    finally:
        gradients._remove_dataloader(loader)  # noqa: SLF001


def require_kept_whole(dataset: Any, *, world_size: int, goes_on_elsewhere: bool) -> None:
    """Check that Accelerate, if it iterates over a dataset, uses the dataset's own loader.

    Parameters
    ----------
    dataset
        The dataset.
    world_size
        The number of ranks among which it is divided.
    goes_on_elsewhere
        Whether a state was loaded, which setting the epoch would discard.

    Raises
    ------
    ParameterError
        Accelerate divides it a second time.
    StateError
        Accelerate's own count of epochs would discard the position in the state.
    """
    if not _is_remade(dataset):
        return
    if world_size > 1:
        msg = (
            f"Accelerate divides a DataLoader among {world_size} ranks, but the dataset is "
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
    """Return whether Accelerate starts an iteration over a DataLoader that replaces another."""
    loaders, state = (sys.modules.get(f"accelerate.{name}") for name in ("data_loader", "state"))
    if loaders is None or state is None:
        return False
    active = state.GradientState().active_dataloader
    if not isinstance(active, loaders.DataLoaderAdapter):
        return False
    iterated = active.dataset
    return iterated is dataset or getattr(iterated, "dataset", None) is dataset
