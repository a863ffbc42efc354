"""The rows of one source in a fetch, and the transforms of elements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._decode import Counters, ValueSteps
from cellfeed._errors import FormatError
from cellfeed._rows import ColumnMap, CsrRows, Layout, RaggedRows, RowTarget
from cellfeed._runs import Runs, count_rows, expand, merge_consecutive
from cellfeed._storages import StoredElement
from cellfeed.tokenizers import Masking, Tokenizer
from cellfeed.transforms import Transform


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """The rows of an element that come from one source.

    Parameters
    ----------
    location, stored
        The location of the source, for messages, and its element.
    runs
        Ascending runs of its rows.
    rows
        Positions of these rows among the distinct rows of the fetch: a range, or numbers.
    column_map
        New index of each column; None if its columns are those of the collection.
    """

    location: Location
    stored: StoredElement
    runs: Runs
    rows: slice | NDArray[np.intp]
    column_map: ColumnMap | None

    def as_stored(self, first: int) -> "Part":
        """Return rows of cells, which ascend from ``first``, as stored rows."""
        row_order = self.stored.row_order
        if row_order is None:
            return self
        stored_rows = row_order[expand(self.runs)]
        order = np.argsort(stored_rows)
        return replace(self, runs=merge_consecutive(stored_rows[order]), rows=first + order)

    @property
    def columns(self) -> NDArray[np.int32] | None:
        """New index of each column; None if columns do not change."""
        return None if self.column_map is None or self.column_map.stays else self.column_map.columns

    @property
    def keeps_all(self) -> bool:
        """Whether none of its columns is left out."""
        return self.column_map is None or self.column_map.keeps_all

    @property
    def expected_bytes(self) -> int:
        """Number of bytes that the source requests if these rows are prefetched."""
        return round(self.stored.expected_row_bytes * count_rows(self.runs))

    def read_rows(self) -> Any:
        """Return the rows that the source reads itself, in the type of their layout.

        Raises
        ------
        FormatError
            The storage is damaged, or the source returned other rows.
        """
        rows, layout = self.stored.read_rows(self.runs), self.stored.layout
        if not isinstance(rows, _TYPES[layout]):
            raise self.wrong(f"{type(rows).__name__} for an element of layout {layout!r}")
        expected = (count_rows(self.runs), *self.stored.shape[1:])
        if self.stored.stored_columns is not None:
            expected = (expected[0], self.stored.stored_columns.size)
        if rows.shape != expected:
            raise self.wrong(f"shape {rows.shape}, but {expected} expected")
        return rows

    def put(self, rows: Any, target: RowTarget, columns: NDArray[np.int32] | None) -> bool:
        """Place rows, and return whether the columns of each row ascend strictly.

        Parameters
        ----------
        rows, target
            Rows that were read, and their destinations, which are bound to memory.
        columns
            New index of each column; None if these are the columns of the collection.

        Raises
        ------
        FormatError
            The rows do not match the source's description.
        """
        try:
            return target.put(rows, columns)
        except ValueError as error:
            raise self.wrong(error) from error

    def wrong(self, what: object) -> FormatError:
        """Return the error for rows that do not match the source's description."""
        msg = (
            f"{self.location}: `{type(self.stored).__name__}.read_rows` returned wrong rows: "
            f"{what}; the storage may be damaged"
        )
        return FormatError(msg)


_TYPES = {"csr": CsrRows, "dense": np.ndarray, "ragged": RaggedRows}


# Transforms of one element, before and after sparse rows are made dense.

Step = Transform | Tokenizer | Masking
Transforms = Mapping[str, Sequence[Step]]
"""Transforms by the name of the element, in the order in which they are applied."""


def as_stored(transforms: Sequence[Transform], layout: Layout) -> Sequence[Transform]:
    """Return the first transforms, which apply to rows in their stored layout.

    The remaining ones apply to sparse rows after they are made dense.

    Examples
    --------
    >>> from cellfeed.transforms import Log1p, Scale
    >>> as_stored([Log1p(), Scale([1.0], [2.0])], "csr")
    [Log1p()]
    """
    if layout == "dense":
        return transforms
    return list(takewhile(lambda each: each.keeps_zeros, transforms))


@dataclass(frozen=True, slots=True, eq=False)
class ElementTransforms:
    """Transforms of one element, compiled.

    Parameters
    ----------
    stored
        Transforms of rows in their stored layout.
    dense
        Further transforms of sparse rows, after they are made dense.
    """

    stored: ValueSteps
    dense: ValueSteps

    @classmethod
    def of(
        cls,
        transforms: Sequence[Transform],
        layout: Layout,
        dtype: np.dtype[Any],
        counters: Counters,
    ) -> Self:
        """Return the compiled transforms for rows of a layout and dtype, float32 or float64."""
        stored = as_stored(transforms, layout)
        dense = transforms[len(stored) :]
        return cls(ValueSteps(stored, dtype, counters), ValueSteps(dense, dtype, counters))
