"""Libraries that read a storage, and are installed with an extra."""

from importlib import import_module
from typing import Any

from cellfeed._bytes import Location
from cellfeed._errors import FormatError

__all__ = ["library"]


def library(name: str, location: Location, *, what: str, extra: str) -> Any:
    """Return a module that only some storages need, imported when one of them is opened.

    Parameters
    ----------
    name
        The module.
    location
        What is being opened, for the message.
    what
        What it is, such as "TileDB-SOMA".
    extra
        The extra of cellfeed that installs the library.

    Raises
    ------
    FormatError
        It is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        msg = f"{location}: {what} is read with {package}"
        raise FormatError(f"{msg}; install it: pip install 'cellfeed[{extra}]'") from error
