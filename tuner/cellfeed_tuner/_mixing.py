"""How the labels of a collection are mixed in the minibatches of plans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, SamplingStrategy
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._conditional_entropy import (
    Conditional,
    random_conditional_entropy_bits,
)
from cellfeed_tuner._entropy._epoch_course import LEAST_MINIBATCHES, EpochCourse, entropy_over_epoch
from cellfeed_tuner._entropy._label_counts import LabelCounts, RandomOfKnown, count_labels
from cellfeed_tuner._entropy._label_entropy import LabelEntropy, LabelReplay
from cellfeed_tuner._entropy._plan_replay import effective_block_size
from cellfeed_tuner._entropy._storage_order import StorageOrder, order_of_replayed
from cellfeed_tuner._entropy._strategy_entropy import has_random_blocks
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._results._configuration_result import (
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._results._recommended import least_share
from cellfeed_tuner._verdicts._judge import Judge
from cellfeed_tuner._verdicts._verdict import Verdict, convicted

__all__ = ["Label", "Mixing"]

# Rows of a plan that entropy is taken of, at first and at most: four times as many again and again
# as long as the interval holds the floor.
_FEWEST_ROWS, _MOST_ROWS = 1 << 18, 1 << 22
# And of a plan of random sets, which others are held against.
_ROWS_OF_SETS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """An obs column.

    Parameters
    ----------
    name
        Of the column.
    codes
        Code of each cell's value in the order of storage, -1 where missing, shape (n_cells,): of
        those that are visited, or, where there is a strategy, of all of the collection.
    counted
        How often each occurs among those that are visited.
    drawn
        How often an epoch of the strategy draws each; as often as it occurs if None.
    """

    name: str
    codes: NDArray[np.integer]
    counted: LabelCounts
    drawn: LabelCounts | None = None

    @classmethod
    def of(
        cls,
        collection: Collection | Selected,
        name: str,
        drawn_rows: NDArray[np.int64] | None = None,
    ) -> "Label":
        """Return a column of a collection, or of the rows of it that are visited.

        Parameters
        ----------
        collection
            What has the column.
        name
            Of the column.
        drawn_rows
            What `Selected.drawn_rows` gives, where there is a strategy.

        Raises
        ------
        ColumnError
            The collection was opened without it.
        """
        selected = Selected.of(collection)
        codes = selected.codes(name)
        counted = count_labels(codes)
        if drawn_rows is None:
            return cls(name, codes, counted)
        codes = Selected(selected.collection).codes(name)
        drawn, times = count_labels(codes[drawn_rows]), selected.rows_per_drawn
        return cls(name, codes, counted, LabelCounts(drawn.counts * times, drawn.n_missing * times))

    @property
    def target(self) -> LabelCounts:
        """How often minibatches would have each if their cells were drawn at random."""
        return self.counted if self.drawn is None else self.drawn


class _RandomOf(NamedTuple):
    """Stands for random samples that have as many labelled cells as minibatches have."""

    label: str


class _Bounds(TypedDict):
    """What theory says of a label."""

    homogeneous: float | None
    lower_bound: float
    upper_bound: float


# None stands for the first label given the other.
_Replayed = Mapping[str | _RandomOf | None, LabelEntropy]


class Mixing:
    """Replays plans over labels, and holds what is measured against that.

    A plan is replayed when something of it is asked for first: for a whole grid by `replay`, with
    its progress, or one by one.

    Parameters
    ----------
    labels
        What minibatches are to be mixed by, the first label first.
    given
        What the first label is to be mixed within, or None.
    batch_size
        Cells of a minibatch.
    seed
        Seed of the plans.
    entropy_floor
        Share of random sampling's entropy that configurations must reach. What is near it is
        replayed for longer, so that which do hardly hangs on the seed.
    selected
        What is visited, where there is a strategy; in shuffled blocks if None.
    drawn_rows
        What `Selected.drawn_rows` gives, likewise.
    """

    def __init__(
        self,
        labels: Sequence[Label],
        given: Label | None,
        *,
        batch_size: int,
        seed: int,
        entropy_floor: float,
        selected: Selected | None = None,
        drawn_rows: NDArray[np.int64] | None = None,
    ) -> None:
        strategy_of: Callable[[int], SamplingStrategy] = BlockShuffling
        if selected is not None:
            strategy_of = lru_cache(maxsize=2)(selected.blocks)  # which may take long to make
        self._has_theory = has_random_blocks(strategy_of(1))
        self._is_of_sets = strategy_of(1).n_together > 1
        self._labels = labels
        self._given = given
        self._batch_size = batch_size
        replayed: dict[str | _RandomOf | None, ArrayLike | Conditional | RandomOfKnown] = {
            each.name: each.codes for each in labels
        }
        replayed |= {
            _RandomOf(each.name): RandomOfKnown(each.codes, each.target.counts)
            for each in labels
            if self._depends_on_known(each)
        }
        if given is not None:
            replayed[None] = Conditional(labels[0].codes, given.codes)
        self._least_share = least_share(entropy_floor)
        self._replay = LabelReplay(
            replayed, batch_size=batch_size, seed=seed, strategy_of=strategy_of
        )
        self._random, self._random_within = self._random_bits(drawn_rows)
        self._plan, self._replayed = self._replay.plan, cache(self._replayed_until_clear)
        self._entropies = cache(self._entropies_of)
        in_blocks = None if selected is None else selected.rows_in_blocks
        self._judges = {
            each.name: Judge(each.codes, each.target, batch_size, in_blocks) for each in labels
        }

    def __getitem__(self, sizes: tuple[int, int]) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first first, at (block size, fetch factor)."""
        return self._entropies(*sizes)

    def _depends_on_known(self, label: Label) -> bool:
        """Return whether what a label is held against depends on how many cells have one."""
        return bool(label.target.n_missing) and not self._is_of_sets

    def _random_bits(self, drawn_rows: NDArray[np.int64] | None) -> tuple[dict[str, float], float]:
        """Return what labels are held against, and the first within the other.

        Random sets come from the plan of single cells: it shuffles sets as a whole.
        """
        first, within, batch_size = self._labels[0], self._given, self._batch_size
        if self._is_of_sets:
            found = self._replay.of(1, 1, n_rows=_ROWS_OF_SETS)
            random = {each.name: found[each.name].bits.value for each in self._labels}
            return random, 0.0 if within is None else found[None].bits.value
        random = {each.name: each.target.random_entropy_bits(batch_size) for each in self._labels}
        if within is None:
            return random, 0.0
        codes, given = first.codes, within.codes
        if drawn_rows is not None:
            codes, given = codes[drawn_rows], given[drawn_rows]
        return random, random_conditional_entropy_bits(codes, given, batch_size)

    def replay(self, grid: Iterable[Configuration], on_progress: Progress) -> None:
        """Replay the plans of a whole grid.

        Parameters
        ----------
        grid
            The configurations.
        on_progress
            Called with how far the replay has come.
        """
        pairs = dict.fromkeys((each.block_size, each.fetch_factor) for each in grid)
        for number, pair in enumerate(pairs):
            self._replayed(*pair)
            on_progress("entropy", number + 1, len(pairs))

    def storage_order(self, block_size: int) -> StorageOrder | None:
        """Return the storage order by the first label that is not shuffled, if there is one.

        Parameters
        ----------
        block_size
            The largest that is of interest.

        Returns
        -------
        None where the strategy does not visit blocks in random order, which would show it.
        """
        if not self._has_theory:
            return None
        orders = [self._order(each, block_size) for each in self._labels]
        return next((each for each in orders if not each.already_shuffled), orders[0])

    def judged(
        self, result: ConfigurationResult, fault: str | None, within: Estimate | None
    ) -> ConfigurationResult:
        """Return a result with a verdict on each label, and the conditional entropy.

        Parameters
        ----------
        result
            What was measured.
        fault
            Where its minibatches were not those of the plan, in words; None if they all were.
        within
            Measured entropy of the first label within the other; None if there is none.
        """
        configuration = result.configuration
        first = self._labels[0].name
        return replace(
            result,
            verdict=self._verdict(first, result.entropy_bits, result, fault),
            further_labels={
                name: LabelResult(
                    entropy_bits=each.entropy_bits,
                    verdict=self._verdict(name, each.entropy_bits, result, fault),
                )
                for name, each in result.further_labels.items()
            },
            conditional_entropy_bits=self._within(configuration, within),
        )

    def over_epoch(self, configuration: Configuration) -> dict[str, EpochCourse]:
        """Return each label's entropy over an epoch; nothing where that is too short."""
        plan = self._plan(configuration.block_size, configuration.fetch_factor)
        if plan.n_delivered // plan.batch_size < LEAST_MINIBATCHES:
            return {}
        return {each.name: entropy_over_epoch(each.codes, plan) for each in self._labels}

    def _replayed_until_clear(self, block_size: int, fetch_factor: int) -> _Replayed:
        n_rows = _FEWEST_ROWS
        while True:
            found = self._replay.of(block_size, fetch_factor, n_rows=n_rows)
            if n_rows >= _MOST_ROWS or not any(self._is_near_floor(found, e) for e in self._labels):
                return found
            n_rows *= 4

    def _is_near_floor(self, replayed: _Replayed, label: Label) -> bool:
        bits, random = replayed[label.name].bits, self._random[label.name]
        if self._depends_on_known(label):
            random = replayed[_RandomOf(label.name)].bits.value
        return bits.low <= self._least_share * random <= bits.high

    def _entropies_of(self, block_size: int, fetch_factor: int) -> dict[str, EntropyBits]:
        replayed = self._replayed(block_size, fetch_factor)
        return {
            each.name: EntropyBits(
                measured=None,
                expected=replayed[each.name].bits,
                **self._bounds(each.target, block_size, fetch_factor),
                random=self._random[each.name],
                random_of_known=self._random_of_known(each, block_size, fetch_factor),
            )
            for each in self._labels
        }

    def _bounds(self, drawn: LabelCounts, block_size: int, fetch_factor: int) -> _Bounds:
        if not self._has_theory:
            return {"homogeneous": None, "lower_bound": 0.0, "upper_bound": 0.0}
        counts, batch_size = drawn.counts, self._batch_size
        plan = self._replay.plan(block_size, fetch_factor)
        effective = effective_block_size(plan.strategy, plan.n_rows)
        return {
            "homogeneous": theory.expected_entropy_bits(
                counts, batch_size, effective, fetch_factor
            ),
            "lower_bound": theory.lower_bound_bits(counts, batch_size, effective),
            "upper_bound": theory.upper_bound_bits(counts, batch_size),
        }

    def _random_of_known(self, label: Label, block_size: int, fetch_factor: int) -> float | None:
        if not self._depends_on_known(label):
            return None
        return self._replayed(block_size, fetch_factor)[_RandomOf(label.name)].bits.value

    def _within(
        self, configuration: Configuration, measured: Estimate | None
    ) -> ConditionalEntropyBits | None:
        if self._given is None:
            return None
        replayed = self._replayed(configuration.block_size, configuration.fetch_factor)
        return ConditionalEntropyBits(
            given=self._given.name,
            measured=measured,
            expected=replayed[None].bits,
            random=self._random_within,
        )

    def _order(self, label: Label, block_size: int) -> StorageOrder:
        return order_of_replayed(
            self._replayed(block_size, 1)[label.name],
            self._replayed(1, 1)[label.name],
            random_bits=max(
                self._random[label.name], self._random_of_known(label, block_size, 1) or 0.0
            ),
            n_distinct=label.target.n_rows // self._batch_size,
        )

    def _verdict(
        self, name: str, bits: EntropyBits, result: ConfigurationResult, fault: str | None
    ) -> Verdict | None:
        if fault is not None:
            return convicted(fault)
        if result.cells_per_second is None or bits.measured is None or not self._has_theory:
            return None
        configuration = result.configuration
        planned = self._replayed(configuration.block_size, configuration.fetch_factor)[name]
        # The first round counts here too.
        n_rounds = result.n_rounds + 1
        return self._judges[name].verdict(configuration, planned, bits.measured, n_rounds)
