"""Ray Train takes a minibatch ahead of the training loop, and the state is that of Ray."""

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
def test_training_goes_on_one_minibatch_later(prepared, make, num_workers):
    """Unless nothing is wrapped, as with ``move_to_device=False``."""
    reference = make().loader(num_workers)
    whole = [rows_of(reference) for _ in range(2)]
    for n_before in (1, 5):
        for wrap, n_ahead in ((prepared, 1), (lambda loader: loader, 0)):
            loader = make().loader(num_workers)
            for n, _ in enumerate(wrap(loader), 1):
                if n == n_before:
                    state = loader.state_dict()
                    break
            resumed = make().loader(num_workers)
            resumed.load_state_dict(state)
            minibatches = wrap(resumed)
            assert rows_of(minibatches) == whole[0][n_before + n_ahead :]
            assert rows_of(minibatches) == whole[1]
