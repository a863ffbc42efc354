"""torch, if it is installed; without it, minibatches are in NumPy and SciPy.

Modules that also work without torch import it from here.
"""

import typing
from typing import Generic, TypeVar

HAS_TORCH: bool

if typing.TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info
else:
    try:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader, IterableDataset, default_convert, get_worker_info

        HAS_TORCH = True
    except ModuleNotFoundError as error:
        if error.name != "torch":  # it is there, and lacks something
            raise
        HAS_TORCH = False
        torch = dist = default_convert = None
        _Item = TypeVar("_Item")

        class DataLoader(Generic[_Item]):
            """Stand-in for torch's DataLoader; never instantiated."""

        class IterableDataset(Generic[_Item]):
            """Stand-in base class: without torch, a plain loop iterates."""

        def get_worker_info() -> None:
            """Return None, as in a process that is no worker of a DataLoader."""


def require_torch(what: str) -> None:
    """Check that torch is installed.

    Raises
    ------
    ImportError
        torch is not installed; the message names what needs it.
    """
    if not HAS_TORCH:
        msg = f"{what} needs PyTorch, which is not installed; install it with `pip install torch`"
        raise ImportError(msg, name="torch")
