"""Functions of a user that read rows and take minibatches."""

import itertools
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.loader.matrices import dense

from cellfeed import (
    BlockShuffling,
    MatchedControls,
    ParameterError,
    ReadOptions,
    Streaming,
    open_collection,
)
from cellfeed.scdataset import scDataset
from cellfeed.transforms import Log1p

N_ROWS = 50


@pytest.fixture
def table() -> np.ndarray:
    return np.arange(3 * N_ROWS, dtype=np.float32).reshape(N_ROWS, 3)


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


def test_are_called_in_order_with_their_arguments(calls):
    collection = range(N_ROWS)

    def noting(name, result):
        def callback(*arguments):
            calls.append((name, *arguments))
            return result or f"result {len(calls)}"

        return callback

    results = {"fetch_callback": "fetched", "fetch_transform": "transformed"}
    results |= {"batch_callback": "batch", "batch_transform": ""}
    callbacks: dict[str, Any] = {name: noting(name, each) for name, each in results.items()}
    dataset = scDataset(collection, BlockShuffling(2), 20, 2, seed=0, **callbacks)
    assert list(dataset) == ["result 4", "result 6", "result 10"]
    expected: list[tuple[Any, ...]] = []
    plan = dataset.plan(epoch=0)
    for fetch in map(plan.fetch, range(plan.n_fetches)):
        expected += [("fetch_callback", collection, fetch.rows), ("fetch_transform", "fetched")]
        for start in range(0, len(fetch.order), 20):
            expected += [
                ("batch_callback", "transformed", fetch.order[start : start + 20]),
                ("batch_transform", "batch"),
            ]
    for call, wanted in zip(calls, expected, strict=True):
        for argument, wanted_argument in zip(call, wanted, strict=True):
            assert argument is wanted_argument or np.array_equal(argument, wanted_argument)


def test_each_alone(table):
    def double(values):
        return 2 * values

    alone: dict[str, Any] = {
        "fetch_callback": lambda collection, rows: 2 * collection[rows],
        "fetch_transform": double,
        "batch_callback": lambda fetched, indices: 2 * fetched[indices],
        "batch_transform": double,
    }
    plain = list(scDataset(table, BlockShuffling(4), 8, 2, seed=0))
    for name, callback in alone.items():
        changed = scDataset(table, BlockShuffling(4), 8, 2, seed=0, **{name: callback})
        assert np.array_equal(np.concatenate(list(changed)), 2 * np.concatenate(plain)), name


@pytest.mark.parametrize("is_dense", [False, True])
def test_a_fetch_callback_over_a_collection_replaces_the_reader(plates, in_memory, is_dense):
    options = {"fetch_callback": operator.getitem, "dense": is_dense}
    for batch in scDataset(open_collection(plates), BlockShuffling(4), 10, 2, **options):
        assert (batch.X.layout == torch.strided) is is_dense
        assert np.array_equal(dense(batch.X), in_memory(plates)[batch.rows])


def test_anything_with_a_length_can_be_read_by_a_fetch_callback():
    values = range(100, 100 + N_ROWS)
    readable: list[tuple[Any, Callable[[Any, Any], Any]]] = [
        (values, lambda values, rows: np.array([values[row] for row in rows])),
        (pd.DataFrame({"a": values}), lambda table, rows: table["a"].iloc[rows].to_numpy()),
    ]
    for collection, read in readable:
        dataset = scDataset(collection, BlockShuffling(4), 8, fetch_callback=read)
        assert sorted(np.concatenate(list(dataset))) == list(values)


HOW_TO_READ = {
    "dtype": "float64",
    "transform": Log1p(),
    "read_options": ReadOptions(num_threads=2),
}


@pytest.mark.parametrize("name", HOW_TO_READ)
def test_how_to_read_beside_a_fetch_callback(plates, name):
    options: Any = {name: HOW_TO_READ[name], "fetch_callback": operator.getitem}
    told = re.escape(f"got {name}={HOW_TO_READ[name]!r} with a `fetch_callback`;")
    with pytest.raises(ParameterError, match=told):
        scDataset(open_collection(plates), BlockShuffling(4), 10, **options)


def test_cells_from_a_batch_callback_are_made_a_minibatch(plates):
    backwards: dict[str, Any] = {"batch_callback": lambda cells, indices: cells[indices[::-1]]}
    dataset = scDataset(open_collection(plates), Streaming(), 4, **backwards)
    assert next(iter(dataset)).rows.tolist() == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ["fetch_callback", "batch_callback"])
def test_what_is_no_function(table, name):
    wrong: dict[str, Any] = {name: "mean"}
    with pytest.raises(ParameterError, match=f"`{name}` must be a function, but got 'mean'"):
        scDataset(table, Streaming(), 8, **wrong)


def test_a_fetch_that_was_begun_is_read_again():
    read = list[list[int]]()

    def noted(table: Any, rows: Any) -> Any:
        read.append(rows.tolist())
        return table[rows]

    stopped, goes_on = (
        scDataset(np.arange(90), BlockShuffling(3), 8, 3, fetch_callback=noted, seed=5)
        for _ in range(2)
    )
    list(itertools.islice(stopped, 4))
    before = read.copy()
    goes_on.load_state_dict(stopped.state_dict())
    next(iter(goes_on))
    assert read[len(before) :] == before[-1:]


def test_controls_come_beside_cells_that_cellfeed_takes(plates):
    strategy = MatchedControls(BlockShuffling(4), ["x", "y", "y"] * 21, "x")
    for name in ("fetch_callback", "batch_callback"):
        options: dict[str, Any] = {name: operator.getitem}
        with pytest.raises(ParameterError, match=r"^controls and neighbours come beside the"):
            scDataset(open_collection(plates), strategy, 8, **options)
