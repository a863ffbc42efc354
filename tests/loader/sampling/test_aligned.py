"""Blocks that begin where chunks do, against boundaries that NumPy finds among all rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.loader.sampling.suites import PlanConformance

from cellfeed import BlockShuffling, ParameterError
from cellfeed.sampling import BlockSizes, ChunkedRows, ChunkStarts
from cellfeed.testing import StrategyCase

keys = st.integers(0, 2**64 - 1)


@dataclass(frozen=True)
class Files:
    """Reads rows that are in memory, and can be pickled."""

    rows: Sequence[ChunkedRows]

    def __call__(self) -> Sequence[ChunkedRows]:
        return self.rows


def blocks_of(block_size: int, **rows: Any) -> BlockShuffling:
    """Blocks that begin where the chunks of one file do."""
    return BlockShuffling(block_size, align=ChunkStarts(Files([ChunkedRows(**rows)])))


NINE: dict[str, Any] = {"n_rows": 9, "chunk_size": 4, "row_size": 1}


@st.composite
def files(draw: Any, n_rows: int) -> Files:
    """Files of so many rows together: sparse ones, dense ones, and some without chunks."""
    n_files = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, n_rows), min_size=n_files - 1, max_size=3)))
    bounds = [0, *cuts[: n_files - 1], n_rows]
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    made = []
    for n in np.diff(bounds).tolist():
        longest = draw(st.sampled_from([0, 1, 5, 40]))
        pointer = np.cumsum([0, *rng.integers(0, longest + 1, n)])
        chunk = draw(st.integers(1, 60))
        kind = draw(st.sampled_from(["sparse", "sparse", "dense", "flat", "none"]))
        made.append(
            {
                "sparse": ChunkedRows(n_rows=n, chunk_size=chunk, pointer=pointer),
                "dense": ChunkedRows(n_rows=n, chunk_size=chunk, row_size=1),
                "flat": ChunkedRows(n_rows=n, chunk_size=chunk, row_size=7),
                "none": ChunkedRows(n_rows=n),
            }[kind]
        )
    return Files(tuple(made))


@st.composite
def aligned(draw: Any, n_rows: int) -> StrategyCase:
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([1.0, 0.7, 0.1]))
    rows = None
    if share < 1:
        rows = np.flatnonzero(rng.random(n_rows) < share)
        rows = rows if rows.size else np.array([n_rows - 1])
    n, block_size = n_rows if rows is None else rows.size, draw(st.integers(1, 40))
    drop_last = draw(st.booleans())
    return StrategyCase(
        strategy=BlockShuffling(
            block_size, rows, drop_last=drop_last, align=ChunkStarts(draw(files(n_rows)))
        ),
        n_rows=n_rows,
        rows=rows,
        n_positions=n - n % block_size if drop_last else None,
    )


cases = st.integers(1, 200).flatmap(aligned)


class TestAligned(PlanConformance):
    @pytest.fixture
    def cases(self):
        return aligned


def chunks_of(case: StrategyCase) -> NDArray[np.int64]:
    """A number for the chunk that each row begins in, or for the row itself if there is none."""
    strategy: Any = case.strategy
    numbers, first = [np.empty(0, np.int64)], 0
    for each in strategy.align._read.rows:
        starts = np.arange(each.n_rows) * each.row_size
        if each.pointer is not None:
            starts = each.pointer[:-1]
        chunks = starts // each.chunk_size if each.chunk_size else np.arange(each.n_rows)
        numbers.append(first + chunks)
        first += 1 + chunks.max(initial=0)
    return np.concatenate(numbers)


def expected_blocks(case: StrategyCase) -> list[list[int]]:
    """What the docstring says, block by block; some have no rows."""
    strategy: Any = case.strategy
    rows, size = case.available, strategy.block_size
    _, begin_chunks = np.unique(chunks_of(case)[rows], return_index=True)
    places = np.append(begin_chunks, rows.size)
    bounds = places[np.searchsorted(places, np.arange(0, rows.size, size))]
    return [rows[a:b].tolist() for a, b in zip(bounds, [*bounds[1:], rows.size], strict=True)]


def whole_epoch(case: StrategyCase, key: int) -> list[int]:
    strategy: Any = case.strategy
    order = strategy.epoch_order(n_rows=case.n_rows, epoch_key=key)
    rows: list[int] = order(np.arange(case.available.size)).tolist()
    return rows


@given(cases, keys)
def test_an_epoch_is_of_these_blocks_in_another_order(case, key):
    left = [block for block in expected_blocks(case) if block]
    epoch = whole_epoch(case, key)
    while epoch:
        (block,) = [each for each in left if each[0] == epoch[0]]
        assert epoch[: len(block)] == block
        epoch = epoch[len(block) :]
        left.remove(block)
    assert not left


@given(cases)
def test_block_sizes_are_those_of_the_blocks(case):
    strategy: Any = case.strategy
    sizes = np.array([len(block) for block in expected_blocks(case) if block])
    found = strategy.block_sizes(case.n_rows)
    assert (found.n_blocks, found.largest) == (sizes.size, sizes.max())
    assert found.mean == pytest.approx(sizes.mean())
    assert found.effective == pytest.approx((sizes**2).sum() / sizes.sum())


def test_many_blocks_are_found_by_groups_of_them():
    """More than are summed together, and more than are permuted together."""
    rng = np.random.default_rng(0)
    pointer = np.cumsum([0, *rng.integers(0, 20, 30_000)])
    strategy = blocks_of(4, n_rows=30_000, chunk_size=50, pointer=pointer)
    case = StrategyCase(strategy=strategy, n_rows=30_000)
    expected = {block[0]: block for block in expected_blocks(case) if block}
    epoch = whole_epoch(case, 5)
    found = list[int]()
    while len(found) < 30_000:
        found += expected.pop(epoch[len(found)])
    assert found == epoch
    assert not expected
    order = strategy.epoch_order(n_rows=30_000, epoch_key=5)
    positions = rng.integers(0, 30_000, (4, 100))
    assert np.array_equal(order(positions), np.array(epoch)[positions])


def test_the_order_stays_what_it_is():
    strategy = blocks_of(2, n_rows=12, chunk_size=10, pointer=np.arange(0, 39, 3))
    order = strategy.epoch_order(n_rows=12, epoch_key=7)
    assert order(np.arange(12)).tolist() == [0, 1, 2, 3, 7, 8, 9, 4, 5, 6, 10, 11]


def test_all_orders_of_blocks_come_equally_often():
    strategy = blocks_of(1, n_rows=7, chunk_size=2, row_size=1)
    counts = np.zeros(4)
    for key in range(2000):
        first = strategy.epoch_order(n_rows=7, epoch_key=key)(np.array([0]))
        counts[first // 2] += 1
    assert np.abs(counts - 500).max() < 5 * np.sqrt(2000 * 0.25 * 0.75)


def test_a_copy_reads_where_rows_begin_anew():
    @dataclass
    class Counted:
        n: int = 0

        def __call__(self) -> list[ChunkedRows]:
            self.n += 1
            return [ChunkedRows(**NINE)]

    counted = Counted()
    starts = ChunkStarts(counted)
    state = starts.__getstate__()
    assert counted.n == 1
    assert not any(isinstance(value, tuple) for value in state.values())
    for _ in range(2):
        assert starts.blocks(None, 2).sizes().n_blocks == 3
    assert counted.n == 1


def test_sizes_of_blocks_that_are_not_aligned():
    assert BlockShuffling(4).block_sizes(10) == BlockSizes(
        n_blocks=3, mean=10 / 3, largest=4, effective=3.6
    )
    assert BlockShuffling(4, indices=[1, 5]).block_sizes(10) == BlockSizes(
        n_blocks=1, mean=2.0, largest=2, effective=2.0
    )


@pytest.mark.parametrize("block_size", [10, 2**62, 2**63 - 1])
def test_one_block_of_all(block_size):
    strategy = blocks_of(block_size, **NINE)
    assert strategy.epoch_order(n_rows=9, epoch_key=0)(np.arange(9)).tolist() == list(range(9))


class TestRefused:
    @pytest.mark.parametrize("align", ["chunk", True, 16, [0, 4]])
    def test_another_alignment(self, align):
        with pytest.raises(ParameterError, match='`align` must be "chunks" or None, but got'):
            BlockShuffling(16, align=align)

    def test_one_that_is_not_bound(self):
        strategy = BlockShuffling(16, align="chunks")
        assert strategy.n_positions(100) == 100
        for ask in (strategy.block_sizes, lambda n: strategy.epoch_order(n_rows=n, epoch_key=0)):
            with pytest.raises(ParameterError, match="pass the strategy to a CellDataset"):
                ask(100)

    def test_what_has_no_chunks(self):
        with pytest.raises(ParameterError, match="but got a ndarray; leave `align` out"):
            BlockShuffling(16, align="chunks").bound_to(np.arange(100))

    def test_sizes_of_no_blocks(self):
        with pytest.raises(ParameterError, match="`n_rows >= 1` must hold"):
            BlockShuffling(16).block_sizes(0)

    def test_a_collection_of_other_rows(self):
        strategy = blocks_of(2, **NINE)
        with pytest.raises(ParameterError, match="of 9 rows, but this one has 10"):
            strategy.epoch_order(n_rows=10, epoch_key=0)

    def test_a_row_pointer_of_other_rows(self):
        with pytest.raises(ParameterError, match="must have 4 values"):
            ChunkedRows(n_rows=3, chunk_size=4, pointer=np.arange(3))
