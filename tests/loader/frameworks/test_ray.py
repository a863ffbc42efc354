"""A state is that of the training loop where Ray Train takes a minibatch ahead of it."""

import importlib.util
import sys
import types
from typing import Any

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, InterleavedDatasets

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
MODULE = "ray.train.torch.train_loop_utils"
# As Ray's, whose `__next__` takes the next minibatch before it returns the one that it has.
STAND_IN = """
class _WrappedDataLoader:
    def __init__(self, loader, device, auto_transfer):
        self._dataloader = loader

    def _prefetch_next_batch(self):
        self.next_batch = next(self.dataloader_iter, None)

    def __iter__(self):
        self.dataloader_iter = iter(self._dataloader)
        self._prefetch_next_batch()
        return self

    def __next__(self):
        next_batch = self.next_batch
        if next_batch is None:
            raise StopIteration
        self._prefetch_next_batch()
        return next_batch
"""


@pytest.fixture
def prepared(monkeypatch):
    """What `prepare_data_loader` makes of a loader; by a stand-in where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        module = types.ModuleType(MODULE)
        exec(STAND_IN, vars(module))
        monkeypatch.setitem(sys.modules, MODULE, module)
    else:
        module = pytest.importorskip(MODULE)
    return lambda loader: module._WrappedDataLoader(loader, torch.device("cpu"), False)


def dataset() -> CellDataset:
    return CellDataset(np.arange(90), BlockShuffling(4), 8, 2, seed=3)


def mixed() -> InterleavedDatasets:
    return InterleavedDatasets([dataset(), dataset()])


def rows_of(minibatches: Any) -> list[list[int]]:
    return [np.asarray(each).tolist() for each in minibatches]


@pytest.mark.parametrize("make", [dataset, mixed])
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_training_resumes_exactly(prepared, make, num_workers):
    reference = make().loader(num_workers)
    whole = [rows_of(reference) for _ in range(3)]
    n = len(whole[0])
    for n_before in (1, 5, n - 1, n):
        loader = make().loader(num_workers)
        minibatches = prepared(loader)
        assert rows_of(minibatches) == whole[0]
        seen = list[Any]()
        for minibatch in minibatches:
            seen += rows_of([minibatch])
            if len(seen) == n_before:
                state = loader.state_dict()
                break
        assert seen == whole[1][:n_before]
        assert state["epoch"] == (2 if n_before == n else 1)
        resumed = make().loader(num_workers)
        resumed.load_state_dict(state)
        minibatches = prepared(resumed)
        rest = rows_of(minibatches) if n_before < n else []
        assert rest == whole[1][n_before:]
        assert rows_of(minibatches) == whole[2]


def test_before_the_first_minibatch_nothing_has_come(prepared):
    loader = dataset().loader()
    iter(prepared(loader))  # takes one
    assert loader.state_dict() == dataset().state_dict()


def test_a_plain_loop_is_not_taken_for_it(prepared):
    loader = dataset().loader()
    n = 0
    for n, _ in enumerate(loader, 1):
        if n == 4:
            break
    assert loader.state_dict()["progress"][-1] == n
