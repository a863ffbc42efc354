"""Sizes in bytes, as people write them."""

import re
from decimal import Decimal

from cellfeed._errors import ParameterError, require_positive

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_size(value: object, name: str = "size") -> int:
    """Return a number of bytes, at least 1.

    Parameters
    ----------
    value
        A size such as ``"800MB"`` (decimal) or ``"8GiB"`` (binary), or an integer.
    name
        Name of the parameter, for the message.

    Raises
    ------
    ParameterError
        ``value`` is not a size, or zero.

    Examples
    --------
    >>> parse_size("1.5GB"), parse_size("8 KiB"), parse_size(300)
    (1500000000, 8192, 300)
    """
    if not isinstance(value, str):
        return require_positive(name, value)
    match = re.fullmatch(
        r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*([kmgt]?i?)b?", value.strip().lower(), re.ASCII
    )
    units = _UNITS | _BINARY_UNITS
    if match is None or match[2] not in units:
        msg = f"`{name}` must be a size such as 800MB or 8GiB, but got {name}={value!r}"
        raise ParameterError(msg)
    return require_positive(name, int(Decimal(match[1]) * units[match[2]]))
