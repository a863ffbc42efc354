import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.sampling.epochs import epoch_of

from cellfeed import (
    BlockShuffling,
    ParameterError,
    Streaming,
)

keys = st.integers(0, 2**64 - 1)
STRATEGIES = {"Streaming": Streaming, "BlockShuffling": BlockShuffling}
BAD_INDICES = {
    "empty": [],
    "floats": [0.5],
    "nan": [float("nan")],
    "booleans": [True, False],
    "text": "ab",
    "a number": 3,
    "two-dimensional": [[0, 1]],
    "negative": [-1, 2],
    "beyond int64": np.array([2**63], dtype=np.uint64),
}


@st.composite
def block_shufflings(draw) -> tuple[BlockShuffling, int, np.ndarray]:
    """A strategy, the number of rows, and the rows that it may visit."""
    n_rows = draw(st.integers(1, 120))
    chosen = draw(st.none() | st.sets(st.integers(0, n_rows - 1), min_size=1).map(sorted))
    strategy = BlockShuffling(draw(st.integers(1, 30)), chosen, drop_last=draw(st.booleans()))
    return strategy, n_rows, np.arange(n_rows) if chosen is None else np.array(chosen)


@settings(max_examples=15)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).map(sorted), keys)
def test_a_row_that_is_given_twice_counts_twice(indices, key):
    strategies = (Streaming(indices), Streaming(indices, shuffle=True), BlockShuffling(3, indices))
    for strategy in strategies:
        rows = np.sort(epoch_of(strategy, 31, key))
        assert rows.tolist() == indices


class TestStreaming:
    def test_visits_rows_in_storage_order(self):
        assert epoch_of(Streaming(), 7).tolist() == list(range(7))
        assert epoch_of(Streaming(indices=[2, 3, 6]), 7).tolist() == [2, 3, 6]


class TestBlockShuffling:
    @given(block_shufflings(), keys)
    def test_blocks_are_runs_of_the_available_rows_on_a_grid(self, case, key):
        strategy, n_rows, available = case
        size = strategy.block_size
        places = np.searchsorted(available, epoch_of(strategy, n_rows, key)).tolist()
        n_left = available.size % size
        offsets, lengths = set(), []
        while places:
            # The short block is told by its first row: the only one on the grid after the whole.
            is_short = not strategy.drop_last and places[0] == available.size - n_left
            length = n_left if is_short and n_left else size
            block, places = places[:length], places[length:]
            assert block == list(range(block[0], block[0] + length))
            offsets.add(block[0] % size)
            lengths.append(length)
        if strategy.drop_last:
            assert len(offsets) <= 1
            assert all(offset <= n_left for offset in offsets)
        else:
            assert offsets == {0}
            assert lengths.count(size) == available.size // size

    def test_the_short_block_comes_anywhere(self):
        epochs = [epoch_of(BlockShuffling(4), 14, key).tolist() for key in range(100)]
        assert {rows.index(12) for rows in epochs} == {0, 4, 8, 12}

    def test_the_rows_left_out_differ_between_epochs(self):
        strategy = BlockShuffling(4, drop_last=True)
        left_out = {
            tuple(sorted(set(range(14)) - set(epoch_of(strategy, 14, key).tolist())))
            for key in range(100)
        }
        assert left_out == {(0, 1), (0, 13), (12, 13)}

    @pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64])
    def test_takes_numpy_integers(self, dtype):
        rows = epoch_of(BlockShuffling(dtype(200)), 1000)
        assert rows.dtype == np.int64
        assert np.array_equal(rows, epoch_of(BlockShuffling(200), 1000))

    @pytest.mark.parametrize("size", [0, -1, 2.0, float("nan"), True, "4", None, np.array([4])])
    def test_bad_block_size(self, size):
        with pytest.raises(ParameterError, match="`block_size"):
            BlockShuffling(block_size=size)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
class TestIndices:
    def test_unsorted_ones_are_sorted_with_a_warning_at_the_caller(self, strategy):
        given_indices = np.array([5, 2, 9])
        with pytest.warns(UserWarning, match="not sorted") as caught:
            sorted_indices = strategy(indices=given_indices).indices
        assert sorted_indices.tolist() == [2, 5, 9]
        assert given_indices.tolist() == [5, 2, 9]
        assert caught[0].filename == __file__

    def test_later_changes_to_the_callers_array_have_no_effect(self, strategy):
        given_indices = np.array([2, 5, 9])
        made = strategy(indices=given_indices)
        given_indices[0] = 0
        assert made.indices.tolist() == [2, 5, 9]

    @pytest.mark.parametrize("indices", BAD_INDICES.values(), ids=BAD_INDICES)
    def test_bad_ones(self, strategy, indices):
        with pytest.raises(ParameterError, match="`indices"):
            strategy(indices=indices)

    @pytest.mark.parametrize(
        ("indices", "remedy"),
        [("plate == 'a'", "`collection.where(query)`"), ([True, False], "`np.flatnonzero(mask)`")],
    )
    def test_what_to_write_for_them(self, strategy, indices, remedy):
        with pytest.raises(ParameterError, match=f"write {re.escape(remedy)}$"):
            strategy(indices=indices)

    def test_beyond_the_collection(self, strategy):
        with pytest.raises(ParameterError, match=r"`indices < 10`.* must hold.*largest is 10"):
            strategy(indices=[0, 10]).n_positions(10)
