"""Exceptions that cellfeed raises for a user's mistake or an unusable file.

::

    CellfeedError
    ├── PathError        (FileNotFoundError)  a path that is missing, or matches nothing
    ├── RemoteError      (OSError)            a server that does not deliver the requested bytes
    ├── FormatError      (ValueError)         a file that is damaged, or has an unknown format
    ├── MismatchError    (ValueError)         files that cannot form one collection
    ├── ColumnError      (LookupError)        an obs column that is absent or unusable
    ├── ParameterError   (ValueError)         an invalid parameter
    ├── DeliveryError    (RuntimeError)       minibatches that cannot reach the training loop
    └── StateError       (ValueError)         a state from which a run cannot be resumed

Each message is one line: what is wrong, where, and the remedy.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any


class CellfeedError(Exception):
    """Base class of the exceptions that cellfeed raises."""


class PathError(CellfeedError, FileNotFoundError):
    """A path is missing, or a folder or pattern matches no file."""


class RemoteError(CellfeedError, OSError):
    """A server cannot be reached, refuses, or does not deliver the requested bytes."""


class FormatError(CellfeedError, ValueError):
    """A file is truncated, damaged, or not in a format that cellfeed reads."""


class MismatchError(CellfeedError, ValueError):
    """Files differ in such a way that they cannot form one collection."""


class ColumnError(CellfeedError, LookupError):
    """An obs column is absent, or its values cannot be used."""


class ParameterError(CellfeedError, ValueError):
    """A parameter is invalid."""


class DeliveryError(CellfeedError, RuntimeError):
    """Minibatches cannot reach the training loop: a worker lost some, or the process is a fork."""


class StateError(CellfeedError, ValueError):
    """The state of a run cannot be saved, or is damaged, of a newer version or of another run."""


def require_integer(name: str, value: Any) -> int:
    """Return ``value`` as a Python integer, which cannot overflow as NumPy's can.

    Raises
    ------
    ParameterError
        ``value`` is not an integer.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        msg = f"`{name}` must be an integer, but got {name}={value!r}"
        raise ParameterError(msg)
    return int(value)


def require_seed(value: Any) -> int:
    """Return a seed as a Python integer; as NumPy's and torch's, it is not negative.

    Raises
    ------
    ParameterError
        It is negative or not an integer.
    """
    return require_not_negative("seed", value)


def require_not_negative(name: str, value: Any) -> int:
    """Return ``value`` as a Python integer that is zero or above.

    Raises
    ------
    ParameterError
        ``value`` is negative or not an integer.
    """
    if require_integer(name, value) < 0:
        msg = f"`{name} >= 0` must hold, but got {name}={value!r}"
        raise ParameterError(msg)
    return int(value)


def require_positive(name: str, value: Any) -> int:
    """Return ``value`` as a Python integer above zero.

    Raises
    ------
    ParameterError
        ``value`` is zero, negative or not an integer.
    """
    if require_integer(name, value) < 1:
        msg = f"`{name} >= 1` must hold, but got {name}={value!r}"
        raise ParameterError(msg)
    return int(value)


def require_one_of(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Check that a parameter is one of a few values.

    Raises
    ------
    ParameterError
        It is something else.
    """
    if value not in choices:
        msg = f"`{name}` must be one of {', '.join(map(repr, choices))}, but got {value!r}"
        raise ParameterError(msg)


def require_list(name: str, of: str, value: Any) -> None:
    """Check that a parameter is a list, no text, and no set, whose order differs by process.

    Raises
    ------
    ParameterError
        It is something else.
    """
    if isinstance(value, str):
        msg = f"`{name}` must be a list of {of}, but got the text {value!r}; write [{value!r}]"
        raise ParameterError(msg)
    if not isinstance(value, Iterable):
        msg = f"`{name}` must be a list of {of}, but got {value!r}"
        raise ParameterError(msg)
    if isinstance(value, set | frozenset):
        msg = f"`{name}` must be a list of {of}, but got a set, which has no order"
        raise ParameterError(f"{msg}; give a sorted list")


def lacks_threads(error: BaseException) -> bool:
    """Return whether an error is Python's at the limit of processes, a `RuntimeError`."""
    return str(error) == "can't start new thread"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


@contextmanager
def os_errors(path: "str | os.PathLike[str]") -> Iterator[None]:
    """Raise errors of the system, such as a full disk, as `OSError` with a path.

    Libraries that write files name the system's error only in their messages (HDF5, zarrs), or
    hide it behind another one (HDF5).
    """
    try:
        yield
    except CellfeedError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        hidden = error.__context__ if isinstance(error, RuntimeError) else None
        numbers = [getattr(each, "errno", None) for each in (error, hidden)]
        named = re.search(r"\(os error (\d+)\)|\berrno = (\d+)", f"{error} {hidden}")
        numbers += [int(each) for each in (named.groups() if named else ()) if each]
        number = next(filter(None, numbers), None)
        if number is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
