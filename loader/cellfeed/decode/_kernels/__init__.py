"""The compiled code of chunks, and nothing else, as any change in this folder recompiles all of it.

Each function is compiled (or loaded from disk) when it is first used, and numba is imported then.
Codecs, filters, and the ways to place elements are functions that `decode` calls by address, so
that an epoch compiles only its own. Compiled functions run without the GIL.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from cellfeed.decode._kernels._decoding import advise, decode, head_sizes, resolve
    from cellfeed.decode._kernels._decompression import decompressor, unshuffle
    from cellfeed.decode._kernels._native import count
    from cellfeed.decode._kernels._placing import (
        copy_all,
        crossings_ascend,
        densify,
        place,
        plan_ranges,
        plan_rows,
        plan_selected,
        trim,
    )
    from cellfeed.decode._kernels._selecting import gather, sort_rows
    from cellfeed.decode._kernels._transforming import applier, cast_address, transform_rows
else:
    _MODULES = {
        "_decoding": "advise decode head_sizes resolve",
        "_decompression": "decompressor unshuffle",
        "_native": "count",
        "_placing": (
            "copy_all crossings_ascend densify place plan_ranges plan_rows plan_selected trim"
        ),
        "_selecting": "gather sort_rows",
        "_transforming": "applier cast_address transform_rows",
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULE_OF:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
        globals()[name] = getattr(module, name)
        return globals()[name]
