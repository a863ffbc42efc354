"""Data modules for the frameworks that train: each is a module of its own."""

import importlib
import typing

__all__: list[str] = []

_MODULES = ("lightning", "scvi", "state", "transformers")  # there without an import of their own

if not typing.TYPE_CHECKING:

    def __getattr__(name: str) -> typing.Any:
        if name in _MODULES:
            return importlib.import_module(f"{__name__}.{name}")
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_MODULES})
