"""Data other than a `Collection` that can be indexed by rows: arrays, SciPy CSR, AnnData."""

import os
from collections.abc import Mapping
from typing import Any

from cellfeed._errors import ParameterError


def count_indexable_rows(indexable: Any) -> int:
    """Return the number of rows; SciPy's sparse matrices have a shape but no length.

    BioNeMo's `SingleCellMemMapDataset` has a length, and a method ``shape``.

    Raises
    ------
    ParameterError
        The indexable has no length.
    """
    try:
        shape = getattr(indexable, "shape", None)
        return len(indexable) if shape is None or callable(shape) else int(shape[0])
    except (TypeError, IndexError) as error:
        what = "None" if indexable is None else f"one of type {type(indexable).__name__}"
        msg = f"an indexable must have a length, but got {what}; give it `__len__` or a shape"
        raise ParameterError(msg) from error


# Checks that a dataset can count and index the rows of a collection.

# Sparse matrices of SciPy that have `__getitem__`, but reject rows.
_NOT_BY_ROW = ("bsr_array", "bsr_matrix", "coo_matrix")


def count_rows(collection: Any, *, is_indexed: bool) -> int:
    """Return the number of rows of a collection.

    Parameters
    ----------
    collection
        A `Collection`, or another indexable.
    is_indexed
        Whether it will be indexed by row numbers.

    Raises
    ------
    ParameterError
        It has no rows, or cannot be indexed by row numbers.
    """
    if isinstance(collection, str | os.PathLike):
        msg = f"`collection` is the path {str(collection)!r}; open it with `open_collection`"
        raise ParameterError(msg)
    n_rows = count_indexable_rows(collection)
    if n_rows < 1:
        msg = "the collection has no rows; give one that has some"
        raise ParameterError(msg)
    if is_indexed:
        require_indexable(collection)
    return n_rows


def in_memory(fetched: Any) -> Any:
    """Read backed AnnData or AnnCollection now, which would be read again for each minibatch."""
    if hasattr(fetched, "to_memory"):
        return fetched.to_memory()
    if hasattr(fetched, "to_adata"):
        adata = fetched.to_adata(ignore_layers=True)
        if fetched.layers is not None:
            # From anndata 0.13 on, X is among them, which to_adata() does not accept.
            names = [name for name in fetched.layers.keys() if name is not None]  # noqa: SIM118
            adata.layers.update(fetched.layers.to_dict(names, use_convert=False))
        return adata
    return fetched


def require_indexable(indexable: Any) -> None:
    """Check that an object is not one that is known to reject an array of row numbers.

    Raises
    ------
    ParameterError
        It cannot be indexed by an array of row numbers.
    """
    # In brackets, a data frame takes names of columns, or a series labels of rows.
    is_of_names = hasattr(indexable, "iloc") or isinstance(indexable, Mapping)
    is_of_numbers = hasattr(indexable, "__getitem__") and not isinstance(
        indexable, list | tuple | range | bytes
    )
    is_of_numbers = is_of_numbers and type(indexable).__name__ not in _NOT_BY_ROW
    if is_of_names or not is_of_numbers:
        msg = (
            f"a {type(indexable).__name__} cannot be indexed by an array of row numbers; make "
            "it an array, a CSR matrix or AnnData, or give a `fetch_callback`"
        )
        raise ParameterError(msg)
