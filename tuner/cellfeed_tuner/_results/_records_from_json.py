"""From JSON back to what ``autotune`` found."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import datetime
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["record_from_json"]

_Record = TypeVar("_Record")
_UNKNOWN = "unknown"
_MOST_SHOWN = 40


def record_from_json(kind: type[_Record], plain: Any) -> _Record:
    """Return a dataclass from plain values, checked against the types of its fields.

    Names that are not fields are left aside; fields that are absent take their defaults.

    Raises
    ------
    TypeError, ValueError
        A value is of another type, or a field without default is absent.
    """
    if not isinstance(plain, Mapping):
        msg = f"{kind.__name__}: an object expected, not {_shown(plain)}"
        raise TypeError(msg)
    hints = _hints(kind)
    values = {name: _value(hints[name], plain[name], name) for name in hints if name in plain}
    return kind(**values)


def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(kind: Any, plain: Any, name: str) -> Any:
    if get_origin(kind) in {Union, UnionType}:
        return _one_of(get_args(kind), plain, name)
    if is_dataclass(kind):
        return record_from_json(kind, plain)  # type: ignore[arg-type]
    if get_origin(kind) in {tuple, Mapping}:
        return _collection(kind, plain, name)
    if get_origin(kind) is Literal:
        fits = plain in get_args(kind)
    elif kind is datetime and isinstance(plain, str):
        return datetime.fromisoformat(plain)
    elif kind is float and isinstance(plain, int):
        return _refuse(kind, plain, name) if isinstance(plain, bool) else float(plain)
    else:
        fits = kind is Any or (
            isinstance(plain, kind) and not (kind is int and isinstance(plain, bool))
        )
    return plain if fits else _refuse(kind, plain, name)


def _collection(kind: Any, plain: Any, name: str) -> Any:
    arguments = get_args(kind)
    if get_origin(kind) is tuple and isinstance(plain, list | tuple):
        return tuple(_value(arguments[0], each, name) for each in plain)
    if get_origin(kind) is Mapping and isinstance(plain, Mapping):
        return {key: _value(arguments[1], each, name) for key, each in plain.items()}
    return _refuse(kind, plain, name)


def _refuse(kind: Any, plain: Any, name: str) -> NoReturn:
    msg = f"{name}: {getattr(kind, '__name__', kind)} expected, not {_shown(plain)}"
    raise TypeError(msg)


def _one_of(kinds: Sequence[Any], plain: Any, name: str) -> Any:
    if NoneType in kinds and (plain is None or plain == _UNKNOWN):
        return None
    *others, last = (kind for kind in kinds if kind is not NoneType)
    for kind in others:
        with suppress(TypeError, ValueError):
            return _value(kind, plain, name)
    return _value(last, plain, name)


def _shown(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
