"""An epoch that is stopped again and again, and goes on with other numbers of ranks."""

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from cellfeed import CellDataset


def in_parts(
    draw: Callable[[Any], Any], make: Callable[[int, int], CellDataset], most: int
) -> tuple[list[Any], int]:
    """Deliver an epoch with stops, each time by another number of ranks.

    Parameters
    ----------
    draw
        Draws from a strategy of hypothesis.
    make
        Returns the dataset of a rank, given the number of ranks too.
    most
        After how many minibatches of a rank it is stopped at the latest.

    Returns
    -------
    minibatches
        What was delivered.
    n_added
        How many ranks there were beside the first, each time.
    """
    found, n_added, state = list[Any](), 0, dict[str, Any]()
    while state.get("epoch", 0) == 0:
        ranks, n = draw(st.integers(1, 3)), draw(st.integers(1, most))
        datasets = [make(rank, ranks) for rank in range(ranks)]
        for dataset in datasets:
            if state:
                dataset.load_state_dict(state)
            found += itertools.islice(dataset, n)
        state, *others = (dataset.state_dict() for dataset in datasets)
        assert all(each == state for each in others)
        n_added += ranks - 1
    return found, n_added
