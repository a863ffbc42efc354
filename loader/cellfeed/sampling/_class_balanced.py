"""Cells drawn so that all classes are equally frequent."""

from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._errors import ParameterError
from cellfeed.sampling._base import EpochOrder
from cellfeed.sampling._indices import n_available, sorted_indices, sorted_with
from cellfeed.sampling._labels import codes_of_columns, label_codes
from cellfeed.sampling._masses import CellWeights
from cellfeed.sampling._weighted import WeightedBlocks, require_length, require_some, rows_of

__all__ = ["ClassBalancedSampling"]


@dataclass(frozen=True, eq=False)
class ClassBalancedSampling(WeightedBlocks):
    """Draw cells so that every class is equally frequent, in contiguous blocks.

    This is `BlockWeightedSampling` with the weight 1 / (number of cells of the class) for each
    cell; see there for how cells are drawn. With 3 classes, for example, each class gets a third of
    the draws on average over epochs, and nearly a third in each epoch.

    Parameters
    ----------
    labels
        The class of each cell: numbers, text or categories. Cells without a class (NaN, None, or
        the number -1, whatever the dtype) are never drawn; other negative numbers are classes.
        Give one label for each row of the collection, and classes are counted in the whole
        collection; one for each of ``indices``, and they are counted among these; or the name of an
        obs column of the collection, and they are counted among ``indices``.
    block_size
        Number of draws in a block.
    indices
        The rows to draw from; all rows if None. They are sorted, with a warning if they were not.
    total_size, replace, sampling_size
        See `BlockWeightedSampling`. Without replacement, all cells of a small class are drawn,
        and the remaining draws are divided among the other classes.

    Raises
    ------
    ParameterError
        A size is below one, labels cannot be used, or there are too few cells with labels to draw
        none twice.

    Notes
    -----
    Labels take the memory of their codes, an eighth of the memory of weights if there are few
    classes.

    Examples
    --------
    >>> strategy = ClassBalancedSampling(["B", "B", "B", "NK", None], total_size=6, block_size=1)
    >>> np.bincount(strategy.epoch_order(n_rows=5, epoch_key=0)(np.arange(6)))
    array([1, 1, 1, 3])
    """

    labels: ArrayLike | str
    block_size: int = 8
    indices: ArrayLike | None = None
    total_size: int | None = None
    replace: bool = True
    sampling_size: int | None = None

    def __post_init__(self) -> None:
        """Check the parameters; count the classes."""
        self._prepare_sizes()
        if isinstance(self.labels, str):
            object.__setattr__(self, "indices", sorted_indices(self.indices))
            self._prepare_masses(None)
            return
        codes = sorted_with(self.indices, label_codes(self.labels))
        object.__setattr__(self, "indices", sorted_indices(self.indices))
        object.__setattr__(self, "labels", codes)
        rows = rows_of(self.indices, codes.size, "labels")
        weights = CellWeights(_class_weights(codes), codes, rows)
        self._prepare_masses(require_some(weights, "labels"))

    def bound_to(self, collection: Any) -> "ClassBalancedSampling":
        """Return the strategy with the labels of the obs column that ``labels`` names."""
        if not isinstance(self.labels, str):
            return self
        codes = codes_of_columns(collection, (self.labels,))
        if self.indices is not None:
            n_available(self.indices, codes.size)
            codes = codes[np.asarray(self.indices)]
        return changed(self, labels=codes)

    def epoch_order(self, *, n_rows: int, epoch_key: int) -> EpochOrder:
        """Return the draws of one epoch, without memory that grows with rows."""
        if isinstance(self.labels, str):
            msg = (
                f"`labels` is the name {self.labels!r}, whose column is not read yet; pass the "
                "strategy to a CellDataset, or call bound_to(collection)"
            )
            raise ParameterError(msg)
        return super().epoch_order(n_rows=n_rows, epoch_key=epoch_key)

    def _require_length(self, n_rows: int) -> None:
        if not isinstance(self.labels, str):
            require_length("labels", np.size(self.labels), self.indices, n_rows)


def _class_weights(codes: NDArray[np.signedinteger[Any]]) -> NDArray[np.float64]:
    """Return the weight of a cell of each class, and 0 for cells without one."""
    counts = np.bincount(codes[codes >= 0]) if codes.min() < 0 else np.bincount(codes)
    weights = np.zeros(counts.size + 1)
    np.divide(1.0, counts, out=weights[:-1], where=counts > 0)
    return weights
