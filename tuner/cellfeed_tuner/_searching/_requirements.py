"""What a configuration must meet, as far as that is known without measuring it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any, Protocol

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._grid import buffer_bytes, obstacle
from cellfeed_tuner._measuring._checks import cells_needed
from cellfeed_tuner._measuring._measure import Measurement
from cellfeed_tuner._planning._goal import Goal, best_mixed, fastest
from cellfeed_tuner._planning._nearby_shares import NearbyShares
from cellfeed_tuner._results._configuration_result import EntropyBits, Status
from cellfeed_tuner._results._recommended import Constraints, least_share

__all__ = ["Entropies", "Learn", "Requirements", "nothing_to_learn"]

Learn = Callable[[Measurement], bool]


def nothing_to_learn(found: Measurement) -> bool:
    """Know all entropies beforehand."""
    del found
    return False


# How far off something is that cannot be said as a ratio.
_FAR = 100.0


class Entropies(Protocol):
    """Entropy of each label, the first label first, for any `Configuration.plan_settings`."""

    def __getitem__(self, settings: tuple[Any, ...], /) -> Mapping[str, EntropyBits]:
        """Return those of one."""
        ...


@dataclass(slots=True, kw_only=True)
class Requirements:
    """Holds configurations against constraints.

    Parameters
    ----------
    n_cells, row_bytes
        Rows of the collection, and the mean size of one in a fetch's buffer.
    batch_size
        Cells of a minibatch.
    constraints
        What a choice must meet.
    entropies
        For each `Configuration.plan_settings` the entropy of each label, the first label first.
    is_planned
        Whether entropies are known before anything is measured.
    learn
        Takes note of what was measured, where entropies are not known before that, and returns
        whether that is so.
    """

    n_cells: int
    row_bytes: float
    batch_size: int
    constraints: Constraints
    entropies: Entropies
    is_planned: bool = True
    learn: Learn = nothing_to_learn
    # As far as they were replayed.
    _shares: NearbyShares = field(default_factory=NearbyShares, init=False)

    def entropies_of(self, configuration: Configuration) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first label first."""
        return self.entropies[configuration.plan_settings]

    def mixes(self, configuration: Configuration) -> bool:
        """Return whether every label is mixed as well as is asked for."""
        share = min(each.share_of_random for each in self.entropies_of(configuration).values())
        self._shares.note(configuration.block_size, configuration.fetch_factor, share)
        return self.constraints.mixes(share)

    def obstacle(self, configuration: Configuration) -> tuple[Status, str] | None:
        """Return why a configuration cannot run at all, if it cannot."""
        return obstacle(
            configuration,
            n_cells=self.n_cells,
            batch_size=self.batch_size,
            row_bytes=self.row_bytes,
            memory_bytes=self.constraints.memory_bytes,
        )

    def goal(self, candidates: Sequence[Configuration]) -> Goal:
        """Return what a search among candidates, all of which were replayed, is after."""
        need = self.constraints.need_cells_per_second
        if need is None:
            return fastest
        shares = [self._shares.estimate(each.block_size, each.fetch_factor) for each in candidates]
        return best_mixed(need, shares)

    def shortfall(self, configuration: Configuration, found: Measurement | None) -> float:
        """Return by how much a configuration misses what it must meet, 0 if it may meet all.

        As the logarithm of a ratio.

        Parameters
        ----------
        configuration
            The settings, which need not be replayed; something must be.
        found
            What was measured of it; None if nothing was.
        """
        if found is not None:
            if found.failure:
                return _FAR
            return _excess(found.peak_memory_bytes, self.constraints.memory_bytes)
        cells = max(cells_needed(configuration, self.batch_size), configuration.block_size)
        missed = _excess(cells, self.n_cells)
        buffers = buffer_bytes(configuration, self.batch_size, self.row_bytes)
        missed += _excess(buffers, self.constraints.memory_bytes)
        if missed:
            return missed
        share = self._shares.estimate(configuration.block_size, configuration.fetch_factor)
        return _excess(least_share(self.constraints.entropy_floor), share)


def _excess(found: float, allowed: float) -> float:
    """Return the logarithm of the ratio by which something exceeds what is allowed."""
    if found <= allowed:
        return 0.0
    return log(found / allowed) if allowed > 0 else _FAR
