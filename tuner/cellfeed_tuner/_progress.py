"""How far the work has come, for a caller who wants to know."""

from typing import Protocol

__all__ = ["Progress", "silent"]


class Progress(Protocol):
    """Who is told how far the work has come."""

    def __call__(self, stage: str, done: float, total: float) -> object:
        """Be told that ``done`` of ``total`` of a stage is done."""


def silent(stage: str, done: float, total: float) -> None:
    """Tell nobody."""
    del stage, done, total
