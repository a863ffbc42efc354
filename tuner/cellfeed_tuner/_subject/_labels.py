"""Labels that minibatches should be mixed by, as codes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from cellfeed import (
    CategoricalColumn,
    CellfeedError,
    Collection,
    ColumnError,
    NumericColumn,
    ParameterError,
)
from cellfeed_tuner._constants import LEAST_CELLS_PER_FRACTION, LEAST_CELLS_PER_LABEL
from cellfeed_tuner._entropy._minibatch_entropy import LabelCounts, count_labels

__all__ = [
    "Label", "LabelWithin", "codes_of", "label_codes", "label_name", "label_text", "names_of",
]  # fmt: skip

_LEAST_LABELS = 2


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """A label that minibatches should be mixed by.

    Parameters
    ----------
    codes
        Code of each cell's value in the order of storage, -1 where missing, shape (n_cells,); of
        the visited cells, or of all cells if plans select the visited ones.
    counted
        How often each value occurs among the visited cells.
    drawn
        How often an epoch of the strategy draws each value; None if as often as it occurs.
    """

    name: str
    codes: NDArray[np.integer]
    counted: LabelCounts
    drawn: LabelCounts | None = None

    @classmethod
    def of_values(cls, name: str, values: ArrayLike) -> "Label":
        """Return a label of another loader from its values; refuse one with nothing to mix."""
        codes, _ = pd.factorize(np.asarray(values))  # missing values become -1
        label = cls(name, codes, count_labels(codes))
        label.check(f"label {name!r}", error=ParameterError)
        return label

    @property
    def target(self) -> LabelCounts:
        """How often each value is drawn."""
        return self.counted if self.drawn is None else self.drawn

    def check(
        self,
        what: str,
        where: str = "",
        *,
        has_fractions: bool = False,
        error: type[CellfeedError] = ColumnError,
    ) -> None:
        """Refuse a label with nothing to mix, or with nearly as many values as cells."""
        for each in (self.counted, self.target):
            n_labels, n_labelled = each.counts.size, int(each.counts.sum())
            if n_labels < _LEAST_LABELS:
                msg = (
                    f"{what} has {n_labels} value(s){where}, so there is nothing to mix; choose a "
                    "label with at least two, such as the plate or the cell type"
                )
                raise error(msg)
            least = LEAST_CELLS_PER_FRACTION if has_fractions else LEAST_CELLS_PER_LABEL
            if n_labelled < least * n_labels:
                remedy = "make bins of it (pandas.cut), or " if has_fractions else ""
                msg = (
                    f"{what} has {n_labels:,} values in {n_labelled:,} cells, so that hardly two "
                    f"cells of a minibatch have the same and any order looks mixed; {remedy}choose "
                    "a label such as the plate or the cell type"
                )
                raise error(msg)


class LabelWithin(NamedTuple):
    """A label within each value of another."""

    label: str
    given: str


def names_of(label: str | Sequence[str]) -> tuple[str, ...]:
    """Return one label or several as a tuple without duplicates.

    Examples
    --------
    >>> names_of("plate"), names_of(["plate", "drug", "plate"])
    (('plate',), ('plate', 'drug'))
    """
    return (label,) if isinstance(label, str) else tuple(dict.fromkeys(label))


def label_codes(collection: Collection, label: str) -> NDArray[np.integer]:
    """Return a code for each cell's label, -1 where it is missing, shape (n_cells,).

    Each number of a numeric column is a label. Raises `ColumnError` if the column was not opened.
    """
    if label not in collection.obs:
        msg = f"the collection was opened without the obs column {label!r}; open it with `obs`"
        raise ColumnError(msg)
    column = collection.obs[label]
    return codes_of(column, column.values)


def codes_of(
    column: CategoricalColumn | NumericColumn, values: NDArray[Any]
) -> NDArray[np.integer]:
    """Return codes for a column's values in minibatches, of the same shape.

    Equal values have equal codes. ``values`` are codes of categories, or numbers; codes of numbers
    are comparable within one call only.
    """
    if isinstance(column, CategoricalColumn):
        return values
    codes: NDArray[np.integer] = pd.factorize(values.ravel())[0]  # NaN becomes -1
    return codes.reshape(values.shape)


def label_name(column: CategoricalColumn | NumericColumn, value: Any) -> Any:
    """Return the label that a code or number stands for, None if it is missing."""
    if not isinstance(column, CategoricalColumn):
        return None if np.isnan(value) else value
    if not 0 <= value < len(column.categories):
        return None if value < 0 else f"of code {value}, which there is not"
    return column.categories[value]


def label_text(label: Any) -> str:
    """Return a label as text."""
    return "missing" if label is None else str(label)
