"""Plans: which rows are in which minibatch, where it is known without reading."""

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
        Rows that an epoch delivers; None if each row is delivered once.
    """

    batch_size: int
    has_theory = is_of_sets = False
    drawn_rows: NDArray[np.int64] | None = None

    @abstractmethod
    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of minibatches over so many rows of a plan; None without a plan."""

    def differing(self, settings: Settings) -> Settings:
        """Return the settings that plans depend on."""
        return settings

    def block_size(self, settings: Settings) -> float:
        """Return the effective block size; see `theory`."""
        size: int = settings[0]
        return size

    def rows_in_blocks(self, settings: Settings) -> Callable[[int], NDArray[np.int64]] | None:  # noqa: ARG002
        """Return a function that gives rows block after block; None for the order of storage."""
        return None


class BlockPlans(Plans):
    """Plans of cellfeed's own loader.

    Parameters
    ----------
    n_rows
        Rows with labels.
    selected, drawn_rows
        The visited rows, and `Selected.drawn_rows`, if there is a strategy or blocks may be
        aligned; None for all rows in shuffled blocks.
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
        # Making a strategy may take long.
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
        """Return statistics of minibatches over so many rows of a plan."""
        return replay_plan(self._plan(settings), statistics, n_rows=n_rows)

    def block_size(self, settings: Settings) -> float:
        """Return the effective block size; see `theory`."""
        return effective_block_size(self._plan(settings).strategy, self._n_rows)

    def rows_in_blocks(self, settings: Settings) -> Callable[[int], NDArray[np.int64]] | None:
        """Return a function that gives rows block after block; None for the order of storage."""
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
    """Plans of another loader, if it has any."""

    def __init__(self, tunable: Tunable) -> None:
        self.batch_size, self._tunable = tunable.batch_size, tunable

    def replay(
        self, settings: Settings, statistics: Sequence[Statistic], *, n_rows: int
    ) -> list[PlanReplay] | None:
        """Return statistics of minibatches over so many rows of a plan; None without a plan."""
        block_size, fetch_factor, *others = settings
        configuration = Configuration(
            block_size=block_size, fetch_factor=fetch_factor, **dict(others)
        )
        what = f"`planned_rows` of {self._tunable.name}"
        try:
            planned = self._tunable.planned_rows(configuration, max(1, n_rows // self.batch_size))
        except Exception as error:
            said = " ".join(f"{type(error).__name__} {error}".split())
            msg = f"{what} failed for {configuration}: {said}"
            raise ParameterError(msg) from error
        if planned is None:
            return None
        rows = np.asarray(planned)
        is_whole = rows.shape == (len(rows), self.batch_size) and len(rows) > 0
        if not is_whole or rows.dtype.kind not in "iu":
            msg = (
                f"{what} must give integers of shape (n, {self.batch_size}), but gave {rows.dtype} "
                f"of shape {rows.shape}"
            )
            raise ParameterError(msg)
        low, high = int(rows.min()), int(rows.max())
        n_labelled = min(map(len, map(np.asarray, self._tunable.labels.values())), default=high + 1)
        if low < 0 or high >= n_labelled:
            msg = f"{what} must give rows from 0 to {n_labelled - 1:,}, but gave {low} to {high:,}"
            raise ParameterError(msg)
        return [PlanReplay.of(statistic(rows), fetch_factor) for statistic in statistics]


def _align(settings: Settings) -> Any:
    return dict(settings[2:]).get("align")
