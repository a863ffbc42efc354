"""The rows of one source in a fetch, and the transforms of elements."""

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError, ParameterError
from cellfeed._runs import Runs, merge_consecutive
from cellfeed.bytes._buffers import BufferPool
from cellfeed.decode import Counters
from cellfeed.rows import Chunks, ColumnMap, CsrRows, Element, RaggedRows
from cellfeed.sources import Source, StoredElement
from cellfeed.transforms import Transform


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part:
    """The rows of an element that come from one source.

    Parameters
    ----------
    source, stored
        The source, and its element.
    rows
        Its rows, ascending, int64, shape (n,).
    positions
        Positions of these rows among the distinct rows of the fetch: a range, or numbers.
    column_map
        New index of each column; None if its columns are those of the collection.
    """

    source: Source
    stored: StoredElement
    rows: NDArray[np.int64]
    positions: slice | NDArray[np.intp]
    column_map: ColumnMap | None

    @property
    def runs(self) -> Runs:
        """Runs of its rows, for sources that read these themselves."""
        return merge_consecutive(self.rows)

    @property
    def columns(self) -> NDArray[np.int32] | None:
        """New index of each column; None if columns do not change."""
        return (
            None
            if self.column_map is None or self.column_map.is_identity
            else self.column_map.columns
        )

    @property
    def keeps_all(self) -> bool:
        """Whether none of its columns is left out."""
        return self.column_map is None or self.column_map.keeps_all

    @property
    def expected_bytes(self) -> int:
        """Number of bytes that the source requests if these rows are prefetched."""
        return round(self.stored.expected_row_bytes * self.rows.size)

    @property
    def _planning(self) -> AbstractContextManager[object]:
        """The lock of the source; none if rows are requested while others are read."""
        return nullcontext() if self.stored.expected_row_bytes else self.source.reading

    def chunked(self) -> Chunks | None:
        """Return the chunks of the element; see `StoredElement.chunked`."""
        with self._planning:
            return self.stored.chunked()

    def row_lengths(self) -> NDArray[np.int64] | None:
        """Return the number of elements of each row, None if it is unknown before reading.

        Raises
        ------
        FormatError
            The source returned something else.
        """
        with self._planning:
            lengths = self.stored.row_lengths(self.runs)
        if lengths is None:
            return None
        lengths = np.asarray(lengths)
        if lengths.shape != (self.rows.size,) or lengths.dtype.kind not in "iu":
            raise self.wrong(f"lengths of shape {lengths.shape} and dtype {lengths.dtype}")
        if lengths.size and lengths.min() < 0:
            raise self.wrong(f"a row of length {lengths.min()}")
        return lengths.astype(np.int64, copy=False)

    def read_rows(self) -> Any:
        """Return the rows that the source reads itself, in the type of their layout.

        Raises
        ------
        FormatError
            The storage is damaged, or the source returned other rows.
        """
        with self.source.reading:
            rows, layout = self.stored.read_rows(self.runs), self.stored.layout
        if not isinstance(rows, _TYPES[layout]):
            raise self.wrong(f"{type(rows).__name__} for an element of layout {layout!r}")
        expected = (self.rows.size, *self.stored.shape[1:])
        if self.stored.stored_columns is not None:
            expected = (expected[0], self.stored.stored_columns.size)
        if rows.shape != expected:
            raise self.wrong(f"shape {rows.shape}, but {expected} expected")
        if isinstance(rows, CsrRows):
            self._check_pointers(rows.indptr, rows.indices, rows.data)
            if rows.indices.dtype.kind not in "iu":
                raise self.wrong(f"column indices of dtype {rows.indices.dtype}")
        elif isinstance(rows, RaggedRows):
            self._check_pointers(rows.offsets, rows.values)
        return rows

    def _check_pointers(self, pointers: NDArray[Any], *arrays: NDArray[Any]) -> None:
        """Check that rows are divided as their arrays are long."""
        for each in arrays:
            if each.shape != (pointers[-1],):
                raise self.wrong(f"an array of shape {each.shape} for {pointers[-1]} elements")
        if pointers[0] != 0 or np.any(pointers[1:] < pointers[:-1]):
            raise self.wrong("row pointers that do not ascend from 0")

    def with_columns(self, rows: Any) -> Any:
        """Return sparse or dense rows that were read with the columns of the collection.

        Columns that the source lacks are zero.

        Raises
        ------
        FormatError
            The rows do not match the source's description.
        """
        if self.column_map is None or self.column_map.is_identity:
            return rows
        columns, n_columns = self.column_map.columns, self.column_map.n_columns
        if isinstance(rows, CsrRows):
            with self.wrong_rows():
                return rows.with_columns(columns, n_columns)
        joined = np.zeros((len(rows), n_columns), rows.dtype)
        are_kept = columns >= 0
        joined[:, columns[are_kept]] = rows.reshape(len(rows), columns.size)[:, are_kept]
        return joined

    @contextmanager
    def wrong_rows(self) -> Iterator[None]:
        """Say of a `ValueError` that the rows do not match the source's description."""
        try:
            yield
        except ValueError as error:
            raise self.wrong(error) from error

    def wrong(self, what: object) -> FormatError:
        """Return the error for rows that do not match the source's description."""
        msg = (
            f"{self.source.location}: `{type(self.stored).__name__}` returned wrong rows: {what}; "
            "the storage may be damaged"
        )
        return FormatError(msg)


_TYPES = {"csr": CsrRows, "dense": np.ndarray, "ragged": RaggedRows}


# Transforms that replace the rows of an element in each minibatch, such as tokenizers.


class ReplaceRows(Protocol):
    """Makes what a minibatch has in place of rows; called by several threads at once."""

    def __call__(
        self, rows: CsrRows | NDArray[Any], numbers: NDArray[np.int64], key: int, pool: BufferPool
    ) -> dict[str, Any]:
        """Return arrays, `RaggedRows` or `CsrRows` of as many rows, by the name they get.

        Parameters
        ----------
        rows
            Rows of one minibatch, float32 or float64, to which transforms of values have been
            applied: sparse, or dense of shape (n_rows, n_columns).
        numbers
            Row of each in the collection, int64, shape (n_rows,).
        key
            Key of (seed, epoch), for what is drawn at random; see `cellfeed.sampling.random_words`.
        pool
            Memory for large arrays: ``pool.acquire(n_bytes).array(dtype, n)``. It is used again
            once the minibatch is dropped.
        """
        ...


class RowTransform(ABC):
    """Base class of what replaces the rows of an element in each minibatch, such as tokenizers.

    In ``CellDataset(transform=[...])`` it comes after transforms of values
    (`cellfeed.transforms`), which are applied while rows are placed. The decoding threads call it
    once the rows of a minibatch have arrived. Derived classes are frozen dataclasses, whose fields
    identify them in states.
    """

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Upper bound of what a row takes in a minibatch, in bytes."""

    def require_fit(self, element: Element) -> None:  # noqa: B027 - any element, by default
        """Check that it can replace the rows of an element; called before anything is read.

        Parameters
        ----------
        element
            The element, with ``name``, ``layout``, ``row_shape`` and ``column_names``.

        Raises
        ------
        ParameterError
            It cannot.
        """

    @abstractmethod
    def bind(self, element: Element, counters: Counters) -> ReplaceRows:
        """Return the function that replaces rows of an element; see above.

        ``counters`` count what is made, as ``counters.add(Counter.TOKENS, n)``.
        """


def require_rows(
    made: Any, transform: RowTransform, n_rows: int, obs: Container[str]
) -> Mapping[str, Any]:
    """Return what a row transform made of the rows of a minibatch, if that can be delivered.

    Raises
    ------
    ParameterError
        It is no dictionary, has something else than one row for each cell, or the name of an obs
        column.
    """
    if not isinstance(made, Mapping):
        msg = (
            f"{transform!r} must return a dictionary of arrays, `CsrRows` or `RaggedRows`, but "
            f"returned {type(made).__name__}"
        )
        raise ParameterError(msg)
    for name, rows in made.items():
        shape = getattr(rows, "shape", ())
        if shape[:1] != (n_rows,):
            found = f"{shape[0]:,} rows" if shape else type(rows).__name__
            msg = (
                f"{transform!r} must return a row for each of {n_rows:,} cells, but {name!r} is "
                f"{found}"
            )
            raise ParameterError(msg)
        if name in obs:
            msg = f"{transform!r} returns {name!r}, which is an obs column; choose another name"
            raise ParameterError(msg)
    return made


Step = Transform | RowTransform


def split_steps(steps: Sequence[Step]) -> tuple[list[Transform], RowTransform | None]:
    """Return transforms of values, and the row transform after them."""
    of_rows = next((each for each in steps if isinstance(each, RowTransform)), None)
    return [each for each in steps if isinstance(each, Transform)], of_rows


Transforms = Mapping[str, Sequence[Step]]
"""Transforms by the name of the element, in the order in which they are applied."""
