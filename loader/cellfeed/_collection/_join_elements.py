"""Joining the elements of the sources of a collection."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError, MismatchError
from cellfeed._layouts import Element
from cellfeed._sources import Source, StoredElement

__all__ = ["join_elements"]


def join_elements(sources: Sequence[Source]) -> dict[str, Element]:
    """Return the elements that all sources have, each over all of them.

    Raises
    ------
    MismatchError
        Sources differ in their genes, or in the number of columns of an array.
    FormatError
        An array has another number of columns than its table says.
    """
    names = _column_names(sources[0])
    for source in sources[1:]:
        for element, own in _column_names(source).items():
            _check_same_columns(element, sources[0], names[element], source, own)
    return {
        name: Element(
            name=name,
            dtype=_common_dtype([source.elements[name] for source in sources]),
            layout="csr"
            if all(source.elements[name].layout == "csr" for source in sources)
            else "dense",
            column_names=names[name],
            stored_as=tuple(source.elements[name].stored_as for source in sources),
        )
        for name in sources[0].elements
    }


def _common_dtype(stored: Sequence[StoredElement]) -> np.dtype[Any]:
    return np.result_type(*(each.dtype for each in stored))


def _column_names(source: Source) -> dict[str, NDArray[np.object_]]:
    """Return what the columns of each element stand for; a table that several share is read once."""
    tables, names = dict[str, NDArray[np.object_]](), dict[str, NDArray[np.object_]]()
    for name, stored in source.elements.items():
        if stored.var is None:
            names[name] = stored.var_names()
            continue
        if stored.var not in tables:
            tables[stored.var] = stored.var_names()
        names[name] = tables[stored.var]
        n_genes, n_columns = len(names[name]), stored.shape[1]
        if n_genes != n_columns:
            msg = (
                f"{source.path}: {stored.var} has {n_genes} rows, `{name}` {n_columns} "
                "columns; write the file anew with anndata"
            )
            raise FormatError(msg)
    return names


def _check_same_columns(
    element: str,
    first: Source,
    expected: NDArray[np.object_],
    source: Source,
    found: NDArray[np.object_],
) -> None:
    if found is expected or np.array_equal(found, expected):
        return
    if source.elements[element].var is None:
        msg = (
            f"{source.path}: `{element}` has {len(found)} columns, but {len(expected)} in "
            f"{first.path}; write it with the same columns in all files"
        )
        raise MismatchError(msg)
    if set(found) == set(expected):
        problem = f"has the genes of {first.path} in another order"
    else:
        n_shared = len(set(found) & set(expected))
        problem = f"has other genes than {first.path} ({n_shared:,} of {len(expected):,} are shared)"
    msg = (
        f"{source.path}: {problem}; write all files with the same genes in the same order, "
        "such as `adata[:, shared_genes]`"
    )
    raise MismatchError(msg)
