"""The state of a run as plain values: what identifies data and parameters, and the position."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import astuple, fields, is_dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import CellfeedError, ParameterError, StateError, require_integer
from cellfeed._lazy import pd
from cellfeed.bytes import SCHEMES
from cellfeed.collection import Collection
from cellfeed.dataset._run import Position
from cellfeed.rows import Dtypes, dtypes_of
from cellfeed.sampling import ABSENT_BY_DEFAULT, Progress, SamplingStrategy

_FORMAT, _VERSION = "cellfeed state", 2
_EPOCH_LIMIT = 1 << 62
_MOST_PROCESSES = 1 << 20
_MOST_SHOWN = 80  # characters of what is no state
_REMEDIES = {
    "data": ("data", "resume with the files, query or object that it was saved with"),
    "configuration": ("parameters", "resume with the same parameters"),
}


def state_of(identity: Mapping[str, Any], position: Position) -> dict[str, Any]:
    """Return a state: a dictionary of JSON values, a few hundred bytes.

    Parameters
    ----------
    identity
        Identifiers ``data``, ``configuration`` and ``seed``, as JSON values.
    position
        Position of the run.
    """
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        **identity,
        "epoch": position.epoch,
        "after": [list(astuple(each)) for each in position.after],
        "progress": list(astuple(position.progress)),
    }
    return state | {"checksum": _checksum(state)}


def position_of(state: Any, identity: Mapping[str, Any]) -> Position:
    """Return the position in a state.

    Parameters
    ----------
    state
        The result of `state_of`, possibly after a round trip through JSON.
    identity
        The identifiers ``data`` and ``configuration`` that it must have.

    Raises
    ------
    StateError
        It is damaged, of a newer version, or of another run.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        shown = repr(state)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[:_MOST_SHOWN]}..."
        msg = f"the state must be a result of `state_dict`, but got {shown}"
        raise StateError(f"{msg}; load the saved state")
    version = state.get("version")
    if isinstance(version, int) and version > _VERSION:
        msg = f"the state has version {version}, but this cellfeed knows up to {_VERSION}"
        raise StateError(f"{msg}; update cellfeed")
    if version != _VERSION:
        raise StateError(f"the state is damaged: it has {version=}; load an earlier one")
    content = {name: value for name, value in state.items() if name != "checksum"}
    if state.get("checksum") != _checksum(content):
        msg = "the state is damaged: its checksum does not match; load an earlier one"
        raise StateError(msg)
    for name, (what, remedy) in _REMEDIES.items():
        there, here = state.get(name), identity[name]
        there = there if isinstance(there, Mapping) else {}
        differing = [
            f"{each}={there.get(each)!r} there, {each}={here.get(each)!r} here"
            for each in sorted({*there, *here})
            if there.get(each) != here.get(each)
        ]
        if differing:
            msg = f"the state is of other {what}: {'; '.join(differing)}; {remedy}"
            raise StateError(msg)
    try:
        return _position(state)
    except (KeyError, TypeError, ValueError, CellfeedError) as error:
        msg = f"the state is damaged: {error}; load an earlier one"
        raise StateError(msg) from error


def _position(state: Mapping[str, Any]) -> Position:
    parts = [
        Progress(world_size=world_size, n_minibatches=n_minibatches)
        for world_size, n_minibatches in (*state["after"], state["progress"])
    ]
    most = max(each.world_size for each in parts)
    if most > _MOST_PROCESSES:
        raise ValueError(f"it has world_size={most}")
    epoch = require_epoch(state["epoch"])
    return Position(epoch=epoch, after=tuple(parts[:-1]), progress=parts[-1])


def data_identity(collection: Any, n_rows: int) -> dict[str, Any]:
    """Return an identifier of data that does not depend on their location.

    For a collection, it has the names, cells and sizes of its files in order, the selection of each
    source's cells, and the version of sources that are not files or objects, such as databases and
    AnnData in memory. For anything else, it has type, length, shape and dtype.
    """
    if not isinstance(collection, Collection):
        marks = [str(getattr(collection, name, None)) for name in ("shape", "dtype")]
        return {"n_rows": n_rows, "type": type(collection).__name__, "array": marks}
    locations = collection.locations
    digest = hashlib.blake2b(digest_size=16)
    for location, n_cells in zip(locations, collection.cells_per_location, strict=True):
        path = location.path
        size = path.stat().st_size if path is not None and path.is_file() else None
        digest.update(repr((location.name, n_cells, size)).encode())
    data = {"n_rows": n_rows, "n_files": len(locations), "files": digest.hexdigest()}
    contents = []
    for source in collection.sources:
        # Copies of a file or an object have other versions.
        is_copied = source.location.path is not None or source.location.scheme in SCHEMES
        contents.append((source.selection(), None if is_copied else source.version()))
    if any(selection or version for selection, version in contents):
        data["contents"] = hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest()
    return data


def read_identity(collection: Any, dtype: Dtypes) -> dict[str, Any]:
    """Return an identifier of what is read of the data, in which ranks must not differ."""
    if not isinstance(collection, Collection):
        return {}
    elements = collection.elements
    return {
        "elements": [*elements],
        "dtype": [str(each) for each in dtypes_of(elements, dtype).values()],
        # Without maps, they are the genes of the files, in their order.
        "genes": [each.column_maps and _hashed(each.column_names) for each in elements.values()],
    }


def strategy_identity(strategy: SamplingStrategy) -> dict[str, Any]:
    """Return the name of a strategy, and its fields with arrays hashed, or its `identity`.

    Raises
    ------
    ParameterError
        A field has a value that JSON cannot identify.
    """
    return {"strategy": type(strategy).__qualname__} | _fields_of(strategy)


def _fields_of(value: Any) -> dict[str, Any]:
    if isinstance(value, SamplingStrategy) and (identity := value.identity()) is not None:
        return {"identity": as_json(identity, "identity()")}
    absent = {
        each.name
        for each in (fields(value) if is_dataclass(value) else ())
        if each.metadata == ABSENT_BY_DEFAULT and getattr(value, each.name) is each.default
    }
    own = [each.name for each in fields(value)] if is_dataclass(value) else []
    if not (own and type(value).__module__.startswith("cellfeed.")):
        # A subclass of a user may have attributes that are no fields; ours have none that count.
        kept = getattr(value, "__dict__", {})
        own += [n for n in kept if not isinstance(getattr(type(value), n, None), cached_property)]
    names = {*own} - absent
    kind = type(value).__name__
    return {name: as_json(getattr(value, name), f"{kind}.{name}") for name in sorted(names)}


def as_json(value: Any, name: str = "value") -> Any:
    """Return a JSON value that identifies a value, which has a name; arrays are hashed.

    Raises
    ------
    ParameterError
        There is none: two different values would look the same.
    """
    plain: Any = value.item() if isinstance(value, np.generic) else value
    if isinstance(plain, float):
        plain = repr(plain)
    elif isinstance(plain, SamplingStrategy) or hasattr(plain, "__dataclass_fields__"):
        plain = {"type": type(plain).__qualname__} | _fields_of(plain)
    elif isinstance(plain, Mapping):
        plain = {str(key): as_json(each, f"{name}[{key!r}]") for key, each in plain.items()}
    elif isinstance(plain, np.ndarray | pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        plain = _hashed(plain)
    elif isinstance(plain, list | tuple):
        plain = [as_json(each, f"{name}[{k}]") for k, each in enumerate(plain)]
    elif isinstance(plain, set | frozenset):
        plain = sorted((as_json(each, f"a value of {name}") for each in plain), key=json.dumps)
    elif hasattr(plain, "__array__"):  # a tensor
        plain = _hashed(np.asarray(plain))
    elif _is_named(plain):
        plain = f"{plain.__module__}.{plain.__qualname__}"
    elif not (plain is None or isinstance(plain, bool | int | str)):
        msg = (
            f"{name} is a {type(plain).__name__}, which a state cannot identify; make it an array, "
            "a list or numbers, or give the strategy a method `identity()` that returns such values"
        )
        raise ParameterError(msg)
    return plain


def _is_named(value: Any) -> bool:
    """Whether a value is a function or a class that its module has under its name."""
    name, module = getattr(value, "__qualname__", None), getattr(value, "__module__", None)
    return name is not None and getattr(sys.modules.get(str(module)), name, None) is value


def _hashed(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(values, np.ndarray) and values.dtype != object:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    else:
        hashes: NDArray[np.uint64] = pd.util.hash_array(pd.array(values).astype(object))
        digest.update(hashes.data)
    return f"{len(values)} values, blake2b {digest.hexdigest()}"


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def require_epoch(epoch: Any) -> int:
    """Return the number of an epoch as a Python integer.

    Raises
    ------
    ParameterError
        It is not an integer, is negative or is too large.
    """
    if not 0 <= require_integer("epoch", epoch) < _EPOCH_LIMIT:
        msg = f"`0 <= epoch < {_EPOCH_LIMIT}` must hold, but got {epoch=}"
        raise ParameterError(msg)
    return int(epoch)
