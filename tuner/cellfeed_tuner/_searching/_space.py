"""The search space: a grid that is listed, or a space too large for that."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2, prod
from typing import Any, cast

import numpy as np

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration, Setting

# Most configurations of a space that are all listed; a larger space gets a coarse grid, then the
# surroundings of the best. Chosen: replaying a pair of sizes takes about 50 ms, and the
# model's covariance grows with the square of their number.
MOST_LISTED = 2000
# Values of a size in a doubling: in the coarse grid, and around a configuration. Chosen: neither
# speed nor entropy changes measurably between the latter.
COARSE, FINE = 0.5, 2.0
# The same in the coarse grid for processes and threads. Chosen: they span a smaller range.
COARSE_OF_FEW = 1.0
# Steps in block size and fetch around a configuration. Chosen: a fetch with as many blocks mixes as
# well, and one with more blocks mixes better.
AROUND = ((-2, -2), (-1, -1), (1, 1), (2, 2), (-1, 0), (1, 0), (0, -1), (0, 1))

_FEW = ("num_workers", "num_threads")


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination of the values of each setting of a `Configuration`.

    Integers are in ascending order, and a `range` stands for all its integers; other values are in
    the order given.

    Examples
    --------
    >>> space = Space.of(range(1, 4097), range(1, 513), [0, 2])
    >>> space.size, space.is_large, len(space.coarse_grid())
    (4194304, True, 84)
    """

    domains: Mapping[str, Sequence[Setting]]

    @classmethod
    def of(
        cls,
        block_sizes: Sequence[int] = (1,),
        fetch_factors: Sequence[int] = (1,),
        workers: Sequence[int] = (0,),
        /,
        **others: Sequence[Setting],
    ) -> "Space":
        """Return the space of values in any order, possibly repeated.

        Raises
        ------
        ParameterError
            A setting has no values, or one is below what it may be.
        """
        common = {"block_size": block_sizes, "fetch_factor": fetch_factors, "num_workers": workers}
        space = cls({name: _ascending(each) for name, each in {**common, **others}.items()})
        for name, values in space.domains.items():
            if not len(values):
                msg = f"each setting must have at least one value, but {name} has none"
                raise ParameterError(msg)
        space.ends()
        return space

    @property
    def block_sizes(self) -> Sequence[int]:
        """Values of the block size."""
        return cast("Sequence[int]", self.domains["block_size"])

    @property
    def fetch_factors(self) -> Sequence[int]:
        """Values of the fetch factor."""
        return cast("Sequence[int]", self.domains["fetch_factor"])

    @property
    def workers(self) -> Sequence[int]:
        """Values of the number of workers."""
        return cast("Sequence[int]", self.domains["num_workers"])

    @property
    def size(self) -> int:
        """Number of configurations."""
        return prod(len(each) for each in self.domains.values())

    @property
    def is_large(self) -> bool:
        """Whether there are too many to list."""
        return self.size > MOST_LISTED

    def __contains__(self, configuration: object) -> bool:
        return (
            isinstance(configuration, Configuration)
            and configuration.keys() == self.domains.keys()
            and all(configuration[name] in values for name, values in self.domains.items())
        )

    def grid(self) -> list[Configuration]:
        """Return all configurations in their order."""
        return _product(self.domains)

    def coarse_grid(self) -> list[Configuration]:
        """Return a grid of the ends of each range and the powers of 4 between (of 2 for workers).

        A power that is not one of the values is replaced by the nearest. Settings that are not
        sizes keep all values.
        """
        return _product(
            {
                name: _thinned(values, COARSE_OF_FEW if name in _FEW else COARSE)
                for name, values in self.domains.items()
            }
        )

    def around(self, configuration: Configuration) -> list[Configuration]:
        """Return 0.5 to 2 times the block, the fetch or both, and a worker more or less.

        Blocks need not divide the fetch: a block that straddles two fetches is read in two parts,
        which both replay and timing account for.

        Examples
        --------
        >>> space = Space.of(range(1, 4097), range(1, 513), [0, 1])
        >>> found = space.around(Configuration(block_size=64, fetch_factor=64))
        >>> [(each.block_size, each.fetch_factor, each.num_workers) for each in found[:2]]
        [(32, 32, 0), (45, 45, 0)]
        """
        fine = {
            n: self.domains[n] if n in _FEW else _thinned(self.domains[n], FINE) for n in _SIZES
        }
        moves = [(*each, 0) for each in AROUND] + [(0, 0, -1), (0, 0, 1)]
        found = [
            configuration.changed(
                **{
                    name: _moved(values, configuration[name], steps)
                    for (name, values), steps in zip(fine.items(), move, strict=True)
                }
            )
            for move in moves
        ]
        return [each for each in dict.fromkeys(found) if each != configuration]

    def best_mixed(self) -> list[Configuration]:
        """Return the smallest blocks, in the largest fetches first, with the fewest workers."""
        least = {"block_size": self.block_sizes[:1], "num_workers": self.workers[:1]}
        fetches = _thinned(self.fetch_factors, FINE)
        found = _product({**self.domains, **least, "fetch_factor": fetches})
        return sorted(found, key=lambda each: -each.fetch_factor)

    def ends(self) -> list[Configuration]:
        """Return the configurations of the least and of the largest values."""
        return [
            _product({name: (values[place],) for name, values in self.domains.items()})[0]
            for place in (0, -1)
        ]


_SIZES = ("block_size", "fetch_factor", "num_workers")


def are_sizes(values: Sequence[Setting]) -> bool:
    """Return whether values are integers, so that others may lie between them."""
    return isinstance(values, range) or all(type(each) is int for each in values)


def _product(domains: Mapping[str, Iterable[Setting]]) -> list[Configuration]:
    settings: list[dict[str, Any]] = [
        dict(zip(domains, values, strict=True)) for values in product(*domains.values())
    ]
    return [Configuration(**each) for each in settings]


def _ascending(values: Sequence[Setting]) -> Sequence[Setting]:
    if isinstance(values, range):
        return values if values.step > 0 else values[::-1]
    some: Sequence[Any] = values
    plain = (each.item() if isinstance(each, np.generic) else each for each in some)
    distinct = tuple(dict.fromkeys(plain))
    return tuple(sorted(cast("Any", distinct))) if are_sizes(distinct) else distinct


def _thinned(values: Sequence[Setting], per_doubling: float) -> Sequence[Setting]:
    """Return the ends of sizes, and those nearest to so many powers between; others as they are."""
    if not are_sizes(values):
        return values
    sizes = cast("Sequence[int]", values)
    first, last = sizes[0], sizes[-1]
    n_steps = int(per_doubling * log2(max(1, last))) + 1
    powers = [round(2 ** (step / per_doubling)) for step in range(n_steps)]
    return sorted({first, last, *(_nearest(sizes, each) for each in powers if first < each < last)})


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    """Return the value whose ratio to ``wanted`` is nearest to 1; 0 counts as a half."""
    place = bisect_left(sizes, wanted)
    around = sizes[max(0, place - 1) : place + 1]
    return min(around, key=lambda size: max(size, wanted) / max(0.5, min(size, wanted)))


def _moved(values: Sequence[Setting], value: Setting, steps: int) -> Setting:
    """Return the value so many steps away, or the last one on the way."""
    place = bisect_left(cast("Any", values), value) + steps
    return values[min(max(0, place), len(values) - 1)]
