"""Compiled code that makes tokens of the rows of a minibatch."""

import importlib
import typing

COMPILED_WITH = ("cellfeed.decode._kernels",)

if typing.TYPE_CHECKING:
    from cellfeed.tokenizers._kernels._tokenizing import (
        NO_LABEL,
        bin_rows,
        mask_rows,
        move_rows,
        rank_rows,
    )
else:

    def __getattr__(name: str) -> typing.Any:
        return getattr(importlib.import_module(f"{__name__}._tokenizing"), name)
