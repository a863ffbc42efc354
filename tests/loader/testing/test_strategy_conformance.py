"""The core's strategies pass the suite, and it finds strategies that are wrong."""

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from tests.loader.sampling.suites import PlanConformance

from cellfeed import (
    BlockShuffling,
    SamplingStrategy,
    Streaming,
)
from cellfeed.sampling import Permutation, random_words
from cellfeed.testing import StrategyCase, StrategyConformance


def some_rows(n_rows: int) -> st.SearchStrategy[np.ndarray | None]:
    """All rows, or a share of them, at least one."""

    def drawn(share: float, seed: int) -> np.ndarray:
        rows = np.flatnonzero(np.random.default_rng(seed).random(n_rows) < share)
        return rows if rows.size else np.array([n_rows - 1])

    return st.none() | st.builds(drawn, st.sampled_from([0.5, 0.9, 0.1]), st.integers(0, 99))


class TestBlockShuffling(PlanConformance):
    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            rows = draw(some_rows(n_rows))
            size, drop_last = draw(st.integers(1, 40)), draw(st.booleans())
            n = n_rows if rows is None else rows.size
            return StrategyCase(
                strategy=BlockShuffling(size, rows, drop_last=drop_last),
                n_rows=n_rows,
                rows=rows,
                n_positions=n - n % size if drop_last else n,
            )

        return cases


class TestStreaming(PlanConformance):
    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            rows, shuffle = draw(some_rows(n_rows)), draw(st.booleans())
            strategy = Streaming(rows, shuffle=shuffle)
            return StrategyCase(strategy=strategy, n_rows=n_rows, rows=rows, is_random=shuffle)

        return cases


@dataclass
class Wrong(SamplingStrategy):
    """Rows in random order; subclasses get one thing wrong."""

    calls: list[int] = field(default_factory=list)

    shuffles_fetch = False

    def n_positions(self, n_rows):
        return n_rows

    def epoch_order(self, *, n_rows, epoch_key):
        permute = Permutation(n_rows, epoch_key)
        return lambda positions: self.changed(permute(positions), positions, n_rows)

    def changed(self, rows, positions, n_rows):
        return rows


class RepeatsARow(Wrong):
    def changed(self, rows, positions, n_rows):
        return np.where(rows == 1, 0, rows)


class GoesBeyond(Wrong):
    def changed(self, rows, positions, n_rows):
        return rows + 1


class CountsWrong(Wrong):
    def n_positions(self, n_rows):
        return max(1, n_rows - 1)


class RemembersCalls(Wrong):
    def changed(self, rows, positions, n_rows):
        self.calls.append(1)
        return (rows + len(self.calls)) % n_rows


class LooksAtItsNeighbours(Wrong):
    def changed(self, rows, positions, n_rows):
        return (rows + positions.size) % n_rows


class WritesIntoPositions(Wrong):
    def changed(self, rows, positions, n_rows):
        positions += 1
        return rows


class GivesSmallIntegers(Wrong):
    def changed(self, rows, positions, n_rows):
        return rows.astype(np.int32)


class IsTheSameInEveryEpoch(Wrong):
    def epoch_order(self, *, n_rows, epoch_key):
        return Permutation(n_rows, 0)


class DrawsFromAGenerator(Wrong):
    def epoch_order(self, *, n_rows, epoch_key):
        order = np.random.default_rng().permutation(n_rows)
        return lambda positions: order[positions]


class KeepsTwoNumbersARow(Wrong):
    def epoch_order(self, *, n_rows, epoch_key):
        words = random_words(epoch_key, np.arange(n_rows))
        order = np.argsort(words)
        return lambda positions: order[positions] + 0 * words[positions].astype(np.int64)


class KeepsPythonObjects(Wrong):
    def epoch_order(self, *, n_rows, epoch_key):
        rows = Permutation(n_rows, epoch_key)(np.arange(n_rows)).tolist()
        return lambda positions: np.array([rows[k] for k in positions.flat]).reshape(
            positions.shape
        )


class CannotBePickled(Wrong):
    def __init__(self):
        super().__init__()
        self.key = lambda: 0


class SaysThatPairsStayTogether(Wrong):
    n_together = 2


class TakesAnyRows(Wrong):
    """Asks for the last rows, whether there are so many or not."""


WRONG = {
    RepeatsARow: "test_every_row_as_often_as_declared",
    GoesBeyond: "test_every_row_as_often_as_declared",
    CountsWrong: "test_every_row_as_often_as_declared",
    RemembersCalls: "test_any_positions_at_any_time",
    LooksAtItsNeighbours: "test_any_positions_at_any_time",
    WritesIntoPositions: "test_any_positions_at_any_time",
    GivesSmallIntegers: "test_any_positions_at_any_time",
    IsTheSameInEveryEpoch: "test_the_order_depends_on_seed_and_epoch_alone",
    DrawsFromAGenerator: "test_the_order_depends_on_seed_and_epoch_alone",
    KeepsTwoNumbersARow: "test_memory",
    KeepsPythonObjects: "test_memory",
    CannotBePickled: "test_any_positions_at_any_time",
    SaysThatPairsStayTogether: "test_what_stays_together",
    TakesAnyRows: "test_rows_that_are_not_there",
}


SLOW: dict[Any, Any] = {KeepsPythonObjects: pytest.mark.slow}  # each object is traced


@pytest.mark.parametrize(
    ("wrong", "test"),
    [
        pytest.param(wrong, test, id=wrong.__name__, marks=SLOW.get(wrong, ()))
        for wrong, test in WRONG.items()
    ],
)
def test_the_suite_finds_a_strategy_that(wrong, test):
    def cases(n_rows):
        rows = np.arange(n_rows) if wrong is TakesAnyRows else None
        made = st.builds(wrong)
        return st.builds(StrategyCase, strategy=made, n_rows=st.just(n_rows), rows=st.just(rows))

    # The second where none was raised.
    errors: tuple[type[BaseException], ...] = (AssertionError, pytest.fail.Exception)
    if wrong is CannotBePickled:
        errors = (AttributeError, pickle.PicklingError)
    with pytest.raises(errors):
        getattr(StrategyConformance(), test)(cases)
