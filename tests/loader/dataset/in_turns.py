"""A loader whose workers take turns in this process: starting real ones takes long."""

import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st
from torch.utils.data import _utils
from torch.utils.data._utils.worker import WorkerInfo

from cellfeed import CellDataset


class LoaderInTurns:
    def __init__(self, dataset: CellDataset, num_workers: int) -> None:
        self.dataset, self.num_workers = dataset, num_workers

    def __iter__(self) -> Iterator[Any]:
        if not self.num_workers:
            yield from self.dataset
            return
        copies = [pickle.loads(pickle.dumps(self.dataset)) for _ in range(self.num_workers)]
        _, counted = self.dataset.begin_for_workers(None, self.num_workers)
        yield from counted.counting(self.in_turns(copies))

    def in_turns(self, copies: list[CellDataset]) -> Iterator[Any]:
        iterators = list[tuple[WorkerInfo, Iterator[Any]]]()
        for number, copy in enumerate(copies):
            info = WorkerInfo(id=number, num_workers=self.num_workers, seed=0, dataset=copy)
            with InWorker(info):
                iterators.append((info, iter(copy)))
        while iterators:
            for each in list(iterators):
                info, iterator = each
                with InWorker(info):
                    minibatch = next(iterator, None)
                if minibatch is None:
                    iterators.remove(each)
                else:
                    yield minibatch

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.dataset.load_state_dict(state)


class InWorker:
    """What torch says in a worker process."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info

    def __enter__(self) -> None:
        _utils.worker._worker_info = self.info

    def __exit__(self, *exception: object) -> None:
        _utils.worker._worker_info = None


def in_parts(
    draw: Callable[[Any], Any], make: Callable[[int, int], CellDataset], most: int
) -> tuple[list[Any], int]:
    """Deliver an epoch with stops, each time by another number of ranks and workers.

    Parameters
    ----------
    draw
        Draws from a strategy of hypothesis.
    make
        Returns the dataset of a rank, given the number of ranks too.
    most
        After how many minibatches of a rank it is stopped at the latest.

    Returns
    -------
    minibatches
        What was delivered.
    n_added
        How many ranks there were beside the first, each time.
    """
    found, n_added, state = list[Any](), 0, dict[str, Any]()
    while state.get("epoch", 0) == 0:
        ranks, workers, n = (draw(st.integers(*each)) for each in ((1, 3), (0, 3), (1, most)))
        loaders = [LoaderInTurns(make(rank, ranks), workers) for rank in range(ranks)]
        for loader in loaders:
            if state:
                loader.load_state_dict(state)
            found += itertools.islice(loader, n)
        state, *others = (loader.state_dict() for loader in loaders)
        assert all(each == state for each in others)
        n_added += ranks - 1
    return found, n_added
