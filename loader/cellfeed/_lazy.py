"""Packages that are imported when something of them is used, since their imports take long.

Modules import them from here, as ``from cellfeed._lazy import pd``. Annotations that name them must
not be evaluated (``from __future__ import annotations``).
"""

import contextlib
import gc
import importlib
import typing
from collections.abc import Iterator

# Objects: the user has frozen them. Python 3.12 itself freezes some hundred.
_MANY_FROZEN = 1_000


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Pause garbage collection during a block that makes many objects which last.

    Imports of PyTorch and numba make a million, and the collector would look at all of them again
    and again: some 6 % of the processor time to a first minibatch.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if gc.get_freeze_count() < _MANY_FROZEN:
                # Moves all objects to the oldest generation. As young ones they would be looked at
                # in each of the next collections.
                gc.freeze()
                gc.unfreeze()
            gc.enable()


if typing.TYPE_CHECKING:
    import anndata as ad
    import pandas as pd
    import scipy.sparse as sp
    import zarr
else:

    class _Package:
        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> typing.Any:
            return getattr(importlib.import_module(self._name), name)

    ad, pd, sp, zarr = map(_Package, ("anndata", "pandas", "scipy.sparse", "zarr"))
