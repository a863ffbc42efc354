"""Compiled code that reads footers and pages of Parquet files."""

import importlib
import typing

COMPILED_WITH = ("cellfeed.decode._kernels",)

if typing.TYPE_CHECKING:
    from cellfeed.storages.parquet._kernels._footers import read_footer
    from cellfeed.storages.parquet._kernels._pages import find_pages, open_lists, write_lists
    from cellfeed.storages.parquet._kernels._snappy import snappy
else:
    _MODULES = {
        "_footers": "read_footer",
        "_pages": "find_pages open_lists write_lists",
        "_snappy": "snappy",
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULE_OF:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
