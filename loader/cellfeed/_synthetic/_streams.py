"""Independent random streams, so that plates can be written in any order and by any process."""

from enum import IntEnum

import numpy as np

__all__ = ["Stream", "random_stream"]


class Stream(IntEnum):
    """Purposes of random streams; the numbers determine the output."""

    WELLS = 0
    LAYOUT = 1
    BASELINE = 2
    CELL_LINES = 3
    DRUGS = 4
    MECHANISMS = 5
    PLATE_EFFECT = 6
    COUNTS = 7


def random_stream(seed: int, stream: Stream, plate: int = 0) -> np.random.Generator:
    """Return the generator for one purpose and one plate, at its beginning."""
    return np.random.default_rng([seed, stream, plate])
