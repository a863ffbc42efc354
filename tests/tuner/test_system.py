"""What the system says while it is measured: its storage, page cache and other programs."""

import mmap
import os
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import anndata as ad
import numpy as np
import psutil
import pytest
import scipy.sparse as sp
from tests.tuner.measured_here import MeasuringHere
from tests.tuner.other_loaders import Opened

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed_tuner import Busy, Configuration, _machine, measure
from cellfeed_tuner._machine import OtherPrograms, ProcessorClock, Storage, describe_storage
from cellfeed_tuner._measuring._page_cache import (
    Dropping,
    drop_pages,
    resident_fraction,
    resident_runs,
    rounds_prefetched,
)
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


class TestFileSystems:
    @pytest.mark.parametrize(
        ("file_system", "kind"),
        [
            ("ext4", "local"),
            ("xfs", "local"),
            ("fuseblk", "local"),
            ("tmpfs", "memory"),
            ("nfs4", "network"),
            ("lustre", "network"),
            ("fuse.sshfs", "network"),
        ],
    )
    def test_kind(self, file_system, kind):
        assert _machine._kind(file_system) == kind

    def test_the_innermost_and_last_mount_counts(self, tmp_path):
        rows = [("/", "root"), ("/data", "hidden"), ("/data/deep", "inner"), ("/data", "hides")]
        mounts = [
            Storage(mount_point=point, file_system="ext4", kind="local", device=name)
            for point, name in rows
        ]
        paths = ("/other/file", "/data/file", "/data/deep/file", "/data2/file")
        found = [_machine._storage_of(Path(each), mounts).device for each in paths]
        assert found == ["root", "hides", "inner", "root"]
        assert _machine._storage_of(tmp_path, []).file_system is None

    @linux_only
    def test_each_file_system_is_described_once(self, tmp_path):
        (tmp_path / "a").touch()
        storage = describe_storage([tmp_path / "a", tmp_path, Path("/proc/version")])
        assert len(storage) == 2
        assert (storage[1].mount_point, storage[1].file_system) == ("/proc", "proc")


PAGE, N_PAGES = mmap.PAGESIZE, 64


@linux_only
class TestPageCache:
    """What a cold measurement drops from the page cache, and what it leaves there."""

    @pytest.fixture
    def file(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(bytes(N_PAGES * PAGE))
        drop_pages([path])
        if resident_fraction([path]) != 0:
            pytest.skip("pages of this file system cannot be dropped")
        return path

    @pytest.fixture
    def read(self, file):
        """Returns a function that brings pages of the file into the cache, and no others."""
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

        def pages(*numbers):
            for number in numbers:
                os.pread(fd, PAGE, number * PAGE)

        yield pages
        os.close(fd)

    @staticmethod
    def dropping(file, cache="cold", **more):
        return Dropping([file], cache, looking_share=np.inf, **more)

    @staticmethod
    def cached(file):
        runs = resident_runs(file)
        assert runs is not None
        return [page for start, stop in runs.tolist() for page in range(start, stop)]

    def test_pages_that_are_still_to_be_used_stay_and_used_ones_go(self, file, read):
        """Page 10 k is used in round k, and was announced two rounds before."""
        dropping = self.dropping(file)
        dropping.before_epoch()
        read(10, 20)
        still_cached = []
        for number in range(1, 5):
            read(10 * (number + 2))
            dropping.after_round(2)
            still_cached.append(self.cached(file))
        assert still_cached == [[10, 20, 30], [10, 20, 30, 40], [40, 50], [50, 60]]

    def test_a_page_stays_while_one_beside_it_is_still_to_be_used(self, file, read):
        """A chunk may lie on both, of which the system has fetched what was not there already."""
        dropping = self.dropping(file)
        read(10, 20)
        dropping.after_round(1)
        read(11)
        dropping.after_round(1)
        assert self.cached(file) == [10, 11]
        dropping.after_round(1)
        assert self.cached(file) == []

    def test_an_epoch_begins_with_nothing(self, file, read):
        dropping = self.dropping(file)
        read(10, 20)
        dropping.after_round(1)
        dropping.before_epoch()
        assert self.cached(file) == []
        read(10)
        dropping.after_round(1)  # page 10 was cached in the epoch before, which says nothing now
        assert self.cached(file) == [10]

    def test_pages_that_are_mapped_go_too(self, file):
        dropping = self.dropping(file, mapped=True)
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as m:
            assert not any(m[:])
            dropping.after_round(1)
            assert resident_fraction([file]) == 1
            dropping.after_round(1)
            assert resident_fraction([file]) == 0

    def test_a_warm_cache_is_left_alone(self, file, read):
        dropping = self.dropping(file, "warm")
        dropping.before_epoch()
        read(10)
        for _ in range(3):
            dropping.after_round(1)
        assert self.cached(file) == [10]

    @pytest.mark.parametrize(
        ("num_workers", "fetch_factor", "expected"),
        # Workers send two messages ahead, each of a fetch if that is small.
        [(0, 16, 2), (2, 16, 4), (2, 4, 4), (0, 1, 8)],
    )
    def test_how_far_loaders_read_ahead(
        self, small_collection, num_workers, fetch_factor, expected
    ):
        collection = open_collection(small_collection)
        dataset = CellDataset(collection, BlockShuffling(4), 32, fetch_factor=fetch_factor)
        minibatches = fetch_factor * max(1, num_workers)
        assert rounds_prefetched(dataset.loader(num_workers), minibatches) == expected
        assert rounds_prefetched(dataset, minibatches) <= expected

    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
    def test_each_fetch_reads_from_storage_what_it_asks_for(
        self, tmp_path, monkeypatch, num_workers
    ):
        """A chunk is asked for by seven fetches of an epoch, and each time comes from storage."""
        # In this process, in which what is cached is looked at after each fetch.
        module = "cellfeed_tuner._measuring._measurement.MeasuringProcess"
        monkeypatch.setattr(module, MeasuringHere)
        monkeypatch.setitem(Dropping.__init__.__kwdefaults__, "looking_share", np.inf)
        n_rows, n_per_row, n_vars = 30_000, 200, 1_000
        rng = np.random.default_rng(0)
        genes = rng.permuted(np.tile(np.arange(n_vars), (100, 1)), axis=1)[:, :n_per_row]
        values = rng.random(n_rows * n_per_row, dtype=np.float32)
        indices = np.tile(np.sort(genes).ravel(), n_rows // 100)
        pointers = np.arange(0, n_rows * n_per_row + 1, n_per_row)
        matrix = sp.csr_matrix((values, indices, pointers), shape=(n_rows, n_vars))
        ad.AnnData(matrix).write_h5ad(tmp_path / "cells.h5ad", compression="lzf")
        # Ends after the largest number of rounds, which is most of an epoch.
        measured = measure(
            open_collection(tmp_path),
            Configuration(block_size=16, fetch_factor=4, num_workers=num_workers),
            batch_size=32,
            seconds=60,
        )
        if measured.cache != "cold" or measured.bytes_read_per_cell is None:
            pytest.skip("pages of this file system cannot be dropped, or are not counted")
        read = measured.bytes_read_per_cell
        assert 0.85 < read.from_storage / read.asked < 1.3


class Times(NamedTuple):
    """Times of a processor, as psutil gives them on Linux."""

    user: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    guest: float = 0.0


# Expressions that take some processor time, however long that is, and give a loader.
CPU_SECONDS = 0.5
BURN_HERE = (
    f"[0 for _ in iter(lambda: __import__('time').process_time() < {CPU_SECONDS}, False)] "
    "and range(9)"
)
BURN_IN_A_CHILD = (
    "__import__('subprocess').run([__import__('sys').executable, '-c', "
    f"'import time\\nwhile time.process_time() < {CPU_SECONDS}: pass']) and range(9)"
)


class TestOtherPrograms:
    @pytest.mark.parametrize(
        ("cpu_seconds", "n_cores", "usable", "other_cores", "share"),
        [
            (0.0, 4, 4.0, 0.0, 0.0),
            (15.0, 4, 4.0, 1.5, 0.375),
            (15.0, 64, 2.0, 1.5, 0.0),  # others have processors enough of their own
            (630.0, 64, 2.0, 63.0, 0.5),
            (50.0, 4, 4.0, 5.0, 1.0),  # by rounding of the system's clock
        ],
    )
    def test_what_was_not_left_to_use(self, cpu_seconds, n_cores, usable, other_cores, share):
        busy = Busy.of(OtherPrograms(10.0, cpu_seconds), n_cores=n_cores, usable=usable)
        assert busy is not None
        assert (busy.other_cores, busy.share) == pytest.approx((other_cores, share))
        assert Busy.of(OtherPrograms()) is None  # nothing was measured

    @pytest.mark.parametrize(("share", "said"), [(0.09, False), (0.35, True)])
    def test_it_is_said_where_it_matters(self, share, said):
        sentence = Busy(other_cores=1.0, share=share).sentence
        assert ("35% of the processors" in sentence) == said

    def test_what_another_program_takes_is_counted_and_what_was_measured_is_not(self, monkeypatch):
        """Of two processors, one idle; of three seconds on the other, one waits for the disk."""
        now = Times(user=7.0, system=2.0, idle=90.0, iowait=1.0, guest=5.0)
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [now, Times()])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
        monkeypatch.setattr("time.process_time", lambda: 0.0)
        clock = ProcessorClock()
        now = Times(user=8.5, system=2.5, idle=90.0, iowait=2.0, guest=6.0)
        assert clock.others(0.0).cpu_seconds == pytest.approx(2.0)
        assert clock.others(1.5).cpu_seconds == pytest.approx(0.5)
        assert clock.others(2.1).cpu_seconds == 0  # by rounding of the system's clock

    def test_processors_that_we_may_not_run_on_do_not_count(self, monkeypatch):
        user = count()
        monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(user=next(user)), Times()])
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
        monkeypatch.setattr("time.process_time", lambda: 0.0)
        assert ProcessorClock().others(0.0).cpu_seconds == 0

    @pytest.mark.process
    @pytest.mark.parametrize("burn", [BURN_HERE, BURN_IN_A_CHILD])
    def test_what_is_measured_takes_nothing_from_itself(self, burn):
        """All that ran is what others took, and what was measured did."""
        request = TimingRequest(
            configuration=Configuration(), batch_size=1, labels=(), cache="warm", seed=0,
            least_rounds=8, seconds=0.0,
        )  # fmt: skip
        with MeasuringProcess(Opened(partial(eval, burn))) as process:
            process.start()
            all_that_ran = ProcessorClock()
            outcome = process.run(request, limit_seconds=600.0)
            everything = all_that_ran.others(0.0)
        assert outcome.failure is None
        assert 0 < outcome.others.seconds <= everything.seconds
        ours = everything.cpu_seconds - outcome.others.cpu_seconds
        assert ours >= 0.8 * CPU_SECONDS  # the system counts in hundredths of a second
