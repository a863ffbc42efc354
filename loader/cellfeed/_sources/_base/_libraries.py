"""Optional libraries that read a storage, installed with an extra."""

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
        Name of the module.
    location
        The location being opened, for the message.
    what
        Name of the storage, such as "TileDB-SOMA".
    extra
        The extra of cellfeed that installs the library.

    Raises
    ------
    FormatError
        The library is not installed, or cannot be imported.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        msg = f"{location}: reading {what} requires {package}"
        raise FormatError(f"{msg}; install it: pip install 'cellfeed[{extra}]'") from error
