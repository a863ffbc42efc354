"""Packages that are imported when something of them is used, since their imports take long.

Modules import them from here, as ``from cellfeed._lazy import pd``. Annotations that name them must
not be evaluated (``from __future__ import annotations``).
"""

import importlib
import typing

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
