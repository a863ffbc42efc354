"""Sizes on the command line: a list, or a range."""

import re
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["Sizes", "listed"]


class Sizes(click.ParamType[Sequence[int]]):
    """Integers, separated by commas or blanks, or all from one to another, such as 1:4096.

    Parameters
    ----------
    least
        The least there may be.

    Examples
    --------
    >>> Sizes(1).convert("4,16 64", None, None), Sizes(1).convert("1:4096", None, None)
    ((4, 16, 64), range(1, 4097))
    """

    name = "N,N,...|LOW:HIGH"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[int]:
        """Return the sizes."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # the default
        ends = re.fullmatch(r"\s*(-?\d+):(-?\d+)\s*", value)
        texts = ends.groups() if ends else re.split(r"[,\s]+", value.strip(", "))
        if not all(re.fullmatch(r"-?\d+", text) for text in texts):
            self.fail(
                f"{value!r} are not integers; write them as 4,16,64, or a range as 1:4096",
                param,
                ctx,
            )
        sizes = tuple(int(text) for text in texts)
        if min(sizes) < self._least:
            self.fail(f"{min(sizes)} is below {self._least}, the least there may be", param, ctx)
        if not ends:
            return sizes
        low, high = sizes
        if low > high:
            self.fail(f"{value!r} holds nothing; write the lower end first", param, ctx)
        return range(low, high + 1)


def listed(sizes: Sequence[int]) -> str:
    """Return sizes as they are written in a list."""
    return ",".join(map(str, sizes))
