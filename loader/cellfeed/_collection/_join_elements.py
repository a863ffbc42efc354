"""Joining the elements of the sources of a collection."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._collection._join_var import Genes, join_var, listed
from cellfeed._collection._side_by_side import side_by_side
from cellfeed._errors import FormatError, MismatchError, ParameterError
from cellfeed._layouts import ColumnMap, ColumnNames, Element, Layout, column_maps
from cellfeed._sources import Source, StoredElement

__all__ = ["join_elements"]

# The number of columns, their names, and where those of each source are among them.
_Columns = tuple[int, ColumnNames, tuple[ColumnMap, ...] | None]


def join_elements(sources: Sequence[Source], genes: Genes) -> dict[str, Element]:
    """Return the elements of all sources, each joined over all of them.

    Raises
    ------
    MismatchError
        Sources cannot be joined by their genes, or differ in the columns of an array without
        genes.
    FormatError
        An array and its table differ in the number of columns.
    ParameterError
        Genes are chosen, but no element has gene names.
    """
    elements, tables = dict[str, Element](), dict[str, _Columns]()
    for name, first in sources[0].elements.items():
        stored = [source.elements[name] for source in sources]
        _check_same_kind(name, sources)
        if first.layout == "ragged":
            columns: _Columns = 0, ColumnNames(_no_names), None
        elif first.var is None:
            _check_same_shape(name, sources, 1)
            columns = first.shape[1], ColumnNames(first.var_names), None
        elif first.var == first.stored_as:
            columns = _join_frames(name, sources)
        else:
            if first.var not in tables:
                # Of MuData, `genes` are of one modality; others have names of another kind.
                own_genes = genes
                if _modality(first.var) != _modality(next(iter(tables), first.var)):
                    own_genes = Genes(genes.join_vars)
                tables[first.var] = _join_genes(name, sources, own_genes)
            columns = tables[first.var]
            _check_same_shape(name, sources, 2)
        n_columns, names, maps = columns
        if maps is not None and first.shape[2:]:
            msg = (
                f"{sources[0].location}: `{name}` has {len(first.shape)} dimensions, which "
                "requires all files to have the same genes in the same order; leave it out, or "
                "read these files alone"
            )
            raise MismatchError(msg)
        if any(each.stored_columns is not None for each in stored):
            maps = _of_stored_columns(stored, maps, n_columns)
        elements[name] = Element(
            name=name,
            dtype=_dtype_of(name, sources),
            layout=_layout_of(stored),
            row_shape=() if first.layout == "ragged" else (n_columns, *first.shape[2:]),
            names=names,
            stored_as=tuple(each.stored_as for each in stored),
            column_maps=maps,
        )
    if genes.names is not None and not tables:
        msg = (
            f"{sources[0].location}: `genes` are given, but {listed([*elements])} has no gene names"
        )
        raise ParameterError(f"{msg}; leave out `genes`, or read an element that has them")
    return elements


def _no_names() -> NDArray[np.object_]:
    return np.empty(0, object)


def _layout_of(stored: Sequence[StoredElement]) -> Layout:
    layouts = [each.layout for each in stored]
    return "csr" if "csr" in layouts else layouts[0]


def _dtype_of(name: str, sources: Sequence[Source]) -> np.dtype[Any]:
    """Return a dtype that can hold the values of all sources."""
    dtypes = [source.elements[name].dtype for source in sources]
    if all(each.names is None for each in dtypes):
        return np.result_type(*dtypes)
    for source, dtype in zip(sources, dtypes, strict=True):
        if dtype != dtypes[0]:
            msg = (
                f"{source.location}: `{name}` has values of {dtype}, but of {dtypes[0]} in "
                f"{sources[0].location}; only open files with the same fields together"
            )
            raise MismatchError(msg)
    return dtypes[0]


def _of_stored_columns(
    stored: Sequence[StoredElement], maps: tuple[ColumnMap, ...] | None, n_columns: int
) -> tuple[ColumnMap, ...]:
    """Return the target of each stored column, from the target of each column of the elements."""
    found = list[NDArray[np.int32]]()
    for k, element in enumerate(stored):
        own = np.arange(element.shape[1], dtype=np.int32) if maps is None else maps[k].columns
        order = element.stored_columns
        found.append(own if order is None else np.where(order < 0, order, own[order]))
    return column_maps(found, n_columns)


def _modality(table: str) -> str:
    return table.split("/")[1] if table.startswith("mod/") else ""


def _join_genes(name: str, sources: Sequence[Source], genes: Genes) -> _Columns:
    first = sources[0].elements[name]
    if len(sources) == 1 and genes.names is None:
        return first.shape[1], ColumnNames(partial(_names_of, name, sources[0])), None
    return _joined(name, sources, genes)


def _join_frames(name: str, sources: Sequence[Source]) -> _Columns:
    """Join data frames, which must have the same columns, in any order."""
    parts = _parts(name, sources)
    first, known = sources[0].location, set(parts[0][1])
    for path, names in parts[1:]:
        for has, lacks, own, others in (
            (first, path, known, set(names)),
            (path, first, set(names), known),
        ):
            lacking = sorted(own - others)
            if lacking:
                msg = (
                    f"{lacks}: the data frame `{name}` lacks {listed(lacking)}, which {has} has; "
                    "write the same columns to all files"
                )
                raise MismatchError(msg)
    return _joined(name, sources, Genes())


def _joined(name: str, sources: Sequence[Source], genes: Genes) -> _Columns:
    names, maps = join_var(_parts(name, sources), genes)
    # Names that are those of the first file can be read again.
    kept = partial(_names_of, name, sources[0]) if maps is None else partial(np.asarray, names)
    return len(names), ColumnNames(kept), maps


def _parts(name: str, sources: Sequence[Source]) -> list[tuple[Location, NDArray[np.object_]]]:
    """Return the column names of each source; equal names share memory with the first."""
    parts = list[tuple[Location, NDArray[np.object_]]]()
    found = side_by_side(partial(_names_of, name), sources)
    for source, own in zip(sources, found, strict=True):
        if parts and np.array_equal(own, parts[0][1]):
            parts.append((source.location, parts[0][1]))
        else:
            parts.append((source.location, own))
    return parts


def _names_of(name: str, source: Source) -> NDArray[np.object_]:
    stored = source.elements[name]
    own = stored.var_names()
    if len(own) != stored.shape[1]:
        msg = (
            f"{source.location}: {stored.var} has {len(own)} rows, but `{name}` has "
            f"{stored.shape[1]} columns; write the file again with anndata"
        )
        raise FormatError(msg)
    return own


def _check_same_kind(name: str, sources: Sequence[Source]) -> None:
    """Check that all or no files name their columns, and that rows have the same dimensions."""
    first = sources[0].elements[name]
    for source in sources[1:]:
        stored = source.elements[name]
        if (stored.layout == "ragged") != (first.layout == "ragged"):
            msg = (
                f"{source.location}: `{name}` is {stored.layout}, but {first.layout} in "
                f"{sources[0].location}; only open files with the same layout together"
            )
            raise MismatchError(msg)
        if (stored.var is None) != (first.var is None):
            frame, array = (source, sources[0]) if first.var is None else (sources[0], source)
            msg = (
                f"{array.location}: `{name}` is an array, but a data frame in {frame.location}; "
                "write the same kind to all files"
            )
            raise MismatchError(msg)


def _check_same_shape(name: str, sources: Sequence[Source], start: int) -> None:
    """Check that dimensions from ``start`` on are the same in all files."""
    first = sources[0]
    for source in sources[1:]:
        own, expected = (each.elements[name].shape[start:] for each in (source, first))
        if own != expected:
            n_columns, others = (" x ".join(map(str, shape)) or "1" for shape in (own, expected))
            msg = (
                f"{source.location}: `{name}` has {n_columns} columns, but {others} in "
                f"{first.location}; write the same columns to all files"
            )
            raise MismatchError(msg)
