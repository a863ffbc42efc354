"""What extensions share with the core: errors, checks of parameters, packages imported when used.

Nothing here is about cells. A storage begins with `cellfeed.sources`, a strategy with
`cellfeed.sampling`, a transform of rows with `cellfeed.fetch`.
"""

import importlib
import typing

from cellfeed._errors import (
    CellfeedError,
    ColumnError,
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    RemoteError,
    StateError,
    lacks_threads,
    one_line,
    os_errors,
    require_list,
    require_not_negative,
    require_one_of,
    require_positive,
    require_seed,
)
from cellfeed._lazy import ad, pd, sp
from cellfeed._progress import ProgressLine

if typing.TYPE_CHECKING:
    from cellfeed._compiled import compile_everything, compiled
    from cellfeed._torch import require_torch, torch
    from cellfeed.machine import usable_cpu_count
    from cellfeed.rows._minibatch import csr_tensor
else:
    _MODULE_OF = {  # which import numba, PyTorch or psutil
        "compile_everything": "cellfeed._compiled",
        "compiled": "cellfeed._compiled",
        "require_torch": "cellfeed._torch",
        "torch": "cellfeed._torch",
        "csr_tensor": "cellfeed.rows._minibatch",
        "usable_cpu_count": "cellfeed.machine",
    }

    def __getattr__(name: str) -> typing.Any:
        if name not in _MODULE_OF:
            msg = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(msg)
        return getattr(importlib.import_module(_MODULE_OF[name]), name)


__all__ = [
    "CellfeedError",
    "ColumnError",
    "FormatError",
    "MismatchError",
    "ParameterError",
    "PathError",
    "ProgressLine",
    "RemoteError",
    "StateError",
    "ad",
    "compile_everything",
    "compiled",
    "csr_tensor",
    "lacks_threads",
    "one_line",
    "os_errors",
    "pd",
    "require_list",
    "require_not_negative",
    "require_one_of",
    "require_positive",
    "require_seed",
    "require_torch",
    "sp",
    "torch",
    "usable_cpu_count",
]
