"""A DataLoader of which each epoch begins in the process that trains."""

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from cellfeed._epochs import Start
from cellfeed._errors import ParameterError

if TYPE_CHECKING:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    from cellfeed._dataset import CellDataset

__all__ = ["EpochLoader"]


class EpochLoader(DataLoader[Any]):
    """A DataLoader that begins each epoch in this process, also for worker processes.

    Its epochs are then those of the order in which iterations began, however late a worker
    starts, and ranks that have just met can agree on a seed.
    """

    dataset: "CellDataset"
    _first_worker: Start | None = None
    _n_iterations = 0  # by the workers that are there
    _ranks_of_workers: tuple[int, int] | None = None

    def __iter__(self) -> "_BaseDataLoaderIter":
        if self.num_workers:
            self._begin_for_workers()
        return super().__iter__()

    def _begin_for_workers(self) -> None:
        ranks = self.dataset.rank, self.dataset.world_size
        if not self.persistent_workers or self._first_worker is None:
            self._first_worker, self._n_iterations, self._ranks_of_workers = None, 0, ranks
        elif ranks != self._ranks_of_workers:
            rank, world_size = self._ranks_of_workers or ranks
            msg = (
                f"worker processes that persist were started by rank {rank} of {world_size}, "
                f"which is rank {ranks[0]} of {ranks[1]} now; make another loader"
            )
            raise ParameterError(msg)
        self._n_iterations += 1
        self._first_worker = self.dataset._begin_for_workers(  # noqa: SLF001 - its own loader
            self._first_worker, self._n_iterations
        )
