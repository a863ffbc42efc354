"""What a configuration must meet, as far as that is known without measuring it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Protocol

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._checks import obstacle
from cellfeed_tuner._measuring._measure import Measurement
from cellfeed_tuner._planning._constants import NEED_MARGIN, SHARE_PER_DOUBLING
from cellfeed_tuner._planning._posterior import Goal, best_mixed, fastest
from cellfeed_tuner._results._configuration_result import EntropyBits, Status
from cellfeed_tuner._results._recommended import SAME_ENTROPY_SHARE, Constraints, least_share

__all__ = ["Entropies", "Learn", "Requirements", "nothing_to_learn"]

Learn = Callable[[Measurement], bool]


def nothing_to_learn(found: Measurement) -> bool:
    """Know all entropies beforehand."""
    del found
    return False


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
        Cells of an epoch of a rank, and the mean size of one in a fetch's buffer.
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

    def entropies_of(self, configuration: Configuration) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first label first."""
        return self.entropies[configuration.plan_settings]

    def mixes(self, configuration: Configuration) -> bool:
        """Return whether every label is mixed as well as is asked for."""
        return self.constraints.mixes(self.share(configuration))

    def share(self, configuration: Configuration) -> float:
        """Return the entropy of the label that is mixed least, as a share of random sampling's."""
        return min(each.share_of_random for each in self.entropies_of(configuration).values())

    def excesses(self, configuration: Configuration, peak_memory_bytes: int) -> dict[str, float]:
        """Return by how much what was measured misses each constraint, at most 0 if it meets it."""
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
        """Return what a search among candidates is after."""
        need = self.constraints.need_cells_per_second
        if need is None:
            return fastest
        return best_mixed(NEED_MARGIN * need, [self.worth(each) for each in candidates])

    def worth(self, configuration: Configuration) -> float:
        """Return how well a configuration mixes; of what mixes alike, the smaller is better."""
        share = round(self.share(configuration) / SAME_ENTROPY_SHARE) * SAME_ENTROPY_SHARE
        return share - SHARE_PER_DOUBLING * log2(configuration.minibatches_in_memory)
