"""Compiled code that unpacks rows."""

import importlib
import typing

COMPILED_WITH = ("cellfeed.decode._kernels",)

if typing.TYPE_CHECKING:
    from cellfeed.storages.postgres._kernels._unpacking import count_packed, unpack
else:

    def __getattr__(name: str) -> typing.Any:
        return getattr(importlib.import_module(f"{__name__}._unpacking"), name)
