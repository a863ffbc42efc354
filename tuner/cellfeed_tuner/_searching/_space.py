"""The search space: a grid that is listed, or a space too large for that."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, cast

import numpy as np

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration, Setting

# Most configurations of a space that are all listed; a larger space gets a coarse grid, then the
# surroundings of the best. Chosen: replaying a pair of sizes takes about 50 ms, and the
# model's covariance grows with the square of their number.
MOST_LISTED = 2000
# Factors between neighbours in the coarse grid: for sizes, and for processes and threads. Chosen:
# the latter span a smaller range.
SIZE_STEP, WORKER_STEP = 4, 2
# Proposals are rounded to this many significant bits. Chosen: neither speed nor entropy changes
# measurably within steps of 6 % to 12 %.
SIGNIFICANT_BITS = 4
# Factor between a size and its neighbours around a configuration. Chosen.
AROUND_STEP = 2**0.5
# Numbers of these steps in block size and fetch. Chosen: a fetch with as many blocks mixes as
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
        asked: dict[str, Sequence[Setting]] = {**common, **others}
        domains = {name: _ascending(values) for name, values in asked.items()}
        empty = [name for name, values in domains.items() if not len(values)]
        if empty:
            msg = f"each setting must have at least one value, but {empty[0]} has none"
            raise ParameterError(msg)
        space = cls(domains)
        space._configuration(values[0] for values in domains.values())
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
    def others(self) -> dict[str, Sequence[Setting]]:
        """Values of the other settings."""
        return dict(list(self.domains.items())[3:])

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
        return self._product(self.domains)

    def coarse_grid(self) -> list[Configuration]:
        """Return a grid of the ends of each range and the powers of 4 between (of 2 for workers).

        A power that is not one of the values is replaced by the nearest. Settings that are not
        sizes keep all values.
        """
        return self._product({name: _coarse(name, each) for name, each in self.domains.items()})

    def nearest(self, **settings: Setting) -> Configuration:
        """Return the configuration nearest to rounded sizes, so that similar ones are timed once.

        Blocks need not divide the fetch: a block that straddles two fetches is read in two parts,
        which both replay and timing account for.
        """
        return self._configuration(
            _nearest_setting(name, values, settings[name]) for name, values in self.domains.items()
        )

    def around(self, configuration: Configuration) -> list[Configuration]:
        """Return 0.5 to 2 times the block, the fetch or both, and a worker more or less.

        Examples
        --------
        >>> space = Space.of(range(1, 4097), range(1, 513), [0, 1])
        >>> found = space.around(Configuration(block_size=64, fetch_factor=64))
        >>> [(each.block_size, each.fetch_factor, each.num_workers) for each in found[:2]]
        [(32, 32, 0), (44, 44, 0)]
        """
        block, fetch = configuration.block_size, configuration.fetch_factor
        workers, others = configuration.num_workers, configuration.others
        sizes = [(block * AROUND_STEP**i, fetch * AROUND_STEP**j, workers) for i, j in AROUND]
        sizes += [(block, fetch, workers + more) for more in (-1, 1) if workers + more >= 0]
        found = [
            self.nearest(
                block_size=max(1, round(b)), fetch_factor=max(1, round(f)), num_workers=w, **others
            )
            for b, f, w in sizes
        ]
        return [each for each in dict.fromkeys(found) if each != configuration]

    def best_mixed(self) -> list[Configuration]:
        """Return the smallest blocks, in the largest fetches first, with the fewest workers."""
        fetch, found = float(self.fetch_factors[-1]), list[Configuration]()
        sizes = {"block_size": self.block_sizes[0], "num_workers": self.workers[0]}
        while fetch >= self.fetch_factors[0]:
            for values in product(*self.others.values()):
                others = dict(zip(self.others, values, strict=True))
                found.append(self.nearest(fetch_factor=round(fetch), **sizes, **others))
            fetch /= AROUND_STEP
        return list(dict.fromkeys(found))

    def ends(self) -> list[Configuration]:
        """Return the configurations of the least and of the largest values."""
        ends = ((values[place] for values in self.domains.values()) for place in (0, -1))
        return [self._configuration(each) for each in ends]

    def _product(self, domains: Mapping[str, Sequence[Setting]]) -> list[Configuration]:
        return [self._configuration(values) for values in product(*domains.values())]

    def _configuration(self, values: Iterable[Setting]) -> Configuration:
        settings: dict[str, Any] = dict(zip(self.domains, values, strict=True))
        return Configuration(**settings)


def are_sizes(values: Sequence[Setting]) -> bool:
    """Return whether values are integers, so that others may lie between them."""
    return isinstance(values, range) or all(type(each) is int for each in values)


def _ascending(values: Sequence[Setting]) -> Sequence[Setting]:
    if isinstance(values, range):
        return values if values.step > 0 else values[::-1]
    given: Sequence[Any] = values  # which may be NumPy's
    plain = (each.item() if isinstance(each, np.generic) else each for each in given)
    distinct = tuple(dict.fromkeys(plain))
    return tuple(sorted(cast("Any", distinct))) if are_sizes(distinct) else distinct


def _coarse(name: str, values: Sequence[Setting]) -> Sequence[Setting]:
    if not are_sizes(values):
        return values
    sizes, step = cast("Sequence[int]", values), WORKER_STEP if name in _FEW else SIZE_STEP
    found, power = {sizes[0], sizes[-1]}, 1
    while power < sizes[-1]:
        if power > sizes[0]:
            found.add(_nearest(sizes, power))
        power *= step
    return sorted(found)


def _nearest_setting(name: str, values: Sequence[Setting], wanted: Setting) -> Setting:
    if not are_sizes(values):
        return wanted
    size = cast("int", wanted)
    return _nearest(cast("Sequence[int]", values), size if name in _FEW else _rounded(size))


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    """Return the value whose ratio to ``wanted`` is nearest to 1; 0 counts as a half."""
    place = bisect_left(sizes, wanted)
    around = sizes[max(0, place - 1) : place + 1]
    return min(around, key=lambda size: max(size, wanted) / max(0.5, min(size, wanted)))


def _rounded(size: int) -> int:
    """Return a size with so many significant bits, such as 11, 104 or 1152."""
    step = 1 << max(0, size.bit_length() - SIGNIFICANT_BITS)
    return round(size / step) * step
