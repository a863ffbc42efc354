"""Attributes as text, whatever wrote them.

h5py returns variable-length strings as `str`, but strings of fixed length, as Julia's HDF5 writes
them, as bytes; R writes each as an array of one.
"""

from typing import Any

import h5py
import numpy as np

from cellfeed._lazy import ad

_OF_ONE = ("encoding-type", "encoding-version", "_index", "ordered", "h5sparse_format")


class StructureError(ValueError):
    """An element is not as anndata writes it, though nothing is damaged."""


def text(element: Any, name: str, default: str = "") -> str:
    """Return an attribute of a group or array as text.

    Raises
    ------
    StructureError
        It is something else.
    """
    value = _plain(name, element.attrs.get(name, default))
    if not isinstance(value, str):
        raise StructureError(f"the attribute `{name}` of {element.name} is not text, but {value!r}")
    return value


def texts(element: Any, name: str) -> tuple[str, ...]:
    """Return an attribute that is a list of texts; empty if there is none."""
    value = _plain(name, element.attrs.get(name, ()))
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def flag(element: Any, name: str) -> bool:
    """Return an attribute that is true or false."""
    return bool(_plain(name, element.attrs.get(name, False)))


def index_of(table: Any) -> str:
    """Return the name of the column that is the index of a table.

    Raises
    ------
    StructureError
        The table does not have one.
    """
    index = text(table, "_index")
    if index not in table:
        what = f"a column {index!r}, its index" if index else "an attribute `_index`"
        raise StructureError(f"{table.name} lacks {what}")
    return index


def is_current(table: Any) -> bool:
    """Return whether a table such as ``obs`` is in anndata's current format."""
    return text(table, "encoding-version") == "0.2.0"


def is_group(element: Any) -> bool:
    """Return whether an element is a group, not an array."""
    return not hasattr(element, "dtype")


def read_element(element: Any) -> Any:
    """Return an element as anndata reads it.

    anndata cannot read elements of HDF5 whose attributes are arrays of one text, so these are
    copied to memory with attributes as anndata writes them.
    """
    if not isinstance(element, h5py.Group | h5py.Dataset) or not _is_odd(element):
        return ad.io.read_elem(element)
    with h5py.File("memory", "w", driver="core", backing_store=False) as memory:
        memory.copy(element, "element", expand_soft=True, expand_external=True)
        for each in _all(memory["element"]):
            if isinstance(each, h5py.Dataset) and each.is_virtual:
                raise StructureError(f"{each.name} is virtual, with attributes of R")
            for name, value in list(each.attrs.items()):
                plain = _plain(name, value)
                if plain is not value:
                    each.attrs[name] = plain
        return ad.io.read_elem(memory["element"])


def _is_odd(element: Any) -> bool:
    return any(
        _plain(name, value) is not value
        for each in _all(element)
        for name, value in each.attrs.items()
        if name in _OF_ONE or name == "column-order"
    )


def _all(element: Any) -> "list[Any]":
    """Return an element and all below it."""
    below = [] if isinstance(element, h5py.Dataset) else list(element.values())
    return [element, *(each for one in below for each in _all(one))]


def _plain(name: str, value: Any) -> Any:
    """Return an attribute as anndata writes it; the same object if it is already.

    Raises
    ------
    StructureError
        It is an array where one value is expected.
    """
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray):
        if name in _OF_ONE:
            if value.size != 1:
                raise StructureError(f"the attribute `{name}` is not one value, but {value!r}")
            only = value.reshape(-1)[0]
            return only.decode() if isinstance(only, bytes) else only
        if value.dtype.kind in "SO" and any(isinstance(each, bytes) for each in value.flat):
            decoded = [e.decode() if isinstance(e, bytes) else e for e in value.flat]
            return np.array(decoded, dtype=object).reshape(value.shape)
    return value
