"""What a dataset says of what it did: in all, and fetch by fetch."""

import gc
import pickle
import time
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pytest
from tests.loader.matrices import random_csr
from tests.loader.read_options import parameters_of

from cellfeed import BlockShuffling, CellDataset, InterleavedDatasets, open_collection
from cellfeed.stages import FetchStages
from cellfeed.transforms import Log1p

N_CELLS, BATCH, FACTOR = 1_000, 32, 4


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("statistics") / "cells.h5ad"
    matrix = random_csr((N_CELLS, 200), 0.2, np.random.default_rng(0), np.float32)
    ad.AnnData(matrix).write_h5ad(path, compression="gzip")
    return path


def dataset(file, verify="never", **parameters: Any):
    parameters = {"fetch_factor": FACTOR, "seed": 0} | parameters
    return CellDataset(
        open_collection(file),
        BlockShuffling(8),
        BATCH,
        **parameters_of({"verify": verify, **parameters}),
    )


def numbers(**parameters: Any):
    parameters = {"batch_size": 10, "fetch_factor": 5, "seed": 0} | parameters
    return CellDataset(np.arange(1_000), BlockShuffling(4), **parameters)


def run(*loaders):
    for loader in loaders:
        for _ in loader:
            pass


def slept(value):
    time.sleep(0.01)
    return value


def expected(file):
    """What the plan of an epoch says of its chunks, which nothing has read."""
    planned = dataset(file).plan(epoch=0)
    with FetchStages(open_collection(file), BATCH) as stages:
        volumes = [stages.volume(stages.plan(planned.fetch(k))) for k in range(planned.n_fetches)]
    n_chunks = sum(each.n_chunks for each in volumes if each is not None)
    return n_chunks, sum(each.decoded_bytes for each in volumes if each is not None)


def n_open():
    """How many descriptors this process has of counters that are in use."""
    gc.collect()  # those of tests before, which are in cycles
    links = [each for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    return sum("cellfeed-counters" in str(each.readlink()) for each in links)


@pytest.mark.process
def test_what_a_worker_has_checked_is_not_checked_again_by_the_next(file):
    own = dataset(file, verify="first", num_threads=1)
    loader = own.loader(num_workers=1, multiprocessing_context="fork")
    run(loader)
    before, unchecked = own.statistics(), dataset(file)
    unchecked.set_epoch(1)
    run(loader, unchecked)
    again = own.statistics() - before
    assert again.bytes_decompressed == unchecked.statistics().bytes_decompressed


@pytest.mark.parametrize(
    "start",
    [None, *(pytest.param(each, marks=pytest.mark.process) for each in ("fork", "forkserver"))],
)
def test_what_was_done_by_all_processes(file, start):
    own = dataset(file)
    workers: dict[str, Any] = (
        {} if start is None else {"num_workers": 2, "multiprocessing_context": start}
    )
    loader = own.loader(**workers)
    before = own.statistics()
    for epoch in (1, 2):
        run(loader)
        done = own.statistics() - before
        n_fetches = -(-N_CELLS // (BATCH * FACTOR))
        assert done.n_cells == epoch * N_CELLS
        assert done.n_minibatches == epoch * len(own)
        assert done.n_fetches == epoch * n_fetches
    planned = expected(file)
    # Of the second epoch and of tables that are read before, about as many.
    assert done.n_chunks >= 2 * planned[0] * 0.8
    assert done.bytes_decompressed > 0
    assert 0 < done.bytes_read <= 2 * done.n_chunks * file.stat().st_size
    assert (n_open() > 0) == (start == "forkserver")
    del own, loader
    assert n_open() == 0


def test_chunks_are_those_of_the_plan(file):
    n_chunks, n_bytes = expected(file)
    heads, whole = dataset(file), dataset(file, verify="always")
    run(heads, whole)
    assert heads.statistics().n_chunks == whole.statistics().n_chunks == n_chunks
    # Some codecs give a little more than was asked for.
    n_heads = heads.statistics().bytes_decompressed
    assert n_bytes <= n_heads < whole.statistics().bytes_decompressed


def test_times_are_those_of_threads_and_of_the_loop(file):
    own = dataset(file, num_threads=2, dense=True, batch_transform=slept, transform=[Log1p()])
    begin = time.perf_counter()
    for _ in own:
        time.sleep(0.02)
    elapsed = time.perf_counter() - begin
    done = own.statistics()
    assert done.training >= 0.02 * (len(own) - 1)
    assert done.functions >= 0.01 * len(own)
    assert done.waiting + done.training <= elapsed
    assert done.waiting >= done.functions
    for stage in ("planning", "reading", "decompressing", "placing", "densifying"):
        assert 0 < getattr(done, stage) <= 2 * elapsed
    assert 0 < done.making_tensors < done.waiting
    assert done.waiting_share == done.waiting / (done.waiting + done.training)
    assert "functions" in str(done)
    assert "library" not in str(done)


def test_what_others_read_is_the_librarys():
    class Slow:
        def __len__(self):
            return 64

        def __getitem__(self, which):
            return slept(np.arange(64)[which])

    own = CellDataset(Slow(), BlockShuffling(4), 8, 2, fetch_transform=slept)
    run(own)
    done = own.statistics()
    assert (done.n_fetches, done.n_minibatches, done.n_cells) == (4, 8, 64)
    assert done.library >= 0.04
    assert done.functions >= 0.04
    assert done.n_chunks == done.bytes_read == 0


@pytest.mark.process
def test_several_datasets_are_added_up(file):
    first, second = dataset(file), dataset(file)
    run(first)  # alone
    before = first.statistics()
    mixed = InterleavedDatasets([first, second])
    run(mixed.loader(2))
    done = mixed.statistics()
    assert done.n_minibatches == len(mixed)
    assert done.n_cells == before.n_cells + 2 * N_CELLS
    assert done.waiting > 0


def test_what_a_logger_gets_is_of_the_work_in_between(file):
    own = dataset(file)
    assert own.statistics().scalars() == {}
    run(own)
    before = own.statistics()
    run(own)
    done = own.statistics() - before
    values, seconds = done.scalars(), done.waiting + done.training
    assert all(isinstance(each, float) for each in values.values())
    assert values.pop("cellfeed/cells_per_second") == N_CELLS / seconds
    assert values.pop("cellfeed/waiting_share") == done.waiting_share
    assert len(values) == 10
    for name, each in values.items():
        stage = name.removeprefix("cellfeed/").removesuffix("_us_per_cell")
        assert each == pytest.approx(getattr(done, stage) * 1e6 / N_CELLS)


def test_a_copy_begins_anew(file):
    own = dataset(file)
    run(own)
    assert own.statistics().n_cells == N_CELLS
    copy = pickle.loads(pickle.dumps(own))
    assert copy.statistics().n_cells == 0
