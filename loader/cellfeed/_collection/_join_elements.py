"""Joining the elements of the sources of a collection."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._collection._join_var import Genes, join_var
from cellfeed._errors import FormatError, MismatchError
from cellfeed._layouts import ColumnMaps, Element
from cellfeed._sources import Source

__all__ = ["join_elements"]


def join_elements(sources: Sequence[Source], genes: Genes) -> dict[str, Element]:
    """Return the elements that all sources have, each over all of them.

    Raises
    ------
    MismatchError
        Sources cannot be joined by their genes, or differ in the number of columns of an array.
    FormatError
        An array has another number of columns than its table says.
    """
    elements, tables = dict[str, Element](), dict[str, _Columns]()
    for name, first in sources[0].elements.items():
        stored = [source.elements[name] for source in sources]
        if first.var is None:
            _check_same_width(name, sources)
            columns: _Columns = first.var_names(), None
        else:
            if first.var not in tables:
                tables[first.var] = join_var(_genes_of(name, sources), genes)
            columns = tables[first.var]
        elements[name] = Element(
            name=name,
            dtype=np.result_type(*(each.dtype for each in stored)),
            layout="csr" if all(each.layout == "csr" for each in stored) else "dense",
            column_names=columns[0],
            stored_as=tuple(each.stored_as for each in stored),
            column_maps=columns[1],
        )
    return elements


_Columns = tuple[NDArray[np.object_], ColumnMaps | None]


def _genes_of(name: str, sources: Sequence[Source]) -> list[tuple[Location, NDArray[np.object_]]]:
    """Return the genes of each source; those that are the first's are not kept twice."""
    parts = list[tuple[Location, NDArray[np.object_]]]()
    for source in sources:
        stored = source.elements[name]
        own = stored.var_names()
        if len(own) != stored.shape[1]:
            msg = (
                f"{source.location}: {stored.var} has {len(own)} rows, `{name}` {stored.shape[1]} "
                "columns; write the file anew with anndata"
            )
            raise FormatError(msg)
        if parts and np.array_equal(own, parts[0][1]):
            own = parts[0][1]
        parts.append((source.location, own))
    return parts


def _check_same_width(name: str, sources: Sequence[Source]) -> None:
    first = sources[0]
    for source in sources[1:]:
        n_columns, expected = (each.elements[name].shape[1] for each in (source, first))
        if n_columns != expected:
            msg = (
                f"{source.location}: `{name}` has {n_columns} columns, but {expected} in "
                f"{first.location}; write it with the same columns in all files"
            )
            raise MismatchError(msg)
