"""How well sizes mix, estimated from the replay of others."""

from math import hypot, log

__all__ = ["NearbyShares"]


class NearbyShares:
    """Estimates entropies as shares of random sampling's, where a replay would take too long.

    What entropy lacks is inversely proportional to the number of blocks in a fetch, to first
    order (see `theory.lower_bound_bits`), so it is taken from the replayed pair next to it, in
    that proportion. Which pairs are as good as feasible is all that this has to tell.

    Examples
    --------
    >>> shares = NearbyShares()
    >>> shares.note(16, 16, 0.9)
    >>> [round(shares.estimate(*sizes), 3) for sizes in ((16, 16), (16, 32), (24, 16))]
    [0.9, 0.95, 0.85]
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], float] = {}

    def note(self, block_size: int, fetch_factor: int, share: float) -> None:
        """Take note of a replay."""
        self._known[block_size, fetch_factor] = share

    def estimate(self, block_size: int, fetch_factor: int) -> float:
        """Return about which share two sizes give, exactly if it was noted; something must be."""
        if (block_size, fetch_factor) in self._known:
            return self._known[block_size, fetch_factor]
        block, fetch = min(
            self._known, key=lambda pair: _distance(pair, (block_size, fetch_factor))
        )
        lacking = 1 - self._known[block, fetch]
        return max(0.0, 1 - lacking * (block_size / block) * (fetch / fetch_factor))


def _distance(one: tuple[int, int], other: tuple[int, int]) -> float:
    return hypot(log(one[0] / other[0]), log(one[1] / other[1]))
