"""Which answer does a request for a file get? Ranges as in RFC 9110."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import format_datetime
from http import HTTPStatus

from tests.servers.faults import ContentRange, Fault, Short, Status, WholeFile

__all__ = ["Answer", "Request", "State", "answer_to", "faulty", "range_of"]


@dataclass(slots=True)
class Request:
    """A request as it came, and what was sent for it.

    `path` is relative to the served folder, names of `headers` are lower case. `range` is the
    first byte and the byte after the last, cut to the file; None for the whole file, or where the
    file has no such bytes. `asked` counts the same method, path and range, from 1. `sent` is in
    bytes of the body, fewer where the client left.
    """

    method: str
    path: str
    query: str
    range: tuple[int, int] | None
    headers: Mapping[str, str] = field(repr=False)
    asked: int
    status: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """The file that is served: its size in bytes, and when it was written, in nanoseconds."""

    size: int
    modified_ns: int
    inode: int

    @property
    def etag(self) -> str:
        return f'"{self.inode:x}-{self.modified_ns:x}-{self.size:x}"'

    @property
    def modified(self) -> datetime:
        return datetime.fromtimestamp(self.modified_ns // 10**9, UTC)


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and headers, then `body`, or the bytes from `start` to `stop` of the file."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    start: int = 0
    stop: int = 0
    length: int | None = None

    def head(self, *, keep: bool) -> bytes:
        """Return status line and headers."""
        length = len(self.body) + self.stop - self.start if self.length is None else self.length
        lines = [f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        lines.append(f"Content-Length: {length}")
        lines.append(f"Connection: {'keep-alive' if keep else 'close'}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the bytes that a Range header asks for; None for what is not one range.

    A range that begins behind the end comes back empty.
    """
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", (header or "").strip())
    if found is None:
        return None
    first, last = found.groups()
    if not first:
        return (max(0, size - int(last)), size) if last else None
    if last and int(last) < int(first):
        return None
    return int(first), max(int(first), min(size, int(last) + 1 if last else size))


def answer_to(method: str, headers: Mapping[str, str], state: State | None) -> Answer:
    """Return the right answer for a file; `state` is None where there is no such file."""
    if method not in {"GET", "HEAD"}:
        return Answer(405, {"Allow": "GET, HEAD"})
    if state is None:
        return Answer(404)
    described = {"ETag": state.etag, "Last-Modified": format_datetime(state.modified, usegmt=True)}
    described |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    asked = range_of(headers.get("range"), state.size)
    if asked is None or method == "HEAD":
        return Answer(200, described, stop=state.size)
    start, stop = asked
    if start >= stop:
        return Answer(416, {"Content-Range": f"bytes */{state.size}"})
    described["Content-Range"] = f"bytes {start}-{stop - 1}/{state.size}"
    return Answer(206, described, start=start, stop=stop)


def faulty(answer: Answer, fault: Fault | None, state: State | None) -> Answer:
    """Return what an answer becomes under a fault that changes header or length."""
    headers = dict(answer.headers)
    match fault:
        case Status(code, others, body):
            return Answer(code, others, body)
        case WholeFile() if state is not None and answer.status == HTTPStatus.PARTIAL_CONTENT:
            del headers["Content-Range"], headers["Accept-Ranges"]
            return Answer(200, headers, stop=state.size)
        case ContentRange(value):
            headers.pop("Content-Range", None)
            return replace(
                answer, headers=headers if value is None else headers | {"Content-Range": value}
            )
        case Short(nbytes, announced=True) if state is not None:
            stop = min(answer.stop, answer.start + nbytes)
            if "Content-Range" in headers:
                headers["Content-Range"] = f"bytes {answer.start}-{stop - 1}/{state.size}"
            return replace(answer, headers=headers, stop=stop)
        case _:
            return answer
