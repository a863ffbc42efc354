"""What went wrong at a server, whether it may pass, and the words for it."""

import re

from cellfeed._bytes import Location
from cellfeed._errors import CellfeedError, FormatError, PathError, RemoteError

__all__ = [
    "ChangedError",
    "ShortError",
    "failure",
    "is_of_server",
    "is_overload",
    "may_pass",
]

_STATUS = re.compile(r"status code: (\d{3})")
_OVERLOADED = (429, 503)
_MAY_PASS = (408, 425, 429)
_SERVER_ERRORS = 500
_CLIENT_ERRORS = 400
_FINAL = (
    "NotFoundError",
    "FileNotFoundError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "PreconditionError",
    "InvalidPathError",
    "NotSupportedError",
    "UnknownConfigurationKeyError",
)


class ChangedError(Exception):
    """An object is another one than was opened."""


class ShortError(Exception):
    """A server returned fewer bytes than it was asked for."""


def is_of_server(error: BaseException) -> bool:
    """Return whether an error is obstore's."""
    return type(error).__module__.startswith("obstore")


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error of obstore tells of, None if there is none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def is_overload(error: BaseException) -> bool:
    """Return whether the server asks for fewer requests."""
    return _status_of(error) in _OVERLOADED


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, ChangedError) or type(error).__name__ in _FINAL:
        return False
    if not isinstance(error, Exception):
        return False
    if _ignores_ranges(error):
        return False
    status = _status_of(error)
    return (
        status is None
        or status in _MAY_PASS
        or status >= _SERVER_ERRORS
        or not status >= _CLIENT_ERRORS
    )


def failure(
    error: BaseException, location: Location, first: int | None = None, stop: int | None = None
) -> CellfeedError:
    """Return what is raised in place of an error of obstore: one line with where and the remedy.

    Parameters
    ----------
    error
        What a request ended with.
    location
        The object.
    first, stop
        The bytes that were asked for, if it was some.
    """
    where = str(location)
    if first is not None:
        where += f" (bytes {first} to {stop})" if stop is not None else f" (from byte {first})"
    if isinstance(error, ChangedError):
        msg = f"{location}: was replaced or written to since it was opened; open it again"
        return FormatError(msg)
    kind, status = type(error).__name__, _status_of(error)
    if kind in ("NotFoundError", "FileNotFoundError"):
        return PathError(f"{location}: there is no such object; check the URL")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        what = f"the server refuses it ({status or 'no credentials'})"
        remedy = "give valid credentials in `storage_options`, or renew those that expired"
    elif _ignores_ranges(error):
        what, remedy = "the server returns no byte ranges", "download it, or use another server"
    elif isinstance(error, ShortError):
        what = "the server returned fewer bytes than it has"
        remedy = "upload it again if that goes on"
    elif status is not None and _CLIENT_ERRORS <= status < _SERVER_ERRORS:
        what = f"the server refuses it ({_said(error)})"
        remedy = "check the URL and `storage_options`; renew credentials that expired"
    else:
        what = f"the server does not give it ({_said(error)})"
        remedy = "check that it can be reached, and try again"
    return RemoteError(f"{where}: {what}; {remedy}")


def _ignores_ranges(error: BaseException) -> bool:
    said = str(error)
    return "NotPartial" in said or "non-partial response" in said


def _said(error: BaseException) -> str:
    """Return the last part of the first line of what obstore says: what the server answered."""
    line = str(error).partition("\n")[0].strip()
    said = line.rpartition(" - ")[2] if " - " in line else line
    said = re.sub(r"https?://\S+", "", said)  # it is named already, and may be signed
    return " ".join(said.removeprefix("Server returned non-2xx ").split())[:160]
