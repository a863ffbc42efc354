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
        The category of each cell as an index into ``categories``, -1 if missing; shape (n_cells,),
        of the smallest signed integer dtype that holds them.
    categories
        The vocabulary, shape (n_categories,): the union over all files, in order of first
        appearance. ``categories[code]`` decodes any code except -1.
    """

    codes: NDArray[np.signedinteger]
    categories: NDArray[Any]

    @property
    def values(self) -> NDArray[np.signedinteger]:
        """The codes, which minibatches contain."""
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
        One number per cell, NaN if missing, shape (n_cells,).
    """

    values: NDArray[Any]


ObsColumn = CategoricalColumn | NumericColumn
