"""The DataLoader that `CellDataset.loader` makes: what it does not deliver, it tells."""

import errno
import gc
import itertools
import multiprocessing
import os
import signal
import sys

import numpy as np
import pytest
from tests.warm import python as warm
from torch.utils.data import DataLoader, Subset, random_split
from torchdata.stateful_dataloader import StatefulDataLoader

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    DeliveryError,
    InterleavedDatasets,
    ParameterError,
    Streaming,
    open_collection,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


class Losing(CellDataset):
    """Of each worker, only the first minibatch arrives."""

    def delivered(self, share):
        yield from itertools.islice(super().delivered(share), 1)


def in_order(collection, *, cls=CellDataset, **options):
    return cls(collection, Streaming(), batch_size=4, fetch_factor=2, **options)


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_ends_short(persistent):
    loader = in_order(np.arange(64), cls=Losing).loader(2, persistent_workers=persistent)
    for _ in range(2):
        with pytest.raises(DeliveryError, match=r"^the epoch ended after 1 of 16 minibatches; .*"):
            list(loader)


@pytest.mark.parametrize(
    ("num_workers", "context"),
    [
        (0, None),
        pytest.param(2, "fork", marks=pytest.mark.process),
        pytest.param(1, "spawn", marks=[pytest.mark.process, pytest.mark.smoke]),
    ],
)
def test_is_a_data_loader(num_workers, context):
    options = {} if context is None else {"persistent_workers": True}
    loader = in_order(np.arange(64)).loader(num_workers, multiprocessing_context=context, **options)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 16
    for _ in range(2):
        assert sorted(np.concatenate(list(loader)).tolist()) == list(range(64))


@pytest.mark.process
def test_a_collate_fn_and_what_makes_another_loader():
    loader = in_order(np.arange(64)).loader(2)
    other = DataLoader(loader.dataset, None, num_workers=2, collate_fn=loader.collate_fn)
    assert sorted(map(list, other)) == sorted(map(list, loader))
    assert sum(in_order(np.arange(64)).loader(2, collate_fn=np.sum)) == 63 * 32


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"num_workers": "2"}, "`num_workers` must be an integer, but got num_workers='2'"),
        ({"num_workers": 1.5}, "`num_workers` must be an integer"),
        ({"num_workers": -1}, "`num_workers >= 0` must hold, but got num_workers=-1"),
        ({"batch_size": 8}, "`batch_size` does not apply to `loader`: .* of its `batch_size`"),
        ({"shuffle": True}, "`shuffle` does not apply to `loader`: .* order of its strategy; leav"),
    ],
)
def test_bad_options(options, problem):
    with pytest.raises(ParameterError, match=f"^{problem}"):
        in_order(np.arange(64)).loader(**options)
    mixed = InterleavedDatasets([in_order(np.arange(64))])
    with pytest.raises(ParameterError, match=f"^{problem}"):
        mixed.loader(**options)


@pytest.mark.process
def test_what_cannot_be_pickled():
    class LocalError(Exception):
        pass

    def refuse(batch):
        raise LocalError("no such cell")

    dataset = in_order(np.arange(64), batch_transform=lambda batch: lambda: batch)
    with pytest.raises(Exception, match=r"[Pp]ickle"):
        list(dataset.loader(2, timeout=300))
    dataset = in_order(np.arange(64), batch_transform=refuse)
    told = r"LocalError in a worker, of a class .*: no such cell$"
    with pytest.raises(DeliveryError, match=told):
        list(dataset.loader(2, prefetch_factor=1, timeout=300))


@pytest.mark.process
def test_an_error_of_a_worker_is_one_line_and_ends_all():
    def refuse(batch):
        msg = "`x` must be y"
        raise ParameterError(msg)

    before = set(multiprocessing.active_children())
    with pytest.raises(ParameterError, match=r"^`x` must be y$") as caught:
        list(in_order(np.arange(64), batch_transform=refuse).loader(2))
    assert set(multiprocessing.active_children()) <= before
    assert "Original Traceback" in str(caught.value.__cause__)


@pytest.mark.process
def test_workers_that_persist_end_with_a_loader_that_is_part_of_a_cycle():
    before = set(multiprocessing.active_children())

    class Trainer:
        def __init__(self):
            dataset = in_order(np.arange(64), batch_transform=self.same)
            self.loader = dataset.loader(2, persistent_workers=True)

        def same(self, batch):
            return batch

    assert sum(1 for _ in Trainer().loader) == 16
    gc.collect()
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.process
def test_workers_that_persist_are_no_more_after_one_has_died(tmp_path):
    """Which is an error in each further epoch; another loader has new ones."""

    def die_once(batch):
        if 17 in batch and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return batch

    died = tmp_path / "died"
    dataset = in_order(np.arange(64), batch_transform=die_once)
    loader = dataset.loader(2, persistent_workers=True)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"exited unexpectedly|killed by signal"):
            list(loader)
    again = dataset.loader(2, persistent_workers=True)
    for _ in range(2):
        assert sorted(np.concatenate(list(again)).tolist()) == list(range(64))


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:Exception ignored in.*__del__")  # torch's own iterator
def test_no_epoch_is_skipped_after_one_for_which_too_few_workers_could_be_started(monkeypatch):
    def fork():
        forks.append(None)
        if len(forks) == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start()

    def delivered():
        return np.concatenate(list(loader)).tolist()

    forks, start = list[None](), os.fork
    dataset = CellDataset(np.arange(64), BlockShuffling(2), batch_size=4, fetch_factor=2, seed=0)
    loader = dataset.loader(2, persistent_workers=True, multiprocessing_context="fork")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", fork)
        with pytest.raises(BlockingIOError):
            list(loader)
    after = [delivered() for _ in range(3)]
    epochs = list[list[int]]()
    for number in range(6):
        dataset.set_epoch(number)
        epochs.append(delivered())
    first = epochs.index(after[0])
    assert after == epochs[first : first + 3]


_MOUNT = """
import ctypes, shutil, subprocess, sys
if shutil.which("mount") is None:
    sys.exit(77)
unshare, name_space = getattr(ctypes.CDLL(None), "unshare", None), 0x00020000
if unshare is None or unshare(name_space) or any(
    subprocess.run(["mount", *options], stderr=subprocess.DEVNULL).returncode
    for options in (["--make-rprivate", "/"],
                    ["-t", "tmpfs", "-o", "size={megabytes}m", "tmpfs", "/dev/shm"])
):
    sys.exit(77)
"""

_SMALL = """
import os
if {is_named}:
    del os.memfd_create  # as of systems where workers cannot lend memory
import numpy as np
from cellfeed import BlockShuffling, CellDataset, open_collection

what, keeps = {what!r}, {keeps}
collection = open_collection(what) if what != "array" else np.float32(
    np.repeat(np.arange(256), 16384).reshape(256, 16384)
)
dataset = CellDataset(
    collection, BlockShuffling(block_size=4), batch_size=32, fetch_factor=2, seed=0,
)
loader = dataset.loader(2)
for _ in range(2):
    kept, n = [], 0
    for minibatch in loader:
        n += len(minibatch)
        kept += [minibatch] * keeps
    print(n)
    if keeps:
        assert sorted(np.concatenate([each[:, -1] for each in kept])) == list(range(256))
"""

_COORDINATES = """
import os
import numpy as np
import torch
from cellfeed import BlockShuffling, CellDataset

array = np.ones((1024, 4096), np.float32)
dataset = CellDataset(
    array, BlockShuffling(block_size=4), 32, seed=0,
    batch_transform=lambda minibatch: torch.from_numpy(minibatch).to_sparse_coo(),
)
print(sum(int(each.values().sum()) // 4096 for each in dataset.loader(2)))
print(os.listdir("/dev/shm"))
"""


def run_with_shared_memory(script, megabytes):
    command = [sys.executable, "-c", _MOUNT.format(megabytes=megabytes) + script]
    done = warm.run(command, is_finalized=True)
    if done.returncode == 77:
        pytest.skip("a file system in a name space of its own can be mounted by root alone")
    return done


@pytest.mark.process
class TestLittleSharedMemory:
    """Minibatches of 2 MiB, which need none of it."""

    @pytest.mark.parametrize("is_named", [True, False])
    @pytest.mark.parametrize(("what", "keeps"), [("array", 0), ("array", 1), ("file", 0)])
    def test_is_not_needed(self, write_h5ad, what, keeps, is_named):
        if what == "file":
            what = str(write_h5ad(np.zeros((256, 16384), np.float32)))
        done = run_with_shared_memory(
            _SMALL.format(what=what, keeps=keeps, is_named=is_named), megabytes=1
        )
        assert (done.stdout, done.stderr) == (2 * "256\n", "")

    def test_nor_for_tensors_of_any_kind(self):
        done = run_with_shared_memory(_COORDINATES, megabytes=1)
        assert (done.stdout, done.stderr) == ("1024\n[]\n", "")


def _stacked(minibatches):
    return np.stack(minibatches)


class TestWhatIsTypedFirst:
    """It works, or the error says what to type."""

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
    @pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
    @pytest.mark.parametrize("batch_size", [1, 64])
    @pytest.mark.parametrize("as_torch", [True, False])
    def test_a_dataloader_that_would_batch_minibatches_again(
        self, plates, kind, batch_size, as_torch
    ):
        dataset = in_order(open_collection(plates), as_torch=as_torch)
        for each in (dataset, InterleavedDatasets([dataset])):
            told = r"would batch minibatches again, .* write `dataset\.loader\(\)`"
            with pytest.raises(ParameterError, match=told) as refused:
                next(iter(kind(each, batch_size=batch_size)))
            assert "\n" not in str(refused.value)

    def test_a_collate_fn_of_the_user_may_batch_minibatches(self):
        loader = DataLoader(in_order(np.arange(64)), batch_size=2, collate_fn=_stacked)
        assert [each.shape for each in loader] == [(2, 4)] * 8

    def test_parts_of_a_dataset(self):
        dataset = in_order(np.arange(64))
        for part in (random_split(dataset, [0.5, 0.5])[0], Subset(dataset, [0, 1]), dataset):
            with pytest.raises(ParameterError, match=r"random_split\(collection, \[0\.8, 0\.2\]"):
                part[0]

    def test_a_loader_that_is_not_iterated_over(self):
        dataset = in_order(np.arange(64))
        for each in (dataset, InterleavedDatasets([dataset])):
            with pytest.raises(ParameterError, match=r"for minibatch in dataset\.loader\(\):"):
                iter(each.loader)  # type: ignore[arg-type]
            with pytest.raises(ParameterError, match=r"write `iterator = iter\(loader\)` once"):
                next(each.loader())

    def test_what_was_not_opened(self, plates):
        collection = open_collection(plates, obs=["number"])
        for part in (next(iter(in_order(collection))), collection[:4]):
            with pytest.raises(ColumnError, match=r"obs=\['plate'\]"):
                part.obs["plate"]
            assert part.obs.get("plate") is None
            with pytest.raises(ParameterError, match=r"elements=\[\.\.\., 'layers/counts'\]"):
                part["layers/counts"]
            with pytest.raises(ParameterError, match=r"cannot be unpacked; take `minibatch\.X`"):
                _, _ = part  # type: ignore[misc]

    def test_elements_of_open_collection(self, plates):
        with pytest.raises(ParameterError, match="such as 'layers/counts' for a layer"):
            open_collection(plates, elements=["counts"])


@pytest.mark.process
@pytest.mark.parametrize("is_dropped", [True, False])
def test_workers_that_persist_deliver_one_iteration_at_a_time(is_dropped):
    loader = in_order(np.arange(64)).loader(2, persistent_workers=True)
    training = iter(loader)
    next(training)
    look = iter(loader)
    assert len(next(look))
    if is_dropped:
        del look
    told = r"^another iteration .* leave `persistent_workers` out"
    with pytest.raises(DeliveryError, match=told):
        next(training)
    assert sorted(np.concatenate([*loader]).tolist()) == [*range(64)]
