"""Transforms that replace the rows of an element in each minibatch, such as tokenizers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes._buffers import BufferPool
from cellfeed.decode import Counters
from cellfeed.rows import CsrRows, Element
from cellfeed.transforms import Transform


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
    (`cellfeed.transforms`), which are applied while rows are placed. Other row transforms that it
    knows may follow it, as the masking of tokens does. The decoding threads call it once the rows
    of a minibatch have arrived. Derived classes are frozen dataclasses, whose fields identify them
    in states.
    """

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Upper bound of what a row takes in a minibatch, in bytes."""

    @abstractmethod
    def require_fit(self, element: Element, following: Sequence["RowTransform"]) -> None:
        """Check that it can replace the rows of an element; called before anything is read.

        Parameters
        ----------
        element
            The element, with ``name``, ``layout``, ``row_shape`` and ``column_names``.
        following
            The row transforms after it.

        Raises
        ------
        ParameterError
            It does not fit the element or what follows.
        """

    @abstractmethod
    def bind(
        self, element: Element, following: Sequence["RowTransform"], counters: Counters
    ) -> ReplaceRows:
        """Return the function that replaces rows of an element; parameters as above.

        ``counters`` count what is made, as ``counters.add(Counter.TOKENS, n)``.
        """

    def warn(self, element: Element) -> None:  # noqa: B027 - most have nothing to say
        """Warn of what is probably not meant; called once for each dataset."""


Step = Transform | RowTransform


def split_steps(
    steps: Sequence[Step],
) -> tuple[list[Transform], RowTransform | None, list[RowTransform]]:
    """Return transforms of values, the row transform after them, and what follows that."""
    of_rows = [each for each in steps if isinstance(each, RowTransform)]
    of_values = [each for each in steps if isinstance(each, Transform)]
    return of_values, next(iter(of_rows), None), of_rows[1:]
