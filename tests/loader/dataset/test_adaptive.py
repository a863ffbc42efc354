"""Settings may change between any two fetches; minibatches and states know nothing of it."""

import operator
import re
import time
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.dataset.in_turns import InWorker
from tests.loader.storages.expecting import expecting, matrix_of
from torch.utils.data._utils.worker import WorkerInfo

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    open_collection,
)
from cellfeed._decode import Counter
from cellfeed.transforms import Log1p, NormalizeTotal

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
MATRIX = matrix_of(240).ceil()
SETTING = st.tuples(st.integers(0, 5), st.integers(0, 16))
WAYS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"dense": True},
    "whole fetches": {"fetch_transform": lambda cells: cells},
    "transformed": {"transform": [NormalizeTotal(1e4), Log1p()]},
    "in threads": {"batch_transform": lambda minibatch: minibatch, "transform_threads": 2},
}


def dataset_over(collection, **options):
    sizes = {"batch_size": 8, "fetch_factor": 3, "seed": 0}
    return CellDataset(collection, BlockShuffling(4), **(sizes | options))


def content(minibatch):
    X = minibatch.X.to_dense() if hasattr(minibatch.X, "to_dense") else minibatch.X
    return [np.asarray(X).tobytes(), np.asarray(minibatch.rows).tolist()]


def delivered(dataset, loader=None, settings=()):
    """Return minibatches and states of two epochs; settings change after each minibatch."""
    found, remaining = [], iter(settings)
    for _ in range(2):
        for minibatch in dataset if loader is None else loader:
            found.append((content(minibatch), (loader or dataset).state_dict()))
            dataset.counters.setting = next(remaining, dataset.counters.setting)
    return found


@pytest.mark.parametrize("way", WAYS)
@given(
    settings=st.lists(SETTING, max_size=60),
    start=st.tuples(st.integers(1, 4), st.integers(1, 9)),
    n_bytes=st.sampled_from([1, 1500, 10**9]),
)
def test_minibatches_and_states_are_those_of_fixed_settings(way, settings, start, n_bytes):
    fixed = dataset_over(expecting(MATRIX)[0], **WAYS[way])
    num_threads, prefetch = start
    adaptive = dataset_over(
        expecting(MATRIX)[0],
        adaptive=True,
        num_threads=num_threads,
        prefetch=prefetch,
        prefetch_bytes=n_bytes,
        **WAYS[way],
    )
    assert delivered(adaptive, settings=settings) == delivered(fixed)


@given(settings=st.lists(SETTING, max_size=40), n=st.integers(0, 30))
def test_a_run_goes_on_under_other_settings(settings, n):
    adaptive = dataset_over(expecting(MATRIX)[0], adaptive=True, num_threads=1)
    iterator, remaining = iter(adaptive), iter(settings)
    for _ in range(n):
        next(iterator)
        adaptive.counters.setting = next(remaining, (1, 1))
    state = adaptive.state_dict()
    iterator.close()
    fixed, again = (dataset_over(expecting(MATRIX)[0], adaptive=each) for each in (False, True))
    for each in (fixed, again):
        each.load_state_dict(state)
    assert delivered(again, settings=settings) == delivered(fixed)


@pytest.fixture(scope="module")
def file(write_h5ad):
    matrix = sp.random(600, 90, density=0.2, format="csr", dtype=np.float32, random_state=0)
    return write_h5ad(matrix, {"number": np.arange(600.0)})


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_follow(file, method):
    fixed = dataset_over(open_collection(file), num_threads=1)
    expected = delivered(fixed, fixed.loader(2, multiprocessing_context=method))
    adaptive = dataset_over(open_collection(file), num_threads=1, adaptive=True)
    loader = adaptive.loader(2, multiprocessing_context=method, persistent_workers=True)
    settings = [(1 + k % 3, 1 + k % 5) for k in range(200)]
    assert delivered(adaptive, loader, settings) == expected


def test_workers_have_the_setting_that_was_chosen(file):
    adaptive: CellDataset = dataset_over(
        open_collection(file), adaptive=True, batch_transform=lambda _: adaptive.counters.setting
    )
    found = []
    for setting in adaptive.loader(1, prefetch_factor=1, collate_fn=tuple):
        found.append(setting)
        adaptive.counters.setting = (3, 7)
    assert found[0] == (adaptive.num_threads or found[0][0], 1)
    assert found[-1] == (3, 7)


def test_ranks_deliver_what_they_do_with_fixed_settings(file):
    for rank in range(2):
        fixed, adaptive = (
            dataset_over(open_collection(file), rank=rank, world_size=2, adaptive=each)
            for each in (False, True)
        )
        settings = [(1 + k % 2, 1 + k % 7) for k in range(100)]
        assert delivered(adaptive, settings=settings) == delivered(fixed)


class TestNumberOfFetchesAhead:
    @pytest.mark.parametrize("prefetch", [1, 2, 5, 12])
    def test_is_the_chosen_one(self, prefetch):
        collection, store = expecting(matrix_of(1000))
        expect = store.expect

        def expect_and_see(*ranges):
            coming = expect(*ranges)
            if len(store.coming) == prefetch + 1:
                store.may_read.set()
            return coming

        dataset = dataset_over(collection, adaptive=True, prefetch=1)
        iterator = iter(dataset)
        next(iterator)
        assert max(n for n, _ in store.alive) <= 2
        while len(store.read) < 2:  # the one that comes next is here
            time.sleep(0.001)
        dataset.counters.setting = (1, prefetch)
        store.expect = expect_and_see
        if prefetch > 1:
            store.may_read.clear()  # until so many are expected
        for _ in range(60):
            next(iterator)
            dataset.counters.setting = (1, prefetch)
        iterator.close()
        assert max(n for n, _ in store.alive) == prefetch + 1

    @given(n_bytes=st.integers(1, 4000), settings=st.lists(SETTING, max_size=40))
    def test_has_no_more_bytes_in_flight(self, n_bytes, settings):
        collection, store = expecting(MATRIX)
        delivered(
            dataset_over(collection, adaptive=True, prefetch_bytes=n_bytes), settings=settings
        )
        assert all(n == 1 or sum_of <= n_bytes for n, sum_of in store.alive)


def test_history_has_what_was_chosen(file, monkeypatch):
    monkeypatch.setattr("cellfeed._dataset._cell_dataset.threads_per_process", lambda n: 6 // n)
    dataset = dataset_over(open_collection(file), adaptive=True, num_threads=2, prefetch=3)
    for _ in dataset:
        pass
    found = dataset.history()
    assert found["num_threads"].shape == found["prefetch"].shape == found["time"].shape
    assert (found["num_threads"][0], found["prefetch"][0]) == (2, 3)
    assert set(found["num_threads"]) <= {1, 2, 4, 6}
    assert "num_threads" not in dataset_over(open_collection(file)).history()


def test_a_loop_that_waits_for_bytes_requests_more_of_them():
    collection, store = expecting(matrix_of(2400))
    dataset = dataset_over(collection, adaptive=True, prefetch=1)
    read_ranges = store.read_ranges

    def late(*ranges):
        # As if they had come so late: the counter says what they waited for.
        dataset.counters.add(Counter.READING, 10**10)
        dataset.counters.add(Counter.WAITING, 10**10)
        return read_ranges(*ranges)

    store.read_ranges = late
    for _ in dataset:
        pass
    assert dataset.history()["prefetch"].max() > 1


class TestRefused:
    def test_with_an_indexable(self):
        with pytest.raises(ParameterError, match="got adaptive=True with an indexable of type"):
            CellDataset(np.ones((20, 3)), BlockShuffling(4), 10, adaptive=True)

    def test_with_a_fetch_callback(self, file):
        given = re.escape("got adaptive=True with a `fetch_callback`;")
        with pytest.raises(ParameterError, match=given):
            dataset_over(open_collection(file), fetch_callback=operator.getitem, adaptive=True)

    def test_in_an_interleaved_dataset(self, file):
        adaptive = dataset_over(open_collection(file), adaptive=True)
        with pytest.raises(ParameterError, match="`datasets` must not be `adaptive`, as each"):
            InterleavedDatasets([adaptive])

    @pytest.mark.parametrize("adaptive", [False, True])
    def test_another_loader_s_workers_say_that_it_has_no_effect(self, file, adaptive):
        dataset = dataset_over(open_collection(file), adaptive=adaptive)
        worker = WorkerInfo(id=0, num_workers=1, seed=0, dataset=dataset)
        with warnings.catch_warnings(record=True) as caught, InWorker(worker):
            warnings.simplefilter("always")
            iterator = iter(dataset)
            next(iterator)
            iterator.close()
        said = [each for each in caught if "`adaptive` has no effect" in str(each.message)]
        assert len(said) == adaptive
