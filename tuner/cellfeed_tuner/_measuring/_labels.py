"""The labels that minibatches are mixed by, as codes."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed import CategoricalColumn, Collection, ColumnError

__all__ = ["LabelWithin", "label_codes", "names_of"]


class LabelWithin(NamedTuple):
    """A label within each value of another.

    Parameters
    ----------
    label, given
        Two obs columns.
    """

    label: str
    given: str


def names_of(label: str | Sequence[str]) -> tuple[str, ...]:
    """Return one label or several as a tuple without repetitions.

    Examples
    --------
    >>> names_of("plate"), names_of(["plate", "drug", "plate"])
    (('plate',), ('plate', 'drug'))
    """
    return (label,) if isinstance(label, str) else tuple(dict.fromkeys(label))


def label_codes(collection: Collection, label: str) -> NDArray[np.integer]:
    """Return a code for each cell's label, -1 where it is missing, shape (n_cells,).

    The values of a numeric column are labels too, each number one.

    Raises
    ------
    ColumnError
        The collection was opened without the column.
    """
    if label not in collection.obs:
        msg = f"the collection was opened without the obs column {label!r}; open it with `obs`"
        raise ColumnError(msg)
    column = collection.obs[label]
    if isinstance(column, CategoricalColumn):
        return column.codes
    codes: NDArray[np.integer] = pd.factorize(column.values)[0]  # NaN becomes -1
    return codes
