"""A user's function of a minibatch, run by as many threads as were asked for."""

import itertools
import threading

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection


def of_threads(collection, threads, **options):
    return CellDataset(
        collection, BlockShuffling(4), 5, 2, seed=0, transform_threads=threads, **options
    )


def rows_of(minibatch):
    return minibatch.rows.tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("dense", [False, True])
def test_minibatches_and_their_order_are_the_same(plates, num_workers, dense):
    collection = open_collection(plates)
    expected, found = (
        list(of_threads(collection, n, batch_transform=rows_of, dense=dense).loader(num_workers))
        for n in (0, 3)
    )
    assert found == expected
    assert sorted(row for rows in found for row in rows) == list(range(63))


def test_so_many_run_at_once(plates):
    """After the first, each waits for two others, which come only if three threads run it."""
    together, first = threading.Barrier(3, timeout=600), itertools.count()

    def meet(minibatch):
        if next(first):
            together.wait()
        return threading.current_thread().name

    names = list(of_threads(open_collection(plates), 3, batch_transform=meet))
    assert len(names) == 13
    assert len(set(names[1:])) == 3
    assert all(name.startswith("cellfeed-transform") for name in names)


@pytest.mark.parametrize("data", ["collection", "array"])
def test_an_error_comes_in_its_place(plates, data):
    def refuse(minibatch):
        rows = minibatch.tolist() if data == "array" else rows_of(minibatch)
        if 30 in rows:
            raise ValueError("no thirty")
        return rows

    collection = open_collection(plates) if data == "collection" else np.arange(63)
    plain = of_threads(collection, 0)
    plan = plain.plan(epoch=0)
    fetches = map(plan.fetch, range(plan.n_fetches))
    before = [
        batch.tolist()
        for fetch in fetches
        for batch in np.split(fetch.rows[fetch.order], range(5, fetch.order.size, 5))
    ]
    n_before = next(k for k, batch in enumerate(before) if 30 in batch)
    found: list[list[int]] = []
    with pytest.raises(ValueError, match="no thirty"):
        found.extend(of_threads(collection, 2, batch_transform=refuse))
    assert found == before[:n_before]


def test_a_state_counts_what_was_delivered_and_not_what_was_made(plates):
    dataset = of_threads(open_collection(plates), 4, batch_transform=rows_of)
    whole = list(dataset)
    dataset.set_epoch(0)
    some = iter(dataset)
    first = [next(some) for _ in range(3)]
    state = dataset.state_dict()
    some.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("cellfeed-transform")]
    resumed = of_threads(open_collection(plates), 1, batch_transform=rows_of)
    resumed.load_state_dict(state)
    assert first + list(resumed) == whole


def test_as_many_as_less_than_none_are_refused(plates):
    with pytest.raises(ParameterError, match="`transform_threads >= 1` must hold"):
        of_threads(open_collection(plates), -1, batch_transform=rows_of)
