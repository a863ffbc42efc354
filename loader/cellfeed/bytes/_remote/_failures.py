"""Errors of servers: whether they may pass, and how messages describe them."""

import re

from cellfeed._errors import CellfeedError, FormatError, PathError, RemoteError
from cellfeed.bytes._location import Location

_STATUS = re.compile(r"status code: (\d{3}[ A-Za-z-]*)")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:Code|code|error)\": *\"(\w+)\"")
_CAUSES = {  # in what obstore adds for developers
    "TimedOut": (
        "no answer in time; raise the limit in `client_options` (`read_timeout`, `timeout`)"
    ),
    "kind: Timeout": (
        "no answer in time; raise the limit in `client_options` (`read_timeout`, `timeout`)"
    ),
    "dns error": "its host name is unknown",
    "ConnectionRefused": "the connection is refused",
    "ConnectionReset": "the connection was reset",
    "UnexpectedEof": "the connection was closed in the middle of the answer",
    "IncompleteMessage": "the connection was closed before an answer",
    "TooManyRedirects": "it redirects in a circle",
    "InvalidContentType": "it does not speak TLS; is the URL `http://`?",
    "BadScheme": "it redirects to an unencrypted URL",
    "invalid peer certificate": "its certificate is not valid",
}
_OVERLOADED = (429, 503)
_MAY_PASS = (408, 425, 429)
_PAST_THE_END = 416
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


class AnswerError(Exception):
    """An answer is not what was requested."""


class ChangedError(AnswerError):
    """An object has changed since it was opened."""


class EncodedError(AnswerError):
    """A server compresses what it sends, so that ranges are not those of the object.

    Parameters
    ----------
    encoding
        Its ``Content-Encoding``.
    """


class LengthError(AnswerError):
    """A server returned more or fewer bytes than were requested.

    Parameters
    ----------
    n_bytes, n_requested
        Numbers of bytes that came, and that were requested.
    """


def is_of_server(error: BaseException) -> bool:
    """Return whether an error was raised by obstore."""
    return type(error).__module__.startswith("obstore")


def is_of_request(error: BaseException) -> bool:
    """Return whether an error is of a connection, a server or its answer, not of our own code."""
    # obstore raises `FileNotFoundError` where there is no such object.
    of_request = AnswerError, ConnectionError, TimeoutError, FileNotFoundError
    return is_of_server(error) or isinstance(error, of_request)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of obstore, None if it contains none."""
    found = _STATUS.search(str(error))
    return int(found[1][:3]) if found else None


def is_missing(error: BaseException) -> bool:
    """Return whether the error means that the object does not exist."""
    return isinstance(error, FileNotFoundError) or type(error).__name__ == "NotFoundError"


def is_overload(error: BaseException) -> bool:
    """Return whether the server asks for fewer requests."""
    return _status_of(error) in _OVERLOADED


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    if isinstance(error, AnswerError):
        return isinstance(error, LengthError)
    if not is_of_request(error) or type(error).__name__ in _FINAL:
        return False
    status = _status_of(error)
    is_final = status is not None and _CLIENT_ERRORS <= status < _SERVER_ERRORS
    return not is_final or status in _MAY_PASS


def failure(
    error: BaseException, location: Location, first: int | None = None, stop: int | None = None
) -> CellfeedError:
    """Return the exception that replaces an error of a request: one line with place and remedy.

    Parameters
    ----------
    error
        An error for which `is_of_request` is true.
    location
        The object.
    first, stop
        The requested bytes, if it was a range.
    """
    where = str(location)
    if first is not None:
        where += f" (bytes {first} to {stop})" if stop is not None else f" (from byte {first})"
    kind, status = type(error).__name__, _status_of(error)
    if isinstance(error, ChangedError) or status == _PAST_THE_END:
        msg = f"{where}: was replaced or written to since it was opened; open it again"
        return FormatError(msg)
    if is_missing(error):
        return PathError(f"{where}: there is no such object; check the URL")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        what = f"the server refuses it ({_said(error) or 'no credentials'})"
        remedy = "give valid credentials in `storage_options`, or renew those that expired"
    elif kind == "NotSupportedError" and first is not None:
        what, remedy = "the server returns no byte ranges", "download it, or use another server"
    elif isinstance(error, LengthError):
        n_bytes, n_requested = error.args
        what = f"the server returned {n_bytes:,} bytes, not {n_requested:,}"
        remedy = "upload it again if that persists"
    elif isinstance(error, EncodedError):
        what = f"the server compresses it (Content-Encoding: {error.args[0]}), also byte ranges"
        remedy = "turn that off for such files"
    elif status is not None and _CLIENT_ERRORS <= status < _SERVER_ERRORS and not may_pass(error):
        what = f"the server refuses it ({_said(error)})"
        remedy = "check the URL and `storage_options`; renew credentials that expired"
    else:
        what = f"the server does not return it ({_said(error)})"
        remedy = "check that it can be reached, and try again"
    return RemoteError(f"{where}: {what}; {remedy}")


def _said(error: BaseException) -> str:
    """Return the server's answer, or why there is none, without secrets that it may repeat.

    The text of an answer may repeat parts of the request, such as credentials, so only an error
    code is taken from it.
    """
    line, _, details = str(error).partition("\n")
    found = _STATUS.search(line)
    if found is not None:
        code = _CODE.search(str(error))
        return found[1].strip() + (f": {code[1] or code[2]}" if code else "")
    cause = next((words for sign, words in _CAUSES.items() if sign in details), None)
    if cause is not None:
        return cause
    said = re.sub(r"^Generic \w+ error: ", "", line.rpartition(" - ")[2])
    said = re.sub(r"https?://\S+", "", said)  # the message names it already, and it may be signed
    return " ".join(said.split())[:160]


def cancelled(location: Location) -> RemoteError:
    """Return the exception that is raised if reading is cancelled."""
    return RemoteError(
        f"{location}: reading was cancelled, since nothing waits for it; read it again"
    )
