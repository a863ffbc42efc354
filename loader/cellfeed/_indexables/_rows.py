"""What a data set needs of what it reads: a number of rows, and rows by their numbers."""

import os
from collections.abc import Mapping
from typing import Any

from cellfeed._errors import ParameterError
from cellfeed._indexables._multi_indexable import MultiIndexable, count_indexable_rows

__all__ = ["count_rows", "in_memory"]


def count_rows(collection: Any, *, is_indexed: bool) -> int:
    """Return the number of rows of what a data set reads.

    Parameters
    ----------
    collection
        What is read.
    is_indexed
        Whether it has to take row numbers in brackets.

    Raises
    ------
    ParameterError
        It has no rows, or does not take their numbers.
    """
    if isinstance(collection, str | os.PathLike):
        msg = f"`collection` is the path {str(collection)!r}; open it with `open_collection`"
        raise ParameterError(msg)
    n_rows = count_indexable_rows(collection)
    if n_rows < 1:
        msg = "the collection has no rows; there is nothing to iterate over"
        raise ParameterError(msg)
    if is_indexed:
        _require_indexable(collection)
    return n_rows


def in_memory(fetched: Any) -> Any:
    """Read now what AnnData (backed) and AnnCollection would read again for each minibatch."""
    if isinstance(fetched, MultiIndexable):
        return MultiIndexable(
            *map(in_memory, fetched), names=fetched.names, unstructured=fetched.unstructured
        )
    for method in ("to_memory", "to_adata"):
        if hasattr(fetched, method):
            return getattr(fetched, method)()
    return fetched


def _require_indexable(indexable: Any) -> None:
    """Check that something may take an array of row numbers in brackets.

    Raises
    ------
    ParameterError
        It is known that it does not.
    """
    if isinstance(indexable, MultiIndexable):
        for each in indexable:
            _require_indexable(each)
        return
    # In brackets, a data frame takes names of columns, or a series labels of rows.
    is_of_names = hasattr(indexable, "iloc") or isinstance(indexable, Mapping)
    is_of_numbers = hasattr(indexable, "__getitem__") and not isinstance(
        indexable, list | tuple | range | bytes
    )
    if is_of_names or not is_of_numbers:
        msg = (
            f"a {type(indexable).__name__} does not take an array of row numbers in brackets; "
            "make it an array, a sparse matrix or AnnData, or give a `fetch_callback`"
        )
        raise ParameterError(msg)
