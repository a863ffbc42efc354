"""Which rows come together in minibatches, where that is known without reading any."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import BlockShuffling, EpochPlan, ParameterError, SamplingStrategy
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._plan_replay import (
    PlanReplay,
    Statistic,
    effective_block_size,
    has_random_blocks,
    replay_plan,
)
from cellfeed_tuner._subject._selected import Selected
from cellfeed_tuner._subject._tunable import Tunable

__all__ = ["BlockPlans", "LoaderPlans", "Plans", "Settings"]

Settings = tuple[Any, ...]
"""As `Configuration.plan_settings`."""


class Plans(ABC):
    """Plans of a loader for any settings.

    Attributes
    ----------
    batch_size
        Rows of a minibatch.
    has_theory, is_of_sets
        Whether blocks come in random order, so that theory applies, and whether sets do.
    drawn_rows
        Rows that an epoch delivers; None if that is each once.
    """

    batch_size: int
    has_theory = is_of_sets = False
    drawn_rows: NDArray[np.int64] | None = None

    @abstractmethod
    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of the minibatches of a plan, over so many rows; None without one."""

    def differing(self, settings: Settings) -> Settings:
        """Return those settings that plans depend on."""
        return settings

    def block_size(self, settings: Settings) -> float:
        """Return the size that equal blocks would have; see theory."""
        size: int = settings[0]
        return size

    def rows_in_blocks(self, settings: Settings) -> Callable[[int], NDArray[np.int64]] | None:  # noqa: ARG002
        """Return what gives rows block after block; None if that is the order of storage."""
        return None


class BlockPlans(Plans):
    """Plans of cellfeed's own loader.

    Parameters
    ----------
    n_rows
        Rows that have labels.
    selected, drawn_rows
        What is visited, and what `Selected.drawn_rows` gives, where there is a strategy, or blocks
        may be aligned; all rows in shuffled blocks if None.
    """

    def __init__(
        self,
        n_rows: int,
        *,
        batch_size: int,
        seed: int,
        selected: Selected | None = None,
        drawn_rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.batch_size, self.drawn_rows = batch_size, drawn_rows
        self._n_rows, self._seed, self._selected = n_rows, seed, selected
        # Strategies may take long to make.
        self._aligned = cache(lambda align: None if selected is None else selected.aligned(align))
        self._strategy = lru_cache(4)(self._strategy_of)
        single = self._strategy(1, None)
        self.has_theory, self.is_of_sets = has_random_blocks(single), single.n_together > 1

    def differing(self, settings: Settings) -> Settings:
        """Return the block size, the fetch factor, and how blocks are aligned."""
        block_size, fetch_factor, *others = settings
        return block_size, fetch_factor, *(each for each in others if each[0] == "align")

    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay]:
        """Return statistics of the minibatches of a plan, over so many rows."""
        return replay_plan(self._plan(settings), statistics, n_rows=n_rows)

    def block_size(self, settings: Settings) -> float:
        """Return the size that equal blocks would have; see theory."""
        return effective_block_size(self._plan(settings).strategy, self._n_rows)

    def rows_in_blocks(self, settings: Settings) -> Callable[[int], NDArray[np.int64]] | None:
        """Return what gives rows block after block; None if that is the order of storage."""
        selected = self._aligned(_align(settings))
        return None if selected is None else selected.rows_in_blocks

    def _plan(self, settings: Settings) -> EpochPlan:
        return EpochPlan(
            strategy=self._strategy(settings[0], _align(settings)),
            n_rows=self._n_rows,
            batch_size=self.batch_size,
            fetch_factor=settings[1],
            seed=self._seed,
        )

    def _strategy_of(self, block_size: int, align: Any) -> SamplingStrategy:
        selected = self._aligned(align)
        return BlockShuffling(block_size) if selected is None else selected.blocks(block_size)


class LoaderPlans(Plans):
    """Plans of another loader, as far as it has any."""

    def __init__(self, tunable: Tunable) -> None:
        self.batch_size, self._tunable = tunable.batch_size, tunable

    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of the minibatches of a plan, over so many rows; None without one."""
        block_size, fetch_factor, *others = settings
        configuration = Configuration(
            block_size=block_size, fetch_factor=fetch_factor, **dict(others)
        )
        rows = self._tunable.planned_rows(configuration, max(1, n_rows // self.batch_size))
        if rows is None:
            return None
        if rows.shape != (len(rows), self.batch_size) or not len(rows):
            msg = (
                f"`planned_rows` of {self._tunable.name} must give rows of shape (n, "
                f"{self.batch_size}), but gave shape {rows.shape}"
            )
            raise ParameterError(msg)
        return [PlanReplay.of(statistic(rows), fetch_factor) for statistic in statistics]


def _align(settings: Settings) -> Any:
    return dict(settings[2:]).get("align")
