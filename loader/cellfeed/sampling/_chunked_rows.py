"""How the rows of a file are divided into chunks."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError

__all__ = ["ChunkedRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """The rows of one file, stored consecutively in chunks that are decompressed as a whole.

    Parameters
    ----------
    n_rows
        Number of rows.
    chunk_size
        Elements in a chunk; 0 if rows are not in such chunks, so that any row may begin a block.
    row_size
        Elements in each row, if all rows have equally many.
    pointer
        Otherwise, the first element of each row, ascending, int64, shape (n_rows + 1,).
    """

    n_rows: int
    chunk_size: int = 0
    row_size: int = 0
    pointer: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Check the row pointers, and convert them for compiled code."""
        if self.pointer is not None:
            pointer = np.ascontiguousarray(self.pointer, np.int64)
            object.__setattr__(self, "pointer", pointer)
            if pointer.shape != (self.n_rows + 1,):
                msg = (
                    f"`pointer` must have {self.n_rows + 1} values, one more than rows, but got "
                    f"shape {pointer.shape}"
                )
                raise ParameterError(msg)

    @property
    def n_elements(self) -> int:
        """Number of elements in all rows."""
        if self.pointer is None:
            return self.n_rows * self.row_size
        return int(self.pointer[-1])
