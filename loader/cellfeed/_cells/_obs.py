"""obs columns of a whole collection: codes with one vocabulary, or numbers."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CategoricalColumn", "NumericColumn", "ObsColumn"]


@dataclass(frozen=True, slots=True, eq=False)
class CategoricalColumn:
    """A column of categories, strings or booleans, as codes.

    Parameters
    ----------
    codes
        Number of each cell's category, -1 where it is missing; the smallest signed integer
        dtype that holds them, shape (n_cells,).
    categories
        The vocabulary, shape (n_categories,): the union over all files, in order of first
        appearance. ``categories[code]`` decodes a code that is not -1.
    """

    codes: NDArray[np.signedinteger]
    categories: NDArray[Any]

    @property
    def values(self) -> NDArray[np.signedinteger]:
        """The codes: what a minibatch carries of this column."""
        return self.codes

    def decode(self, codes: NDArray[np.signedinteger]) -> NDArray[np.object_]:
        """Return the categories of ``codes``, with None where a code is -1."""
        with_missing = np.array([*self.categories, None], dtype=object)
        decoded: NDArray[np.object_] = with_missing[codes]
        return decoded


@dataclass(frozen=True, slots=True, eq=False)
class NumericColumn:
    """A column of numbers.

    Parameters
    ----------
    values
        One number per cell, NaN where it is missing, shape (n_cells,).
    """

    values: NDArray[Any]


ObsColumn = CategoricalColumn | NumericColumn
