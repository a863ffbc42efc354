"""Dataclasses as plain JSON values and back; and files that are replaced atomically."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import msgspec
import numpy as np

from cellfeed_tuner._configuration import Configuration, Setting

__all__ = ["INFINITE_IF_NULL", "from_plain", "replaced_file", "to_plain"]

_Record = TypeVar("_Record")
# Ends of intervals may be infinite; JSON has no infinity, so null stands for it.
INFINITE_IF_NULL = {"low": -math.inf, "high": math.inf}


def to_plain(record: object) -> Any:
    """Return a dataclass as dictionaries, lists and plain values, with None for infinity."""
    return _finite(msgspec.to_builtins(record, enc_hook=_item))


def from_plain(kind: type[_Record], plain: object) -> _Record:
    """Return a dataclass from plain values, or raise `msgspec.ValidationError`.

    Unknown names are ignored; absent fields take their defaults.
    """
    return msgspec.convert(_infinite(plain), kind, dec_hook=_configuration)


def _configuration(kind: type, plain: Any) -> object:
    if kind is not Configuration:
        msg = f"{kind.__name__} has no plain value"
        raise NotImplementedError(msg)
    settings = msgspec.convert(plain, dict[str, Setting])
    return Configuration(**cast("dict[str, Any]", settings))


def _item(value: object) -> object:
    if isinstance(value, Configuration):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    msg = f"{value!r} has no plain value"
    raise TypeError(msg)


def _finite(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {name: _finite(each) for name, each in plain.items()}
    if isinstance(plain, list | tuple):
        return [_finite(each) for each in plain]
    return None if isinstance(plain, float) and not math.isfinite(plain) else plain


def _infinite(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {
            name: INFINITE_IF_NULL.get(name) if each is None else _infinite(each)
            for name, each in plain.items()
        }
    return [_infinite(each) for each in plain] if isinstance(plain, list) else plain


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces another once it is complete; on an error, nothing is left of it.

    An `OSError` names the path.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "result.json"
    >>> with replaced_file(path) as file:
    ...     _ = file.write(b"{}")
    >>> path.read_text()
    '{}'
    """
    target = path.resolve()  # replace the target of a link, not the link
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        unfinished.replace(target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)
