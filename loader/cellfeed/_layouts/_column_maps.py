"""Columns of each source as columns of the collection: which become which, or are left out."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["ColumnMap", "column_maps"]


class ColumnMap:
    """What each column of a source is in a collection.

    Parameters
    ----------
    columns
        The column of the collection that each becomes, distinct, -1 where it is left out, -2 where
        no element may be, int32, shape (n_columns of the source,).
    n_columns
        Columns of the collection; those that the source lacks are zero.

    Attributes
    ----------
    stays
        Whether columns are what they were: the first of the collection, in the same order.
    keeps_all
        Whether none is left out.
    covers
        Whether the source lacks none.
    """

    def __init__(self, columns: NDArray[np.int32], n_columns: int) -> None:
        self.columns = columns
        self.stays = np.array_equal(columns, np.arange(columns.size))
        self.keeps_all = bool((columns != -1).all())
        self.covers = int(np.count_nonzero(columns >= 0)) == n_columns


def column_maps(maps: Sequence[NDArray[np.integer]], n_columns: int) -> tuple[ColumnMap, ...]:
    """Return the column map of each source; those that are the same are kept once.

    Parameters
    ----------
    maps
        What each column of each source becomes; see `ColumnMap`.
    n_columns
        Columns of the collection.
    """
    made = dict[bytes, ColumnMap]()
    found = list[ColumnMap]()
    for each in maps:
        columns = np.ascontiguousarray(each, np.int32)
        key = columns.tobytes()
        if key not in made:
            made[key] = ColumnMap(columns, n_columns)
        found.append(made[key])
    return tuple(found)
