"""Compiled: counters that threads and processes update concurrently."""

from cellfeed._chunks._kernels._native import (
    atomic_add,
)
from cellfeed._compiled import compiled

__all__ = ["count"]


@compiled("void(int64, int64)")
def count(address: int, n: int) -> None:
    """Add to the int64 at an address."""
    atomic_add(address, n)
