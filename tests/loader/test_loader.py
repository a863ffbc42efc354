"""The DataLoader that `CellDataset.loader` makes: what it does not deliver, it tells."""

import itertools
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader

from cellfeed import CellDataset, DeliveryError, ParameterError, Streaming

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)


class Losing(CellDataset):
    """Of each worker, only the first minibatch arrives."""

    def __iter__(self):
        yield from itertools.islice(super().__iter__(), 1)


def in_order(collection, *, cls=CellDataset, **options):
    return cls(collection, Streaming(), batch_size=4, fetch_factor=2, **options)


@pytest.mark.parametrize("persistent", [False, True])
def test_an_epoch_that_ends_short(persistent):
    loader = in_order(np.arange(64), cls=Losing).loader(2, persistent_workers=persistent)
    for _ in range(2):
        with pytest.raises(DeliveryError, match=r"^the epoch ended after 2 of 16 minibatches; .*"):
            list(loader)


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_is_a_data_loader(n_workers):
    loader = in_order(np.arange(64)).loader(n_workers)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 16
    for _ in range(2):
        assert sorted(np.concatenate(list(loader)).tolist()) == list(range(64))


def test_what_it_is_made_of_makes_another():
    loader = in_order(np.arange(64)).loader(2)
    other = DataLoader(loader.dataset, None, num_workers=2, collate_fn=loader.collate_fn)
    assert list(map(list, other)) == list(map(list, loader))


def test_a_collate_fn():
    loader = in_order(np.arange(64)).loader(2, collate_fn=np.sum)
    assert sum(loader) == 63 * 32


def test_a_minibatch_that_cannot_be_pickled():
    dataset = in_order(np.arange(64), batch_transform=lambda batch: lambda: batch)
    with pytest.raises(Exception, match="[Pp]ickle"):
        list(dataset.loader(2, timeout=300))


def test_an_error_that_cannot_be_pickled():
    class LocalError(Exception):
        pass

    def refuse(batch):
        raise LocalError("no such cell")

    dataset = in_order(np.arange(64), batch_transform=refuse)
    with pytest.raises(DeliveryError, match="LocalError in a worker, of a class .*: no such cell$"):
        list(dataset.loader(2, prefetch_factor=1, timeout=300))


def test_an_error_of_a_worker_is_one_line():
    def refuse(batch):
        msg = "`x` must be y"
        raise ParameterError(msg)

    with pytest.raises(ParameterError, match=r"^`x` must be y$") as caught:
        list(in_order(np.arange(64), batch_transform=refuse).loader(2))
    assert "Original Traceback" in str(caught.value.__cause__)


_SMALL = """
import sys
import numpy as np
from cellfeed import BlockShuffling, CellDataset, DeliveryError, open_collection

what, options, keeps = {what}, {options}, {keeps}
collection = np.zeros((1024, 16384), np.float32) if what == "array" else open_collection(what)
dataset = CellDataset(
    collection, BlockShuffling(block_size=4), batch_size=32, fetch_factor=2, seed=0,
)
loader = dataset.loader(2, **options)
for _ in range(2):
    kept, n = [], 0
    try:
        for minibatch in loader:
            n += len(minibatch)
            kept += [minibatch] * keeps
    except DeliveryError as error:
        print("error:", error)
    print(n)
"""


def run_with_8_mb(script):
    """Run a script where what processes share takes 8 MiB: four minibatches of 2 MiB."""
    alone = ["unshare", "-m", "sh", "-c"]
    mount = "mount -t tmpfs -o size=8m tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*alone, mount], check=False, capture_output=True).returncode
    ):
        pytest.skip("a file system can be mounted by root alone, here not even by root")
    return subprocess.run(
        [*alone, f'{mount} && exec "$0" -c "$1"', sys.executable, script],
        check=True,
        capture_output=True,
        text=True,
        timeout=500,
    ).stdout.splitlines()


class TestLittleSharedMemory:
    @pytest.mark.parametrize("storage", ["array", "file"])
    def test_what_waits_fits(self, storage, write_h5ad):
        what = "array"
        if storage == "file":
            what = str(write_h5ad(np.zeros((1024, 16384), np.float32)))
        script = _SMALL.format(what=repr(what), options={}, keeps=0)
        assert run_with_8_mb(script) == ["1024", "1024"]

    def test_where_it_does_not_fit(self):
        script = _SMALL.format(what=repr("array"), options={}, keeps=1)
        lines = run_with_8_mb(script)
        assert len(lines) == 4
        for error, n_rows in zip(lines[::2], lines[1::2], strict=True):
            assert re.fullmatch(
                r"error: /dev/shm, of 8 MB, has no room for .* num_workers=0", error
            )
            assert int(n_rows) < 1024
