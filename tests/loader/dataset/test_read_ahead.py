"""Fetches are on their way ahead, in any depth, also one that adapts."""

import functools
import pickle
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.loader import matrices
from tests.loader.read_options import parameters_of
from tests.loader.sources.expecting import expecting, matrix_of
from tests.loader.threads import wait_for_dropped
from tests.warm import python as warm

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    ReadOptions,
    Streaming,
    open_collection,
)

MATRIX = (9 * matrix_of()).ceil()  # counts
DENSE = MATRIX.toarray()
rows_of = functools.partial(matrices.rows_of, expected=DENSE)
N_FETCHES = 8
MANY = matrix_of(200)
DEPTHS = [
    *((n, n, "s3://bucket/cells") for n in (1, 2, 3, 5)),
    *((None, 8, f"{scheme}://host/cells") for scheme in ("https", "s3", "gs", "az")),
    (None, 1, "memory://cells"),
]


def dataset_over(collection, block_size=4, **options):
    """Eight fetches of three minibatches."""
    sizes = {"batch_size": 4, "fetch_factor": 3, "seed": 0, "num_threads": 2}
    return CellDataset(collection, BlockShuffling(block_size), **parameters_of(sizes | options))


@pytest.fixture
def remote():
    return expecting(MATRIX)


class TestMinibatches:
    @pytest.mark.slow
    @given(
        prefetch=st.integers(1, 12),
        n_bytes=st.sampled_from([1, 500, 1500, 10**9]),
        block_size=st.integers(1, 20),
        fetch_factor=st.integers(1, 5),
    )
    def test_are_those_of_numpy_in_the_plan_s_order(
        self, prefetch, n_bytes, block_size, fetch_factor
    ):
        """And no more bytes are in flight, but for one fetch."""
        collection, store = expecting(MATRIX)
        options = {"batch_size": 7, "fetch_factor": fetch_factor, "seed": 1, "num_threads": 1}
        options |= {"prefetch": prefetch, "prefetch_bytes": n_bytes}
        dataset = dataset_over(collection, block_size, **options)
        plan = dataset.plan(epoch=0)
        planned = [plan.delivered_rows(number)[0] for number in range(plan.n_fetches)]
        assert rows_of(dataset) == np.concatenate(planned).tolist()
        assert all(n == 1 or sum_of <= n_bytes for n, sum_of in store.alive)

    @pytest.mark.parametrize("prefetch", [1, 2, 8])
    def test_come_in_every_way(self, remote, write_h5ad, prefetch):
        alone = rows_of(dataset_over(open_as(MATRIX), prefetch=1))
        for options in ({"dense": True}, {"fetch_transform": lambda cells: cells}):
            assert rows_of(dataset_over(remote[0], prefetch=prefetch, **options)) == alone
        local = open_collection(write_h5ad(MATRIX))
        assert not local.is_remote
        assert rows_of(dataset_over(local, prefetch=prefetch)) == alone

    def test_of_interleaved_datasets(self, remote):
        one, other = (
            InterleavedDatasets([dataset_over(collection, seed=k) for k in range(2)])
            for collection in (remote[0], open_as(MATRIX))
        )
        assert rows_of(one) == rows_of(other)


def open_as(matrix):
    return expecting(matrix, url="memory://bucket/cells")[0]


def read_once_expected(store, n):
    """Let the store wait until so many more fetches are expected, or live."""
    expect, n_before = store.expect, len(store.expected)

    def expect_and_see(*ranges):
        coming = expect(*ranges)
        if n in (len(store.expected) - n_before, len(store.coming)):
            store.may_read.set()
        return coming

    store.may_read.clear()
    store.expect = expect_and_see


class TestExpecting:
    @pytest.mark.parametrize("prefetch", [1, 2, 3, 5])
    def test_each_fetch_is_told_once_and_then_read(self, remote, prefetch):
        collection, store = remote
        rows_of(dataset_over(collection, prefetch=prefetch))
        assert len(store.expected) == N_FETCHES
        assert store.read == store.expected  # indices and data, of all minibatches, as one

    @pytest.mark.parametrize(("prefetch", "depth", "url"), DEPTHS)
    def test_so_many_are_under_way_beside_the_one_that_is_read(self, prefetch, depth, url):
        """As many as there may be are expected before the first is read."""
        collection, store = expecting(MANY, url)
        read_once_expected(store, depth + 1)
        assert sum(map(len, dataset_over(collection, prefetch=prefetch))) == MANY.shape[0]
        assert max(n for n, _ in store.alive) == depth + 1

    def test_as_many_as_there_is_room_for(self, remote):
        collection, store = remote
        rows_of(dataset_over(collection, prefetch=8))
        two = max(sum(n for _, n in one + other) for one in store.read for other in store.read)
        n_alive = 0
        for _ in range(100):  # whether the first is over before the second begins is up to threads
            collection, store = expecting(MATRIX)
            rows_of(dataset_over(collection, prefetch=8, prefetch_bytes=two))
            n_alive = max(n_alive, *(n for n, _ in store.alive))
            if n_alive > 1:
                break
        assert n_alive == 2


@pytest.mark.parametrize("prefetch", [1, 2, 8])
class TestLettingGo:
    def test_after_the_last(self, remote, prefetch):
        collection, store = remote
        rows_of(dataset_over(collection, prefetch=prefetch))
        assert store.coming == []

    def test_where_the_rest_is_not_wanted(self, remote, prefetch):
        collection, store = remote
        for _ in dataset_over(collection, prefetch=prefetch):
            break
        wait_for_dropped()
        assert store.coming == []

    def test_where_the_iterator_is_closed_in_the_middle_of_waiting(self, remote, prefetch):
        collection, store = remote
        iterator = iter(dataset_over(collection, prefetch=prefetch, prefetch_bytes=1))
        held = [next(iterator) for _ in range(4)]
        iterator.close()
        assert store.coming == []
        assert len(held) == 4

    @pytest.mark.parametrize("fails", ["fails_at", "fails_to_expect_at"])
    def test_where_a_fetch_fails_after_those_before_it_have_come(self, remote, prefetch, fails):
        collection, store = remote
        setattr(store, fails, 4)
        came = []
        with pytest.raises(OSError, match="failed") as error:
            came.extend(dataset_over(collection, prefetch=prefetch, prefetch_bytes=2000))
        assert store.coming == []  # though the error has the frames of those that read
        assert len(error.traceback) > 2
        assert len(came) == 4 * 3
        assert rows_of(came) == rows_of(dataset_over(open_as(MATRIX)))[: len(rows_of(came))]


@pytest.mark.process
def test_python_ends_though_an_iteration_waits_for_room():
    code = (
        "from cellfeed import BlockShuffling, CellDataset, ReadOptions\n"
        "from tests.loader.sources.expecting import expecting, matrix_of\n"
        "collection, store = expecting(matrix_of())\n"
        "options = ReadOptions(prefetch=4, prefetch_bytes=1)\n"
        "dataset = CellDataset(collection, BlockShuffling(4), 4, 3, seed=0, read_options=options)\n"
        "iterator = iter(dataset)\n"
        "next(iterator)\n"
        "print('ends')\n"
    )
    done = warm.run([sys.executable, "-c", code], is_finalized=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


class TestWhereItGoes:
    @pytest.mark.parametrize("name", ["prefetch", "prefetch_bytes"])
    @pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
    def test_what_it_cannot_be(self, remote, name, value):
        with pytest.raises(ParameterError, match=f"^`{name}.*got {name}={value!r}$"):
            dataset_over(remote[0], **{name: value})

    def test_it_is_pickled_and_no_part_of_the_state(self, remote):
        one = dataset_over(remote[0], prefetch=1)
        iterator = iter(one)
        for _ in range(5):
            next(iterator)
        many = pickle.loads(pickle.dumps(dataset_over(remote[0], prefetch=8, prefetch_bytes=999)))
        assert many.read_options == ReadOptions(num_threads=2, prefetch=8, prefetch_bytes=999)
        many.load_state_dict(one.state_dict())
        assert rows_of(many) == rows_of(iterator)

    def test_it_is_recommended(self, remote, tmp_path):
        class Result:
            def to_json(self):
                sizes = {"block_size": 4, "fetch_factor": 2, "num_workers": 0}
                return {
                    "schema": "cellfeed.autotune/4",
                    "dataset": {"batch_size": 8},
                    "recommended": {"configuration": sizes, "prefetch": 5},
                }

        made = CellDataset.from_autotune(remote[0], Result())
        assert made.read_options == ReadOptions(prefetch=5)
        own = ReadOptions(prefetch=2)
        made = CellDataset.from_autotune(remote[0], Result(), read_options=own)
        assert made.read_options == own
        by_brackets = CellDataset.from_autotune(DENSE, Result())
        assert by_brackets.read_options == ReadOptions()


class TestWorkers:
    def test_of_a_remote_collection_are_not_forked(self, remote, plates):
        distant, near = dataset_over(remote[0]), dataset_over(open_collection(plates))
        for dataset in (distant, InterleavedDatasets([near, distant])):
            context = dataset.loader(1).multiprocessing_context
            assert context.get_start_method() == "forkserver"
            assert dataset.loader(0).multiprocessing_context is None
            given = dataset.loader(1, multiprocessing_context="spawn").multiprocessing_context
            assert given.get_start_method() == "spawn"
        assert near.loader(1).multiprocessing_context is None

    @pytest.mark.process
    def test_deliver_all_rows(self, remote):
        dataset = CellDataset(remote[0], Streaming(), 8, 2, seed=0)
        minibatches = list(dataset.loader(2))
        assert all(isinstance(each.X, torch.Tensor) for each in minibatches)
        assert sorted(rows_of(minibatches)) == list(range(len(DENSE)))
