"""One point of the grid."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cellfeed import ParameterError

if TYPE_CHECKING:
    from cellfeed import EpochPlan

__all__ = ["Configuration"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Configuration:
    """Settings of a loader that the tuner chooses.

    Parameters
    ----------
    block_size
        Rows of a block, at least 1.
    fetch_factor
        Minibatches of a fetch, at least 1.
    num_workers
        Worker processes of the DataLoader; 0 reads in the training process.

    Raises
    ------
    ParameterError
        A size is below what it may be.
    """

    block_size: int
    fetch_factor: int
    num_workers: int = 0

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name, least in (("block_size", 1), ("fetch_factor", 1), ("num_workers", 0)):
            if getattr(self, name) < least:
                msg = f"`{name} >= {least}` must hold, but got {name}={getattr(self, name)}"
                raise ParameterError(msg)

    @property
    def fetches_per_round(self) -> int:
        """Fetches that are under way at the same time."""
        return max(1, self.num_workers)

    @property
    def minibatches_per_round(self) -> int:
        """Minibatches after which every worker has delivered one whole fetch."""
        return self.fetch_factor * self.fetches_per_round

    @property
    def minibatches_in_memory(self) -> int:
        """Minibatches that buffers hold at most.

        While one fetch is delivered, the next is read; of those of workers, one more may wait.
        """
        return self.minibatches_per_round * (3 if self.num_workers else 2)

    def rounds_per_epoch(self, plan: "EpochPlan") -> int:
        """Return how many rounds of whole fetches an epoch has."""
        return plan.n_whole_fetches // self.fetches_per_round

    def __str__(self) -> str:
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        return f"block size {self.block_size}, fetch factor {self.fetch_factor}, {workers}"
