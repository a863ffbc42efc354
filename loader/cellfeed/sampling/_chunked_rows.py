"""The rows of a file, as far as chunks of storage hold several of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError

__all__ = ["ChunkedRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkedRows:
    """The rows of one file, one after the other in chunks that are decompressed as a whole.

    Parameters
    ----------
    n_rows
        How many there are.
    chunk_size
        Elements of a chunk; 0 where rows are not in such chunks, so that any may begin a block.
    row_size
        Elements of each row, where all have as many.
    pointer
        Where each row begins, ascending, int64, shape (n_rows + 1,), where they have not.
    """

    n_rows: int
    chunk_size: int = 0
    row_size: int = 0
    pointer: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        """Let the row pointer be what compiled code takes it for."""
        if self.pointer is not None:
            pointer = np.ascontiguousarray(self.pointer, np.int64)
            object.__setattr__(self, "pointer", pointer)
            if pointer.shape != (self.n_rows + 1,):
                msg = (
                    f"`pointer` must have {self.n_rows + 1} values, one more than rows, but has "
                    f"shape {pointer.shape}"
                )
                raise ParameterError(msg)

    @property
    def n_elements(self) -> int:
        """Elements of all rows."""
        if self.pointer is None:
            return self.n_rows * self.row_size
        return int(self.pointer[-1])
