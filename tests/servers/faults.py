"""What can go wrong between a server and its client: what the `answer` of a `WebServer` returns."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "Close",
    "ContentRange",
    "Fault",
    "Hang",
    "Held",
    "Reset",
    "Short",
    "Status",
    "WholeFile",
    "redirect",
]


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset after so many bytes of the body."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """The connection is closed before a header."""


@dataclass(frozen=True, slots=True)
class Hang:
    """Nothing more comes after so many bytes of the body; None: not even a header."""

    after: int | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """Nothing comes until `released` is set; then the answer is as it should be."""

    released: threading.Event


@dataclass(frozen=True, slots=True)
class Short:
    """The body ends after so many bytes.

    The header promises all of them and the connection is closed, or, where `announced`, the header
    says what comes and the connection stays.
    """

    nbytes: int
    announced: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    """Another status, with headers and a body of its own."""

    code: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class ContentRange:
    """The right bytes under another Content-Range; None leaves it out."""

    value: str | None


@dataclass(frozen=True, slots=True)
class WholeFile:
    """200 and the whole file, as of a server that knows no ranges."""


Fault = Reset | Close | Hang | Held | Short | Status | ContentRange | WholeFile


def redirect(url: str, code: int = 302) -> Status:
    """Return the answer that sends the client to another URL."""
    return Status(code, {"Location": url})
