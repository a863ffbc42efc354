"""Minibatches of an epoch from files in the page cache, and the bytes read for them."""

import time
import timeit

import numpy as np
import psutil

from bench._profile import _Measured, parameters
from bench._stores import N_CELLS, STORAGES, Stored
from cellfeed import BlockShuffling, CellDataset, ReadOptions, Streaming, open_collection
from cellfeed.scdataset import scDataset
from cellfeed.stages import FetchStages
from cellfeed.transforms import Log1p, NormalizeTotal

BATCH_SIZE, FETCH_FACTOR, BLOCK_SIZE = 64, 16, 16
BLOCKS = BlockShuffling(block_size=BLOCK_SIZE)
STRATEGIES = {
    "streaming": Streaming(),
    "streaming, shuffled": Streaming(shuffle=True),
    "blocks": BLOCKS,
    "whole blocks": BlockShuffling(block_size=BLOCK_SIZE, drop_last=True),
}
OUTPUTS = {
    "CSR to dense": ("CSR gzip", {"dense": True}),
    "CSR to float64": ("CSR gzip", {"dtype": "float64"}),
    "dense to float64": ("dense contiguous", {"dtype": "float64"}),
}


NORMALIZATIONS = {
    "none": {},
    "compiled": {"transform": [NormalizeTotal(1e4), Log1p()]},
}


class _Epoch(Stored, _Measured):
    """Deliver every minibatch of an epoch."""

    def open(
        self, store, *, strategy=BLOCKS, fetch_factor=FETCH_FACTOR, num_workers=0,
        num_threads=None, **options,
    ):  # fmt: skip
        self.collection = open_collection(store, obs=["plate"])
        self.dataset = CellDataset(
            self.collection, strategy, BATCH_SIZE, fetch_factor, seed=0,
            read_options=ReadOptions(num_threads=num_threads), **options,
        )  # fmt: skip
        self.loader = self.dataset.loader(num_workers)

    def run(self, *_):
        for _minibatch in self.loader:
            pass


class _CountedEpoch(_Epoch):
    """Count the reads of an epoch, which do not depend on threads."""

    def track_bytes_read(self, *_):
        return self.asked_of_the_system("read_chars") / N_CELLS

    track_bytes_read.unit = "bytes per cell"

    def track_read_calls(self, *_):
        return self.asked_of_the_system("read_count") / self.dataset.plan(epoch=0).n_fetches

    track_read_calls.unit = "read calls per fetch"

    def track_chunks_decoded(self, *_):
        volumes = self.volumes()
        return sum(each.n_chunks for each in volumes) / len(volumes)

    track_chunks_decoded.unit = "chunks per fetch"

    def track_read_amplification(self, *_):
        volumes = self.volumes()
        decoded = sum(each.decoded_bytes for each in volumes)
        return decoded / sum(each.useful_bytes for each in volumes)

    track_read_amplification.unit = "bytes decoded per byte used"

    def asked_of_the_system(self, counter):
        """Return by how much a kernel counter of this process grows in an epoch."""
        process = psutil.Process()
        if not hasattr(process, "io_counters"):
            msg = "this system has no counter of the bytes that a process reads"
            raise NotImplementedError(msg)
        self.run()  # everything read once is read now
        self.dataset.set_epoch(0)
        before = getattr(process.io_counters(), counter)
        self.run()
        after = getattr(process.io_counters(), counter)
        # Reading the counter is itself a read.
        asking = getattr(process.io_counters(), counter) - after
        return after - before - asking

    def volumes(self):
        plan = self.dataset.plan(epoch=0)
        with FetchStages(self.collection, BATCH_SIZE) as stages:
            fetches = (plan.fetch(number) for number in range(plan.n_fetches))
            return [stages.volume(stages.plan(fetch)) for fetch in fetches]


class Storage(_CountedEpoch):
    """Storage and codec; the sharded store is as `cellfeed preshuffle` writes it."""

    params = (list(STORAGES), parameters(quick=[256], full=[1, 16, 64, 1024]))
    param_names = ("storage", "block_size")

    def setup(self, stores, storage, block_size):
        self.open(stores[storage], strategy=BlockShuffling(block_size=block_size))


class Sizes(_CountedEpoch):
    """Block size x fetch factor, for files as they usually are."""

    params = (
        parameters(quick=[1, 16], full=[4, 64, 256, 1024]),
        parameters(quick=[16, 64], full=[1, 4, 128]),
    )
    param_names = ("block_size", "fetch_factor")

    def setup(self, stores, block_size, fetch_factor):
        strategy = BlockShuffling(block_size=block_size)
        self.open(stores["CSR gzip"], strategy=strategy, fetch_factor=fetch_factor)


class Strategy(_CountedEpoch):
    """Rows in storage order, with a shuffle buffer, and in shuffled blocks."""

    params = parameters(quick=["streaming", "streaming, shuffled"], full=["blocks", "whole blocks"])
    param_names = ("strategy",)

    def setup(self, stores, strategy):
        self.open(stores["CSR gzip"], strategy=STRATEGIES[strategy])

    def track_fetch_calls(self, _stores, strategy):
        """Calls of a function that reads in place of the loader."""
        calls = []
        dataset = scDataset(
            np.arange(N_CELLS),
            STRATEGIES[strategy],
            BATCH_SIZE,
            FETCH_FACTOR,
            fetch_callback=lambda rows_of, rows: calls.append(rows.size) or rows_of[rows],
            seed=0,
        )
        for _minibatch in dataset:
            pass
        return len(calls)

    track_fetch_calls.unit = "fetch calls per epoch"


class Output(_Epoch):
    """Contents of minibatches: as stored, made dense, or cast."""

    params = parameters(quick=["CSR to dense"], full=["CSR to float64", "dense to float64"])
    param_names = ("output",)

    def setup(self, stores, output):
        store, options = OUTPUTS[output]
        self.open(stores[store], **options)


class Normalization(_Epoch):
    """Totals normalised and the logarithm taken, by the decoding threads."""

    params = parameters(quick=list(NORMALIZATIONS))
    param_names = ("normalization",)

    def setup(self, stores, normalization):
        self.open(stores["CSR gzip"], **NORMALIZATIONS[normalization])


class Loaded(_Epoch):
    """Cells in memory: what they take, and an epoch of them."""

    params = parameters(quick=[16], full=[1])
    param_names = ("block_size",)

    def setup(self, stores, block_size):
        self.collection = open_collection(stores["CSR gzip"], obs=["plate"])
        if not hasattr(self.collection, "load"):
            msg = "of another commit"
            raise NotImplementedError(msg)
        self.collection = self.collection.load()
        strategy = BlockShuffling(block_size=block_size)
        self.loader = CellDataset(self.collection, strategy, BATCH_SIZE, FETCH_FACTOR, seed=0)

    def track_loaded_bytes(self, *_):
        return self.collection.loaded_bytes / N_CELLS

    track_loaded_bytes.unit = "bytes per cell"


class Parallelism(_Epoch):
    """Threads and worker processes; memory is that of the training process."""

    params = (parameters(quick=[1, 2], full=[4]), parameters(quick=[0, 1], full=[2]))
    param_names = ("num_threads", "num_workers")

    def setup(self, stores, num_threads, num_workers):
        self.open(stores["CSR gzip"], num_threads=num_threads, num_workers=num_workers)


class Statistics(_Epoch):
    """The cost of the counters of `CellDataset.statistics`."""

    def setup(self, stores):
        if not hasattr(CellDataset, "statistics"):
            msg = "of another commit"
            raise NotImplementedError(msg)
        self.open(stores["CSR gzip"])

    def track_share_of_epoch(self, _stores):
        """Time to count, and to read the clock for each chunk, compared with an epoch."""
        # Imported here, since compared commits may have no counters.
        from cellfeed.decode import Counter, Counters  # noqa: PLC0415

        def timed():
            with counters.wall_time(Counter.MAKING_TENSORS):
                pass

        self.run()
        before, begin = self.dataset.statistics(), time.perf_counter()
        self.run()
        seconds, done = time.perf_counter() - begin, self.dataset.statistics() - before
        counters, number = Counters(), 100_000
        counted = timeit.timeit(lambda: counters.add(Counter.CELLS, 1), number=number) / number
        timed = timeit.timeit(timed, number=number) / number
        clock = timeit.timeit(time.perf_counter_ns, number=number) / number
        of_minibatch = 4 * counted + timed
        of_fetch = 8 * counted + 3 * timed
        return (
            done.n_minibatches * of_minibatch
            + done.n_fetches * of_fetch
            + done.n_chunks * 3 * clock
        ) / seconds

    track_share_of_epoch.unit = "share of the time"
