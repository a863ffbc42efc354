"""What a cold measurement drops from the page cache, and what it leaves there."""

import importlib
import math
import mmap
import os
import sys
from pathlib import Path

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed_tuner import Configuration, measure
from cellfeed_tuner._measuring._page_cache import (
    Dropping,
    drop_pages,
    resident_fraction,
    resident_runs,
    rounds_prefetched,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the page cache can be inspected on Linux only"
)

PAGE = mmap.PAGESIZE
N_PAGES = 64


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(bytes(N_PAGES * PAGE))
    drop_pages([path])
    if resident_fraction([path]) != 0:
        pytest.skip("pages of this file system cannot be dropped")
    return path


@pytest.fixture
def read(file):
    """Returns a function that brings pages of the file into the cache, and no others."""
    fd = os.open(file, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def pages(*numbers: int) -> None:
        for number in numbers:
            os.pread(fd, PAGE, number * PAGE)

    yield pages
    os.close(fd)


def cached(file: Path) -> list[int]:
    runs = resident_runs(file)
    assert runs is not None
    return [page for start, stop in runs.tolist() for page in range(start, stop)]


def test_pages_that_are_still_to_be_used_stay_and_used_ones_go(file, read):
    """Page 10 k is used in round k, and was announced two rounds before."""
    dropping = Dropping([file], "cold", looking_share=math.inf)
    dropping.before_epoch()
    read(10, 20)
    still_cached = []
    for number in range(1, 5):
        read(10 * (number + 2))
        dropping.after_round(2)
        still_cached.append(cached(file))
    assert still_cached == [[10, 20, 30], [10, 20, 30, 40], [40, 50], [50, 60]]


def test_a_page_stays_while_one_beside_it_is_still_to_be_used(file, read):
    """A chunk may lie on both, of which the system has fetched what was not there already."""
    dropping = Dropping([file], "cold", looking_share=math.inf)
    read(10, 20)
    dropping.after_round(1)
    read(11)
    dropping.after_round(1)
    assert cached(file) == [10, 11]
    dropping.after_round(1)
    assert cached(file) == []


def test_an_epoch_begins_with_nothing(file, read):
    dropping = Dropping([file], "cold", looking_share=math.inf)
    read(10, 20)
    dropping.after_round(1)
    dropping.before_epoch()
    assert cached(file) == []
    read(10)
    dropping.after_round(1)  # page 10 was cached in the epoch before, which says nothing now
    assert cached(file) == [10]


def test_pages_that_are_mapped_go_too(file):
    dropping = Dropping([file], "cold", mapped=True, looking_share=math.inf)
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
        assert not any(m[:])
        dropping.after_round(1)
        assert resident_fraction([file]) == 1
        dropping.after_round(1)
        assert resident_fraction([file]) == 0


def test_a_warm_cache_is_left_alone(file, read):
    dropping = Dropping([file], "warm", looking_share=math.inf)
    dropping.before_epoch()
    read(10)
    for _ in range(3):
        dropping.after_round(1)
    assert cached(file) == [10]


@pytest.mark.parametrize(
    ("num_workers", "fetch_factor", "expected"),
    # Workers of their own accord hold up to eight minibatches each, which are one fetch or two.
    [(0, 16, 2), (2, 16, 3), (2, 4, 4), (0, 1, 8)],
)
def test_how_far_loaders_read_ahead(small_collection, num_workers, fetch_factor, expected):
    collection = open_collection(small_collection)
    dataset = CellDataset(collection, BlockShuffling(4), 32, fetch_factor=fetch_factor)
    minibatches = fetch_factor * max(1, num_workers)
    assert rounds_prefetched(dataset.loader(num_workers), minibatches) == expected
    assert rounds_prefetched(dataset, minibatches) <= expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_fetch_reads_from_storage_what_it_asks_for(tmp_path, monkeypatch, num_workers):
    """A chunk is asked for by seven fetches of an epoch, and each time comes from storage."""
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)  # of the measuring process
    monkeypatch.syspath_prepend(here)
    # What the module changes is put back in this process.
    monkeypatch.setitem(Dropping.__init__.__kwdefaults__, "looking_share", 0.04)
    looked_at = importlib.import_module("loaders_looked_at").LookedAt
    n_rows, n_per_row, n_vars = 30_000, 200, 1_000
    rng = np.random.default_rng(0)
    indices = np.sort(rng.permuted(np.tile(np.arange(n_vars), (100, 1)), axis=1)[:, :n_per_row])
    matrix = sp.csr_matrix(
        (
            rng.random(n_rows * n_per_row, dtype=np.float32),
            np.tile(indices.ravel(), n_rows // 100),
            np.arange(0, n_rows * n_per_row + 1, n_per_row),
        ),
        shape=(n_rows, n_vars),
    )
    ad.AnnData(matrix).write_h5ad(tmp_path / "cells.h5ad", compression="lzf")
    # Ends after the largest number of rounds, which is most of an epoch.
    measured = measure(
        open_collection(tmp_path),
        Configuration(block_size=16, fetch_factor=4, num_workers=num_workers),
        batch_size=32,
        seconds=60,
        make_dataset=looked_at,
    )
    if measured.cache != "cold" or measured.bytes_read_per_cell is None:
        pytest.skip("pages of this file system cannot be dropped, or are not counted")
    read = measured.bytes_read_per_cell
    assert 0.85 < read.from_storage / read.asked < 1.3
