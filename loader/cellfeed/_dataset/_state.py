"""The state of a run as plain values: identifiers, and the position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import SCHEMES
from cellfeed._collection import Collection
from cellfeed._dataset._epochs import require_epoch
from cellfeed._dataset._run import Place
from cellfeed._errors import CellfeedError, StateError, require_integer
from cellfeed._lazy import pd
from cellfeed._sources import Source
from cellfeed.sampling import ABSENT_BY_DEFAULT, Progress, SamplingStrategy

__all__ = ["as_json", "data_identity", "place_of", "state_of", "strategy_identity"]

_FORMAT, _VERSION = "cellfeed state", 1
_CONTENTS = "contents"  # of data: a digest of selections and versions, if there are any
_MOST_SHOWN = 80  # characters of what is no state
_REMEDY = {
    "data": "resume with the files, query or object that it was saved with",
    "configuration": "resume with the same parameters",
    "seed": "leave `seed` out, or give the same",
}


def state_of(identity: Mapping[str, Any], place: Place) -> dict[str, Any]:
    """Return a state: a dictionary of JSON values, a few hundred bytes.

    Parameters
    ----------
    identity
        Identifiers ``data``, ``configuration`` and ``seed``, as JSON values.
    place
        Position of the run.
    """
    state = {
        "format": _FORMAT,
        "version": _VERSION,
        **identity,
        "epoch": place.epoch,
        "after": [_written(each) for each in place.after],
        "progress": _written(place.progress),
        "worker": place.worker,
    }
    return state | {"checksum": _checksum(state)}


def place_of(state: Any, identity: Mapping[str, Any]) -> Place:
    """Return the position in a state.

    Parameters
    ----------
    state
        The result of `state_of`, possibly after a round trip through JSON.
    identity
        The identifiers that it must have. Without ``seed``, any seed is accepted.

    Raises
    ------
    StateError
        It is damaged, of a newer version, or of another run.
    """
    if not isinstance(state, Mapping) or state.get("format") != _FORMAT:
        msg = f"the state must be a result of `state_dict`, but got {_shortened(state)}"
        raise StateError(f"{msg}; load the saved state")
    if isinstance(state.get("version"), int) and state["version"] > _VERSION:
        msg = (
            f"the state has version {state['version']}, but this cellfeed knows up to {_VERSION}; "
            "update cellfeed"
        )
        raise StateError(msg)
    content = {name: value for name, value in state.items() if name != "checksum"}
    if state.get("checksum") != _checksum(content):
        msg = "the state is damaged: its checksum does not match; load an earlier one"
        raise StateError(msg)
    for name, here in identity.items():
        _require_same(name, state[name], _as_known_before(state[name], here))
    try:
        worker = state["worker"]
        return Place(
            epoch=require_epoch(state["epoch"]),
            after=tuple(map(_read, state["after"])),
            progress=_read(state["progress"]),
            worker=None if worker is None else require_integer("worker", worker),
        )
    except (KeyError, TypeError, ValueError, CellfeedError) as error:
        msg = f"the state is damaged: {error}; load an earlier one"
        raise StateError(msg) from error


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
    contents = [(each.selection(), _version(each)) for each in collection.sources]
    if any(selection or version for selection, version in contents):
        data[_CONTENTS] = hashlib.blake2b(repr(contents).encode(), digest_size=16).hexdigest()
    return data


def _version(source: Source) -> str | None:
    """Return the version of a source; None for a file or object, whose copies have other ones."""
    location = source.location
    is_copied = location.path is not None or location.scheme in SCHEMES
    return None if is_copied else source.version()


def _as_known_before(there: Any, here: Any) -> Any:
    """Return an identifier without the values that a state of an older cellfeed lacks."""
    if not isinstance(there, Mapping) or not isinstance(here, Mapping) or _CONTENTS in there:
        return here
    return {name: value for name, value in here.items() if name != _CONTENTS}


def strategy_identity(strategy: SamplingStrategy) -> dict[str, Any]:
    """Return the name of a strategy and its fields, with arrays hashed."""
    return {"strategy": type(strategy).__qualname__} | _fields_of(strategy)


def _fields_of(value: Any) -> dict[str, Any]:
    names = [*vars(value)]
    if is_dataclass(value):
        names = [each.name for each in fields(value) if not _is_absent(value, each)]
    return {name: as_json(getattr(value, name)) for name in sorted(names)}


def _is_absent(value: Any, of: Field[Any]) -> bool:
    """Return whether a state omits a field; see `ABSENT_BY_DEFAULT`."""
    return of.metadata == ABSENT_BY_DEFAULT and getattr(value, of.name) is of.default


def as_json(value: Any) -> Any:
    """Return a JSON value that identifies a value; arrays are hashed."""
    if isinstance(value, np.generic):
        value = value.item()
    plain: Any = getattr(value, "__qualname__", type(value).__qualname__)
    if value is None or isinstance(value, bool | int | str):
        plain = value
    elif isinstance(value, float):
        plain = repr(value)
    elif isinstance(value, SamplingStrategy) or hasattr(value, "__dataclass_fields__"):
        plain = {"type": type(value).__qualname__} | _fields_of(value)
    elif isinstance(value, Mapping):
        plain = {str(name): as_json(each) for name, each in value.items()}
    elif isinstance(value, np.ndarray | pd.Series | pd.Index | pd.api.extensions.ExtensionArray):
        plain = _hashed(value)
    elif isinstance(value, list | tuple):
        plain = [as_json(each) for each in value]
    return plain


def _hashed(values: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(values, np.ndarray) and values.dtype != object:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(np.ascontiguousarray(values).data)
    else:
        hashes: NDArray[np.uint64] = pd.util.hash_array(pd.array(values).astype(object))
        digest.update(hashes.data)
    return f"{len(values)} values, blake2b {digest.hexdigest()}"


def _require_same(name: str, there: Any, here: Any) -> None:
    if there == here:
        return
    if not isinstance(there, Mapping) or not isinstance(here, Mapping):
        differing = [f"{name}={there!r} there, {name}={here!r} here"]
    else:
        differing = [
            f"{each}={there.get(each)!r} there, {each}={here.get(each)!r} here"
            for each in sorted({*there, *here})
            if there.get(each) != here.get(each)
        ]
    what = {"data": "data", "configuration": "parameters"}.get(name, name)
    msg = f"the state is of other {what}: {'; '.join(differing)}; {_REMEDY[name]}"
    raise StateError(msg)


def _written(progress: Progress) -> list[int]:
    return [progress.world_size, progress.num_workers, progress.n_minibatches]


def _read(written: Any) -> Progress:
    world_size, num_workers, n_minibatches = written
    return Progress(world_size=world_size, num_workers=num_workers, n_minibatches=n_minibatches)


def _checksum(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
