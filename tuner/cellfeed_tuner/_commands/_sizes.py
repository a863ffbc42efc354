"""Lists of sizes on the command line."""

import re
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["Sizes", "listed"]


class Sizes(click.ParamType[tuple[int, ...]]):
    """Integers, separated by commas or blanks.

    Parameters
    ----------
    least
        None may be below it.
    """

    name = "N,N,..."

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the integers."""
        if isinstance(value, tuple):
            return value
        texts = re.split(r"[,\s]+", str(value).strip(", "))
        if not all(re.fullmatch(r"-?\d+", text) for text in texts):
            self.fail(f"{value!r} are not integers; write them as 4,16,64", param, ctx)
        sizes = tuple(int(text) for text in texts)
        if min(sizes) < self._least:
            self.fail(f"{min(sizes)} is below {self._least}, the least there may be", param, ctx)
        return sizes


def listed(sizes: Sequence[int]) -> str:
    """Return sizes as they are written on the command line."""
    return ",".join(map(str, sizes))
