"""What else to look at in a space too large to list."""

from itertools import product
from typing import Any

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._planning._space import Space

__all__ = ["around", "best_mixed", "ends"]

# Steps of sizes, and how many of them are taken in block and fetch around a configuration: what has
# as many blocks in a fetch mixes as well, and what has more mixes better.
_STEP = 2**0.5
_STEPS = ((-2, -2), (-1, -1), (1, 1), (2, 2), (-1, 0), (1, 0), (0, -1), (0, 1))


def around(space: Space, configuration: Configuration) -> list[Configuration]:
    """Return what is 0.5 to 2 times as large in block, fetch or both, or has a worker more or less.

    Examples
    --------
    >>> space = Space.of(range(1, 4097), range(1, 513), [0, 1])
    >>> found = around(space, Configuration(block_size=64, fetch_factor=64))
    >>> [(each.block_size, each.fetch_factor, each.num_workers) for each in found[:2]]
    [(32, 32, 0), (44, 44, 0)]
    """
    block, fetch = configuration.block_size, configuration.fetch_factor
    workers, others = configuration.num_workers, configuration.others
    sizes = [(block * _STEP**i, fetch * _STEP**j, workers) for i, j in _STEPS]
    sizes += [(block, fetch, workers + more) for more in (-1, 1) if workers + more >= 0]
    found = [
        space.nearest(
            block_size=max(1, round(b)), fetch_factor=max(1, round(f)), num_workers=w, **others
        )
        for b, f, w in sizes
    ]
    return [each for each in dict.fromkeys(found) if each != configuration]


def best_mixed(space: Space) -> list[Configuration]:
    """Return the smallest blocks, in the largest fetches first, with the fewest workers."""
    fetch, found = float(space.fetch_factors[-1]), list[Configuration]()
    sizes = {"block_size": space.block_sizes[0], "num_workers": space.workers[0]}
    while fetch >= space.fetch_factors[0]:
        for values in product(*space.others.values()):
            others = dict(zip(space.others, values, strict=True))
            found.append(space.nearest(fetch_factor=round(fetch), **sizes, **others))
        fetch /= _STEP
    return list(dict.fromkeys(found))


def ends(space: Space) -> tuple[Configuration, Configuration]:
    """Return the least and the largest of all settings."""
    domains = space.domains.items()
    least: dict[str, Any] = {name: values[0] for name, values in domains}
    largest: dict[str, Any] = {name: values[-1] for name, values in domains}
    return Configuration(**least), Configuration(**largest)
