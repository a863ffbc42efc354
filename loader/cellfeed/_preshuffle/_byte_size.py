"""Sizes in memory as people write them."""

import re
from typing import Any

import click

__all__ = ["ByteSize"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class ByteSize(click.ParamType[int]):
    """A size on the command line, such as 800MB or 8GiB, in bytes.

    Examples
    --------
    >>> ByteSize().convert("1.5GB", None, None)
    1500000000
    """

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([kmgt]?i?)b?", str(value).strip().lower())
        units = _UNITS | _BINARY_UNITS
        if match is None or match[2] not in units:
            self.fail(f"{value!r} is no size; write it as 800MB or 8GiB", param, ctx)
        return int(float(match[1]) * units[match[2]])
