"""Constraints, and which configurations meet them before anything is measured."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Protocol

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._delivery import obstacle
from cellfeed_tuner._measuring._measurement import Measurement
from cellfeed_tuner._planning._posterior import Goal, best_mixed, fastest
from cellfeed_tuner._results import (
    SAME_ENTROPY_SHARE,
    Constraints,
    EntropyBits,
    Status,
    least_share,
)

# Factor by which the search aims above the needed throughput. Chosen: the lower end of its
# interval must be sufficient.
NEED_MARGIN = 1.05
# Value of twice the memory, as a share of random sampling's entropy. Chosen: of configurations
# that mix alike, the smaller one is proposed.
SHARE_PER_DOUBLING = 2e-5

Learn = Callable[[Measurement], bool]


def nothing_to_learn(found: Measurement) -> bool:
    """Learn nothing: all entropies are known beforehand."""
    del found
    return False


class Entropies(Protocol):
    """Entropy of each label by `Configuration.plan_settings`."""

    def __getitem__(self, settings: tuple[Any, ...], /) -> Mapping[str, EntropyBits]:
        """Return the entropies of one configuration, the first label first."""
        ...


@dataclass(slots=True, kw_only=True)
class Requirements:
    """Compares configurations with the constraints.

    Parameters
    ----------
    n_cells, row_bytes
        Cells of an epoch of a rank, and the mean size of one in a fetch's buffer.
    is_planned
        Whether entropies are known before anything is measured.
    learn
        Updates entropies with a measurement; returns whether they were unknown before.
    """

    n_cells: int
    row_bytes: float
    batch_size: int
    constraints: Constraints
    entropies: Entropies
    is_planned: bool = True
    learn: Learn = nothing_to_learn

    def entropies_of(self, configuration: Configuration) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first label first."""
        return self.entropies[configuration.plan_settings]

    def mixes(self, configuration: Configuration) -> bool:
        """Return whether every label reaches the entropy floor."""
        return self.constraints.mixes(self.share(configuration))

    def share(self, configuration: Configuration) -> float:
        """Return the entropy of the least mixed label, as a share of random sampling's."""
        return min(each.share_of_random for each in self.entropies_of(configuration).values())

    def excesses(self, configuration: Configuration, peak_memory_bytes: int) -> dict[str, float]:
        """Return by how much a configuration misses each constraint; at most 0 if it meets it."""
        constraints = self.constraints
        return {
            "entropy": least_share(constraints.entropy_floor) - self.share(configuration),
            "memory": float(peak_memory_bytes - constraints.memory_bytes),
        }

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
        """Return the goal of a search among candidates."""
        need = self.constraints.need_cells_per_second
        if need is None:
            return fastest
        return best_mixed(NEED_MARGIN * need, [self.worth(each) for each in candidates])

    def worth(self, configuration: Configuration) -> float:
        """Return how well a configuration mixes, slightly less if it takes more memory."""
        share = round(self.share(configuration) / SAME_ENTROPY_SHARE) * SAME_ENTROPY_SHARE
        return share - SHARE_PER_DOUBLING * log2(configuration.minibatches_in_memory)
