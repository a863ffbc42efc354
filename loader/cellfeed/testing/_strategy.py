# ruff: noqa: S101 - a suite asserts
"""Tests of the contract of sampling strategies."""

import gc
import pickle
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellfeed._errors import ParameterError
from cellfeed.sampling import EpochPlan, Fetch, Progress, SamplingStrategy
from cellfeed.testing._source import for_all

_N_OF_LARGE = 1 << 18  # rows: as int64, they take 2 MiB
_SMALL_BYTES = 1 << 19  # what may be held or used that does not grow with rows
_SMALL_OBJECTS = 2000

_keys = st.integers(0, (1 << 64) - 1)
_seeds = st.integers(0, 1 << 70)
_epochs = st.integers(0, 1 << 20)


@dataclass(frozen=True, kw_only=True)
class StrategyCase:
    """A strategy, and its expected results.

    Parameters
    ----------
    strategy
        The strategy.
    n_rows
        Number of rows of the collection.
    rows
        The rows that it may visit, int64, ascending; all if None.
    n_positions
        Number of rows that an epoch visits; the number of allowed rows if None.
    is_repeating
        Whether an epoch may visit a row more than once. If not, and ``n_positions`` is None, it
        visits every allowed row exactly once.
    is_random
        Whether epochs differ.
    is_match
        For a strategy with controls or other companions: a function of rows, shape (n,), and of
        theirs, shape (n, n_companions), which returns whether each of these may belong to its row.
    """

    strategy: SamplingStrategy
    n_rows: int
    rows: NDArray[np.int64] | None = None
    n_positions: int | None = None
    is_repeating: bool = False
    is_random: bool = True
    is_match: Callable[[NDArray[np.int64], NDArray[np.int64]], NDArray[np.bool_]] | None = None

    @property
    def available(self) -> NDArray[np.int64]:
        """The rows that may be visited, int64, ascending."""
        return np.arange(self.n_rows) if self.rows is None else self.rows

    @property
    def n_visited(self) -> int:
        """Expected number of rows that an epoch visits."""
        return self.available.size if self.n_positions is None else self.n_positions

    def epoch(self, epoch_key: int) -> NDArray[np.int64]:
        """Return all rows of an epoch, by positions."""
        return self.rows_at(np.arange(self.strategy.n_positions(self.n_rows)), epoch_key)

    def rows_at(self, positions: NDArray[np.int64], epoch_key: int) -> NDArray[np.int64]:
        """Return the rows at the given positions of a newly prepared epoch."""
        return self.strategy.epoch_order(n_rows=self.n_rows, epoch_key=epoch_key)(positions)


Cases = Callable[[int], st.SearchStrategy[StrategyCase]]


class StrategyConformance:
    """Tests that every sampling strategy must pass; a subclass inherits them and supplies cases.

    A subclass supplies the fixture ``cases``, which returns a function from a number of rows to a
    hypothesis strategy of `StrategyCase`. The same cases are drawn in each run.

    Attributes
    ----------
    max_examples
        Maximum number of cases that each test tries; a hypothesis profile may lower it.

    Examples
    --------
    >>> from hypothesis import strategies as st
    >>> from cellfeed import BlockShuffling
    >>> class TestBlockShuffling(StrategyConformance):
    ...     @pytest.fixture
    ...     def cases(self):
    ...         def cases(n_rows):
    ...             strategies = st.builds(BlockShuffling, block_size=st.integers(1, 30))
    ...             return st.builds(StrategyCase, strategy=strategies, n_rows=st.just(n_rows))
    ...
    ...         return cases
    """

    max_examples: int = 100

    def test_every_row_as_often_as_declared(self, cases: Cases) -> None:
        """Every row comes once, unless the case allows rows to be left out or repeated."""

        def check(case: StrategyCase, epoch_key: int) -> None:
            n_positions = case.strategy.n_positions(case.n_rows)
            assert isinstance(n_positions, int)
            assert n_positions == case.n_visited
            rows = case.epoch(epoch_key)
            assert rows.shape == (n_positions,)
            assert np.isin(rows, case.available).all()
            if not case.is_repeating:
                assert np.unique(rows).size == rows.size

        self._try(check, case=_small(cases), epoch_key=_keys)

    def test_any_positions_at_any_time(self, cases: Cases) -> None:
        """Any positions, in any shape, order and number, in any epoch, also of a pickled copy."""

        def check(case: StrategyCase, epoch_key: int, data: st.DataObject) -> None:
            every = case.epoch(epoch_key)
            prepared = case.strategy.epoch_order(n_rows=case.n_rows, epoch_key=epoch_key)
            copy = replace(case, strategy=pickle.loads(pickle.dumps(case.strategy)))  # noqa: S301 - our own
            some = st.lists(st.integers(0, every.size - 1), max_size=24) if every.size else _NONE
            for drawn in data.draw(st.lists(some, min_size=1, max_size=4)):
                positions = np.array(drawn, np.int64)
                if data.draw(st.booleans()):
                    positions = positions[: positions.size // 2 * 2].reshape(2, -1)
                before, expected = positions.tolist(), every[positions].tolist()
                for rows in (prepared(positions), copy.rows_at(positions, epoch_key)):
                    assert positions.tolist() == before, "positions were modified"
                    assert rows.dtype == np.int64
                    assert rows.tolist() == expected

        self._try(check, case=_small(cases), epoch_key=_keys, data=st.data())

    def test_the_order_depends_on_seed_and_epoch_alone(self, cases: Cases) -> None:
        """The same seed and epoch give the same order; others differ, if the case is random."""

        def check(case: StrategyCase, seed: int, epoch: int) -> None:
            plan = _plan(case, batch_size=8, fetch_factor=8, seed=seed, epoch=epoch)
            order = _delivered(plan)
            assert _delivered(replace(plan)) == order
            others = [replace(plan, epoch=epoch + k) for k in range(1, 5)]
            others += [replace(plan, seed=seed + k) for k in range(1, 5)]
            orders = {tuple(_delivered(other)) for other in others}
            if not case.is_random:
                assert orders == {tuple(order)}
            elif case.n_visited >= 20:  # noqa: PLR2004 - enough to have many orders
                assert len(orders | {tuple(order)}) > 1

        self._try(check, case=_small(cases, least=60), seed=_seeds, epoch=_epochs)

    def test_what_stays_together(self, cases: Cases) -> None:
        """Rows that a strategy keeps together stay together, for any fetches and ranks."""

        def check(plan: EpochPlan) -> None:
            together = plan.strategy.n_together
            assert plan.strategy.n_positions(plan.n_rows) % together == 0
            alone = replace(plan, rank=0, world_size=1, drop_last=False)
            sets = Counter(_in_sets(alone))
            one_fetch = replace(alone, batch_size=together, fetch_factor=1)
            assert Counter(_in_sets(one_fetch)) == sets
            for rank in range(plan.world_size):
                assert set(_in_sets(replace(plan, rank=rank))) <= set(sets)
            if together > 1:
                with pytest.raises(ParameterError, match="multiple"):
                    replace(plan, batch_size=plan.batch_size + 1)

        self._try_plans(cases, check)

    def test_others(self, cases: Cases) -> None:
        """What comes with a row matches it, and is the same on any rank and after any stop."""

        def check(case: StrategyCase, parameters: dict[str, Any], data: st.DataObject) -> None:
            plan, n = _plan(case, **parameters), case.strategy.n_companions
            alone = replace(plan, rank=0, world_size=1, drop_last=False)
            if not n or not alone.n_fetches:
                assert all(alone.fetch(k).companions is None for k in range(alone.n_fetches))
                return
            pairs = Counter(_with_companions(alone))
            rows, companions = (np.array(each) for each in zip(*pairs, strict=True))
            assert case.is_match is not None, "the case has no `is_match`"
            assert companions.shape == (rows.size, n)
            assert case.is_match(rows, companions).all()
            for rank in range(plan.world_size):
                assert set(_with_companions(replace(plan, rank=rank))) <= set(pairs)
            n_done = data.draw(st.integers(0, alone.n_minibatches - 1))
            left = Counter(
                _with_companions(replace(alone, after=(Progress(n_minibatches=n_done),)))
            )
            share = alone.share(n_delivered=n_done)
            assert left == Counter(pair for k in share.numbers for pair in _pairs(share.fetch(k)))

        self._try(check, case=_small(cases), parameters=_PARAMETERS, data=st.data())

    def test_memory(self, cases: Cases) -> None:
        """No Python object per row; an epoch keeps no more than a row number for each row."""

        def check(case: StrategyCase) -> None:
            plan = _plan(case, batch_size=16, fetch_factor=8)
            _plan(case, batch_size=16, fetch_factor=8).fetch(0)  # which loads compiled code
            tracemalloc.start()
            try:
                for number in (plan.n_fetches - 1, plan.n_fetches // 2):
                    plan.fetch(number)
                held, _ = tracemalloc.get_traced_memory()
                allocated = tracemalloc.take_snapshot().statistics("filename")
                n_objects = sum(each.count for each in allocated)
                del allocated
                tracemalloc.reset_peak()
                plan.fetch(0)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            most = 8 * case.n_rows + _SMALL_BYTES
            assert held <= most, "an epoch keeps more than 8 bytes for each row"
            assert n_objects < _SMALL_OBJECTS, "Python objects that grow with rows"
            assert peak - held < _SMALL_BYTES, "the memory of a fetch grows with rows"

        gc.collect()
        # Tracing makes Python slow.
        for_all(check, max_examples=min(5, self.max_examples), case=cases(_N_OF_LARGE))

    def test_rows_that_are_not_there(self, cases: Cases) -> None:
        """A collection with fewer rows than the strategy visits is refused, in one line."""

        def check(case: StrategyCase) -> None:
            if case.rows is None or case.rows[-1] == 0:
                return
            with pytest.raises(ParameterError) as raised:
                case.strategy.n_positions(int(case.rows[-1]))
            assert "\n" not in str(raised.value)

        self._try(check, case=_small(cases))

    def _try(self, check: Callable[..., None], **drawn: st.SearchStrategy[Any]) -> None:
        for_all(check, max_examples=self.max_examples, **drawn)

    def _try_plans(
        self, cases: Cases, check: Callable[..., None], **drawn: st.SearchStrategy[Any]
    ) -> None:
        plans = st.builds(
            lambda case, parameters: _plan(case, **parameters), _small(cases), _PARAMETERS
        )
        self._try(check, plan=plans, **drawn)


_NONE = st.just(list[int]())
_PARAMETERS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 30),
        "fetch_factor": st.integers(1, 5),
        "drop_last": st.booleans(),
        "seed": _seeds,
        "epoch": _epochs,
        "world_size": st.integers(1, 5),
    }
)


def _small(cases: Cases, *, least: int = 1) -> st.SearchStrategy[StrategyCase]:
    return st.integers(least, 150).flatmap(cases)


def _plan(case: StrategyCase, **parameters: Any) -> EpochPlan:
    parameters["batch_size"] *= case.strategy.n_together
    return EpochPlan(strategy=case.strategy, n_rows=case.n_rows, **parameters)


def _delivered(plan: EpochPlan) -> list[int]:
    return [row for k in range(plan.n_fetches) for row in plan.delivered_rows(k)[0].tolist()]


def _with_companions(plan: EpochPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [pair for k in range(plan.n_fetches) for pair in _pairs(plan.fetch(k))]


def _pairs(fetch: Fetch) -> list[tuple[int, tuple[int, ...]]]:
    """Return each delivered row with its companions."""
    assert fetch.companions is not None
    rows, companions = fetch.rows[fetch.order], fetch.rows[fetch.companions]
    return list(zip(rows.tolist(), map(tuple, companions.tolist()), strict=True))


def _in_sets(plan: EpochPlan) -> list[tuple[int, ...]]:
    rows = np.array(_delivered(plan), np.int64).reshape(-1, plan.strategy.n_together)
    return [tuple(each) for each in rows.tolist()]
