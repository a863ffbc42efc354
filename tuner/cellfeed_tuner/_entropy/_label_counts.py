"""How often each label occurs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import ParameterError
from cellfeed_tuner import theory

__all__ = [
    "LabelCounts", "as_codes", "count_in_parts", "count_labels", "require_a_label_for_each",
]  # fmt: skip

# Rows per part; NumPy needs 8 bytes for each.
_ROWS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class LabelCounts:
    """Rows of each occurring label, int64, shape (n_labels,), and rows without a label."""

    counts: NDArray[np.int64]
    n_missing: int

    @property
    def n_rows(self) -> int:
        """All rows."""
        return int(self.counts.sum()) + self.n_missing

    def random_entropy_bits(self, batch_size: int) -> float:
        """Return the exact expectation of random sampling; 0 if no row has a label."""
        if not self.counts.size:
            return 0.0
        return theory.random_entropy_bits(self.counts, batch_size, n_missing=self.n_missing)


def count_labels(codes: NDArray[np.integer]) -> LabelCounts:
    """Count each label from codes, negative where missing, shape (n_rows,).

    Memory does not grow with the number of rows, unless codes are far larger than that number; they
    are then sorted.
    """
    return count_in_parts(lambda part: codes[part], codes.size, int(codes.max(initial=-1)))


def count_in_parts(
    codes_in: Callable[[slice], NDArray[np.integer]], n_rows: int, most: int
) -> LabelCounts:
    """Count labels whose codes a function makes in parts; see `count_labels`."""
    if most > max(_ROWS_AT_ONCE, n_rows):
        found, counted = np.unique(codes_in(slice(0, n_rows)), return_counts=True)
        return LabelCounts(counted[found >= 0], int(counted[found < 0].sum()))
    counts = np.zeros(most + 2, dtype=np.int64)
    at_once = max(_ROWS_AT_ONCE, most)
    for start in range(0, n_rows, at_once):
        part = codes_in(slice(start, start + at_once)).astype(np.int64)
        counts += np.bincount(np.maximum(part, -1) + 1, minlength=counts.size)
    return LabelCounts(counts[1:][counts[1:] > 0], int(counts[0]))


def as_codes(labels: ArrayLike) -> NDArray[np.integer]:
    """Return labels as one-dimensional integer codes, or raise `ParameterError`."""
    codes = np.asarray(labels)
    if codes.ndim != 1 or codes.size == 0 or codes.dtype.kind not in "iu":
        msg = (
            "`labels` must be one-dimensional integer codes, at least one, "
            f"but got shape {codes.shape} and dtype {codes.dtype}"
        )
        raise ParameterError(msg)
    return codes


def require_a_label_for_each(codes: NDArray[np.integer], n_rows: int) -> None:
    """Raise `ParameterError` if there are not as many labels as rows."""
    if codes.size != n_rows:
        msg = f"there must be a label for each of {n_rows:,} rows, but there are {codes.size:,}"
        raise ParameterError(msg)
