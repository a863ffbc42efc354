"""Memory that a worker lends: handed over, given back, and kept only as long as it is used."""

import gc
import os
import pickle
import resource
import socket
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from tests.loader.dataset.lending import N_VALUES, Both

from cellfeed import Cells, DeliveryError, Minibatch, ParameterError
from cellfeed._dataset._workers import as_socket, message_of

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="the system has no such memory"
)


@pytest.fixture
def both():
    both = Both()
    yield both
    both.close()


def test_what_was_placed_there_is_not_copied(both):
    placed = both.placed(1)
    received = both.send({"X": torch.from_numpy(placed)})["X"]
    received[:] = 2
    assert placed.tolist() == [2] * N_VALUES


def test_what_was_placed_elsewhere_is_copied_once(both):
    own = torch.ones(N_VALUES)
    received = both.send({"X": own})["X"]
    received[:] = 2
    assert own.tolist() == [1] * N_VALUES
    assert both.arrivals.n_segments == 1


def test_it_is_lent_to_one_at_a_time(both):
    """A function may return the same twice."""
    placed = torch.from_numpy(both.placed(1))
    one, other = both.send(placed), both.send(placed)
    one[:] = 2
    assert other.tolist() == [1] * N_VALUES


def test_it_is_used_again_when_both_have_let_it_go(both):
    addresses = set()
    for k in range(50):
        placed = both.placed(k)
        addresses.add(placed.ctypes.data)
        received = both.send(torch.from_numpy(placed))
        del placed
        assert received.tolist() == [k] * N_VALUES
        del received
    assert len(addresses) == 2  # that of the last is given back with the next
    assert both.arrivals.n_segments == 1


def test_it_is_not_used_again_while_the_worker_has_it(both):
    placed = both.placed(1)
    both.send(placed)
    both.send(None)
    assert both.placed(2).ctypes.data != placed.ctypes.data
    assert placed.tolist() == [1] * N_VALUES


def test_it_is_not_used_again_while_a_part_of_it_is_used(both):
    received = both.send(both.placed(1))[10:20]
    for k in range(5):
        both.send(both.placed(k))
    assert received.tolist() == [1] * 10


def test_who_keeps_all_keeps_what_they_take(both):
    kept = [both.send(both.placed(k)) for k in range(40)]
    assert [set(each.tolist()) for each in kept] == [{k} for k in range(40)]
    page = 4096
    assert both.resident_bytes <= 40 * (4 * N_VALUES + page) + page * both.arrivals.n_segments
    del kept
    both.send(None)
    for k in range(40):
        both.placed(k)
    assert both.resident_bytes <= 41 * (4 * N_VALUES + page) + page * both.arrivals.n_segments


def test_memory_of_another_size_takes_the_place_of_what_is_free(both):
    for n in (N_VALUES, 3 * N_VALUES, 9 * N_VALUES, 27 * N_VALUES):
        both.send(both.placed(1, n))
        both.send(None)
    assert both.resident_bytes <= 4 * 27 * N_VALUES * 1.2


def test_what_is_kept_when_the_workers_have_gone_keeps_no_more(both):
    kept = [both.send(both.placed(k)) for k in range(30)][7]
    whole = both.resident_bytes
    both.pool = both.departures = both.arrivals = None
    gc.collect()
    assert kept.tolist() == [7] * N_VALUES
    assert both.resident_bytes < whole / 10


@pytest.mark.parametrize(
    "what",
    [
        np.arange(2 * N_VALUES).reshape(2, -1),
        np.arange(2 * N_VALUES).reshape(2, -1).T,
        np.arange(6),
        np.empty((0, 5), np.int16),
        np.array(["a", None], object),
        np.zeros(N_VALUES, [("token", np.int32), ("value", np.float16)]),
        np.zeros(N_VALUES, np.dtype([("a", np.int8), ("b", np.float64)], align=True)),
        np.ones(N_VALUES, {"names": ["a", "b"], "formats": ["<i4", "<i2"], "offsets": [0, 2]}),
    ],
    ids=["large", "in Fortran's order", "small", "empty", "objects", "fields", "aligned", "over"],
)
def test_arrays_are_what_they_were(both, what):
    received = both.send([what, what])
    for each in received:
        assert each.dtype == what.dtype
        assert each.shape == what.shape
        assert np.array_equal(each, what)
        assert each.flags.writeable


def test_what_is_kept_when_the_workers_have_gone_is_given_back_when_it_is_dropped(both):
    kept = [both.send(both.placed(k)) for k in range(30)]
    both.pool = both.departures = both.arrivals = None
    gc.collect()
    whole = both.resident_bytes
    assert [set(each.tolist()) for each in kept] == [{k} for k in range(30)]
    del kept[:-1]
    other = Both()
    other.send(None)
    assert both.resident_bytes < whole / 10
    assert kept[0].tolist() == [29] * N_VALUES
    other.close()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(both):
    nested = torch.nested.nested_tensor([torch.ones(N_VALUES), torch.zeros(3)])
    assert [each.tolist() for each in both.send(nested)] == [[1.0] * N_VALUES, [0.0] * 3]


@pytest.mark.parametrize(
    "what",
    [
        torch.arange(2 * N_VALUES).reshape(2, -1),
        torch.arange(2 * N_VALUES).reshape(2, -1).T,
        torch.arange(2 * N_VALUES)[::2],
        torch.ones(N_VALUES, dtype=torch.bfloat16),
        torch.ones(N_VALUES, dtype=torch.bool),
        torch.tensor(3.5),
        torch.empty((0, 5), dtype=torch.int16),
        torch.arange(N_VALUES).to(torch.complex64).conj(),
    ],
    ids=["large", "transposed", "part", "bfloat16", "bool", "scalar", "empty", "conjugate"],
)
def test_tensors_are_what_they_were(both, what):
    received = both.send({"X": what})["X"]
    assert received.dtype == what.dtype
    assert received.shape == what.shape
    assert torch.equal(received, what)


def test_minibatches_are_what_they_were(both):
    some = sp.random(40, 3000, density=0.3, dtype=np.float32, random_state=0)
    matrix = sp.csr_array(some)
    cells = Cells({"X": matrix}, {"label": np.arange(40)}, np.arange(40))
    sparse, dense = both.send([cells.to_torch(), cells.to_torch(dense=True)])
    assert isinstance(sparse, Minibatch)
    assert sparse.X.layout == torch.sparse_csr
    assert np.array_equal(sparse.X.to_dense().numpy(), matrix.toarray())
    assert np.array_equal(dense.X.numpy(), matrix.toarray())
    assert sparse.obs["label"].tolist() == dense.rows.tolist() == list(range(40))
    assert np.array_equal(both.send(cells).X.toarray(), matrix.toarray())


def test_a_line_that_is_full(both):
    """As many announcements wait as the system lets; what follows has to go another way."""
    with as_socket(both.departures.connection) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # which becomes the least there is
    messages = []
    for k in range(100):
        array = both.pool.acquire(1 << 25).array(np.dtype(np.float32), 1 << 23)
        array[:2] = k
        messages.append(message_of(array, both.departures))
        if messages[-1] is None:
            break
    assert messages.pop() is None
    for k, message in enumerate(messages):
        assert pickle.loads(pickle.dumps(message))[:2].tolist() == [k, k]
    assert both.send(both.placed(5)).tolist() == [5] * N_VALUES


def test_too_many_open_files_are_told(both):
    message = message_of(both.placed(1), both.departures)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(DeliveryError, match=r"cannot be received .*\(ulimit -n\)"):
            pickle.loads(pickle.dumps(message))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files_are_told_by_a_worker(both):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(ParameterError, match=r"allow more open files.*`ulimit -n 65536`"):
            both.placed(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_fork_of_a_worker_writes_nowhere_else(both):
    placed = both.placed(1)
    address = placed.ctypes.data
    del placed
    child = os.fork()
    if not child:
        os._exit(both.placed(2).ctypes.data == address)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert both.placed(3).ctypes.data == address


def test_none_of_it_has_a_name(both):
    both.send(both.placed(1))
    assert not list(Path("/dev/shm").glob("*cellfeed*"))
