"""Transforms of one element, before and after sparse rows are made dense."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

import numpy as np

from cellfeed._chunks import Counters, ValueSteps
from cellfeed._layouts import Layout
from cellfeed.transforms import Transform

__all__ = ["ElementTransforms", "Transforms", "as_stored"]

Transforms = Mapping[str, Sequence[Transform]]
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
