"""All that may be chosen: a grid that is listed, or a space too large for that."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration

__all__ = ["MOST_LISTED", "Space"]

MOST_LISTED = 2000
"""With more configurations than this, they are not listed: the entropy of each pair of sizes takes
some 50 ms to replay, and the cost model's covariance grows with their square."""

# Steps of the coarse grid. Workers have less far to go.
_SIZE_STEP, _WORKER_STEP = 4, 2
# Proposals are rounded to so many significant bits: steps of 6 % to 12 %.
_SIGNIFICANT_BITS = 4


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination of a block size, a fetch factor and a number of workers.

    Parameters
    ----------
    block_sizes, fetch_factors, workers
        What each may be, ascending. A `range` stands for all integers in it.

    Examples
    --------
    >>> space = Space.of(range(1, 4097), range(1, 513), [0, 2])
    >>> space.size, space.is_large, len(space.coarse_grid())
    (4194304, True, 84)
    """

    block_sizes: Sequence[int]
    fetch_factors: Sequence[int]
    workers: Sequence[int]

    @classmethod
    def of(
        cls, block_sizes: Sequence[int], fetch_factors: Sequence[int], workers: Sequence[int]
    ) -> "Space":
        """Return the space of sizes in any order, of which some may be there twice.

        Raises
        ------
        ParameterError
            There are no sizes of one kind, or one is below what it may be.
        """
        sizes = [_ascending(each) for each in (block_sizes, fetch_factors, workers)]
        if not all(len(each) for each in sizes):
            msg = "block sizes, fetch factors and workers must each have at least one value"
            raise ParameterError(msg)
        space = cls(*sizes)
        Configuration(**{name: values[0] for name, values in space.domains.items()})
        return space

    @property
    def domains(self) -> dict[str, Sequence[int]]:
        """What each setting of a `Configuration` may be, by its name."""
        return {
            "block_size": self.block_sizes,
            "fetch_factor": self.fetch_factors,
            "num_workers": self.workers,
        }

    @property
    def size(self) -> int:
        """How many configurations there are."""
        return prod(len(each) for each in self.domains.values())

    @property
    def is_large(self) -> bool:
        """Whether there are too many to list."""
        return self.size > MOST_LISTED

    def __contains__(self, configuration: Configuration) -> bool:
        return all(getattr(configuration, name) in values for name, values in self.domains.items())

    def covers(self, other: "Space") -> bool:
        """Return whether who has searched this has searched the other, too.

        Of a space too large to list, only the neighbourhood of its best was looked at.
        """
        if self.is_large or other.is_large:
            return self == other
        pairs = zip(self.domains.values(), other.domains.values(), strict=True)
        return all(set(mine) >= set(theirs) for mine, theirs in pairs)

    def grid(self) -> list[Configuration]:
        """Return all configurations in their order."""
        return _product(self.block_sizes, self.fetch_factors, self.workers)

    def coarse_grid(self) -> list[Configuration]:
        """Return a grid of the ends of each range and the powers of 4 between (of 2 for workers).

        Where a size is not one of the values, the nearest one is.
        """
        return _product(
            _coarse(self.block_sizes, _SIZE_STEP),
            _coarse(self.fetch_factors, _SIZE_STEP),
            _coarse(self.workers, _WORKER_STEP),
        )

    def nearest(self, *, block_size: int, fetch_factor: int, num_workers: int) -> Configuration:
        """Return the configuration next to rounded sizes.

        Neither speed nor entropy changes by more than can be measured from one rounded size to
        the next, and what is rounded alike is replayed and timed once. Blocks need not divide
        the fetch: one that straddles two fetches is read in two parts, which counts where a
        fetch holds few blocks, and both replay and timing count it.
        """
        return Configuration(
            block_size=_nearest(self.block_sizes, _rounded(block_size)),
            fetch_factor=_nearest(self.fetch_factors, _rounded(fetch_factor)),
            num_workers=_nearest(self.workers, num_workers),
        )


def _ascending(sizes: Sequence[int]) -> Sequence[int]:
    if isinstance(sizes, range):
        return sizes if sizes.step > 0 else sizes[::-1]
    return tuple(sorted(set(sizes)))


def _product(
    block_sizes: Sequence[int], fetch_factors: Sequence[int], workers: Sequence[int]
) -> list[Configuration]:
    return [
        Configuration(block_size=block_size, fetch_factor=fetch_factor, num_workers=num_workers)
        for block_size, fetch_factor, num_workers in product(block_sizes, fetch_factors, workers)
    ]


def _coarse(sizes: Sequence[int], step: int) -> list[int]:
    found, power = {sizes[0], sizes[-1]}, 1
    while power < sizes[-1]:
        if power > sizes[0]:
            found.add(_nearest(sizes, power))
        power *= step
    return sorted(found)


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    """Return the value whose ratio to ``wanted`` is nearest to 1; 0 counts as a half."""
    place = bisect_left(sizes, wanted)
    around = sizes[max(0, place - 1) : place + 1]
    return min(around, key=lambda size: max(size, wanted) / max(0.5, min(size, wanted)))


def _rounded(size: int) -> int:
    """Return a size with so many significant bits, such as 11, 104 or 1152."""
    step = 1 << max(0, size.bit_length() - _SIGNIFICANT_BITS)
    return round(size / step) * step
