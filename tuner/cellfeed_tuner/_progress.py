"""Progress callbacks."""

from typing import Protocol


class Progress(Protocol):
    """Called with the progress of a stage."""

    def __call__(self, stage: str, done: float, total: float) -> object:
        """Report that ``done`` of ``total`` of a stage is done."""


def silent(stage: str, done: float, total: float) -> None:
    """Report nothing."""
    del stage, done, total
