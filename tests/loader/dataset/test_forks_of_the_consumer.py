"""A process that is forked while minibatches are in use sees them as they were."""

import os

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.dataset.lending import N_VALUES, Both

from cellfeed import BlockShuffling, CellDataset, open_collection

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Child:
    """A forked process, which answers whether something holds once it is asked."""

    def __init__(self, holds):
        asked, self._ask = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            os.close(self._ask)
            os.read(asked, 1)
            os._exit(0 if holds() else 1)
        os.close(asked)

    def answer(self):
        """Ask, and wait for the end."""
        os.close(self._ask)
        return os.waitstatus_to_exitcode(os.waitpid(self._process, 0)[1]) == 0


@pytest.fixture
def both():
    both = Both()
    yield both
    both.close()


def test_memory_is_not_used_again_while_a_fork_is_there(both):
    received = [both.send(both.placed(7))]
    child = Child(lambda: received[0].tolist() == [7] * N_VALUES)
    del received[:]
    addresses = set()
    for k in range(10):
        addresses.add(both.placed(k).ctypes.data)
        both.send(both.placed(k))
    assert child.answer()
    n_before = len(addresses)
    for k in range(10):
        addresses.add(both.placed(k).ctypes.data)
        both.send(both.placed(k))
    assert len(addresses) == n_before + 1  # what the fork has kept is used again


def test_what_a_fork_drops_is_not_given_back_by_it(both):
    received = [both.send(both.placed(7))]

    def drop():
        del received[:]
        both.send(None)
        both.arrivals = None
        return True

    assert Child(drop).answer()
    for k in range(5):
        both.send(both.placed(k))
    assert received[0].tolist() == [7] * N_VALUES


def test_memory_that_a_fork_sees_outlives_the_workers(both):
    received = [both.send(both.placed(7)), both.send(both.placed(8))]
    child = Child(lambda: received[0].tolist() == [7] * N_VALUES)
    both.arrivals = both.departures = both.pool = None
    del received[0]
    other = Both()
    other.send(None)
    assert child.answer()
    whole = both.resident_bytes
    other.send(None)
    assert both.resident_bytes < whole
    assert received[0].tolist() == [8] * N_VALUES
    other.close()


def test_a_fork_of_a_fork(both):
    received = [both.send(both.placed(7))]

    def holds():
        return Child(lambda: received[0].tolist() == [7] * N_VALUES).answer()

    child = Child(holds)
    del received[:]
    for k in range(5):
        both.send(both.placed(k))
    assert child.answer()


def test_a_minibatch_of_a_loader(write_h5ad):
    matrix = sp.random(600, 900, density=0.2, dtype=np.float32, random_state=0).tocsr()
    collection = open_collection(write_h5ad(matrix))
    loader = CellDataset(collection, BlockShuffling(4), 32, 4, seed=0, dense=True).loader(1)
    minibatches = iter(loader)
    held = [next(minibatches)]
    expected = matrix[held[0].rows.numpy()].toarray()
    child = Child(lambda: np.array_equal(held[0].X.numpy(), expected))
    del held[:]
    for _ in minibatches:
        pass
    assert child.answer()
