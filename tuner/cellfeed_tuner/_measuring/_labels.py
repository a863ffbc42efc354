"""The labels that minibatches are mixed by, as codes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed import CategoricalColumn, Collection, ColumnError, NumericColumn

__all__ = ["LabelWithin", "codes_of", "label_codes", "label_name", "label_text", "names_of"]


class LabelWithin(NamedTuple):
    """A label within each value of another."""

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

    Each number of a numeric column is a label. `ColumnError` if it was opened without the column.
    """
    if label not in collection.obs:
        msg = f"the collection was opened without the obs column {label!r}; open it with `obs`"
        raise ColumnError(msg)
    column = collection.obs[label]
    return codes_of(column, column.values)


def codes_of(
    column: CategoricalColumn | NumericColumn, values: NDArray[Any]
) -> NDArray[np.integer]:
    """Return codes of what minibatches carry of a column, equal where labels are, of its shape.

    ``values`` are codes of categories, or numbers, whose codes are those of no other values.
    """
    if isinstance(column, CategoricalColumn):
        return values
    codes: NDArray[np.integer] = pd.factorize(values.ravel())[0]  # NaN becomes -1
    return codes.reshape(values.shape)


def label_name(column: CategoricalColumn | NumericColumn, value: Any) -> Any:
    """Return the label that a minibatch means by a code or a number, None where it is missing."""
    if not isinstance(column, CategoricalColumn):
        return None if np.isnan(value) else value
    if not 0 <= value < len(column.categories):
        return None if value < 0 else f"of code {value}, which there is not"
    return column.categories[value]


def label_text(label: Any) -> str:
    """Return a label as it is written."""
    return "missing" if label is None else str(label)
