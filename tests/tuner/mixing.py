"""Labels alone, of cells that nobody reads: how well plans mix them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._entropy import count_labels
from cellfeed_tuner._mixing import Mixing
from cellfeed_tuner._subject import BlockPlans, Label, LoaderPlans, Selected

__all__ = ["BlockPlans", "Label", "LoaderPlans", "Mixing", "Selected", "label_of", "mixing_of"]


def label_of(name: str, codes: NDArray[Any], drawn: NDArray[Any] | None = None) -> Label:
    """A label by its codes, -1 where missing; ``drawn`` are the rows that an epoch visits."""
    of_drawn = None if drawn is None else count_labels(codes[drawn])
    return Label(name, codes, count_labels(codes), of_drawn)


def mixing_of(
    labels: Mapping[str, NDArray[np.integer[Any]]],
    *,
    floor: float = 0.99,
    batch_size: int = 64,
    seed: int = 0,
) -> Mixing:
    """How shuffled blocks of all cells mix labels."""
    made = [label_of(name, codes) for name, codes in labels.items()]
    plans = BlockPlans(made[0].codes.size, batch_size=batch_size, seed=seed)
    return Mixing(made, plans, entropy_floor=floor)
