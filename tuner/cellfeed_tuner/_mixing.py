"""How the labels of a collection are mixed in the minibatches of plans."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import Collection, SamplingStrategy
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import MIXING_ROWS, MIXING_ROWS_OF_SETS, MOST_MIXING_ROWS
from cellfeed_tuner._entropy._conditional_entropy import (
    Conditional,
    random_conditional_entropy_bits,
)
from cellfeed_tuner._entropy._label_counts import LabelCounts, RandomOfKnown, count_labels
from cellfeed_tuner._entropy._label_entropy import LabelEntropy, LabelReplay, shuffled_blocks
from cellfeed_tuner._entropy._plan_replay import effective_block_size, has_random_blocks
from cellfeed_tuner._entropy._storage_order import StorageOrder, storage_order
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._measuring._selected import Selected
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._results._configuration_result import (
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    Verdict,
)
from cellfeed_tuner._results._recommended import least_share
from cellfeed_tuner._verdicts import Judge, convicted

__all__ = ["Label", "Mixing"]


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """An obs column.

    Parameters
    ----------
    codes
        Code of each cell's value in the order of storage, -1 where missing, shape (n_cells,): of
        those that are visited, or, where `Mixing` has a selection, of all of the collection.
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
        """Return a column of a collection, or of the rows of it that are visited."""
        selected = Selected.of(collection)
        visited = selected.codes(name)
        counted = count_labels(visited)
        if drawn_rows is None:
            return cls(name, visited, counted)
        codes = Selected(selected.collection).codes(name)
        if selected.strategy is None:
            return cls(name, codes, counted)
        drawn, times = count_labels(codes[drawn_rows]), selected.rows_per_drawn
        return cls(name, codes, counted, LabelCounts(drawn.counts * times, drawn.n_missing * times))

    @property
    def target(self) -> LabelCounts:
        """How often minibatches would have each if their cells were drawn at random."""
        return self.counted if self.drawn is None else self.drawn


class _RandomOf(NamedTuple):
    """Stands for random samples that have as many labelled cells as minibatches have."""

    label: str


class _Settings(NamedTuple):
    """What plans of a collection depend on."""

    block_size: int
    fetch_factor: int
    align: Any

    @classmethod
    def of(cls, plan_settings: tuple[Any, ...]) -> "_Settings":
        """Return those of `Configuration.plan_settings`; what else varies mixes nothing."""
        block_size, fetch_factor, *others = plan_settings
        return cls(block_size, fetch_factor, dict(others).get("align"))


# None stands for the first label given the other.
_Replayed = Mapping[str | _RandomOf | None, LabelEntropy]


class Mixing:
    """Replays plans over labels, and holds what is measured against that.

    A plan is replayed when something of it is asked for first: for a whole grid by `replay`, with
    its progress, or one by one.

    Parameters
    ----------
    labels, given
        What minibatches are to be mixed by, and what the first label is to be mixed within.
    entropy_floor
        Share of random sampling's entropy that configurations must reach. What is near it is
        replayed for longer, so that which do hardly hangs on the seed.
    selected, drawn_rows
        What is visited, and what `Selected.drawn_rows` gives, where there is a strategy, or blocks
        may be aligned; in shuffled blocks if None.
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
        strategy_of: Callable[[int, Any], SamplingStrategy] = shuffled_blocks
        if selected is not None:  # strategies may take long to make
            aligned = cache(selected.aligned)
            strategy_of = lru_cache(4)(lambda size, align: aligned(align).blocks(size))
        self._has_theory = has_random_blocks(strategy_of(1, None))
        self._is_of_sets = strategy_of(1, None).n_together > 1
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
        self._replayed = cache(self._replayed_until_clear)
        self._entropies = cache(
            lambda settings: {each.name: self._entropy_of(each, settings) for each in labels}
        )
        self._selected, self._judges = selected, cache(self._judges_of)

    def __getitem__(self, plan_settings: tuple[Any, ...]) -> Mapping[str, EntropyBits]:
        """Return the entropy of each label, the first first, at `Configuration.plan_settings`."""
        return self._entropies(_Settings.of(plan_settings))

    def replay(self, grid: Iterable[Configuration], on_progress: Progress) -> None:
        """Replay the plans of a whole grid, and tell how far that has come."""
        plans = dict.fromkeys(_Settings.of(each.plan_settings) for each in grid)
        for number, settings in enumerate(plans):
            self._replayed(settings)
            on_progress("entropy", number + 1, len(plans))

    def storage_order(self, block_size: int) -> StorageOrder | None:
        """Return the storage order by the first label that is not shuffled, if there is one.

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

        ``fault`` says where minibatches were not those of the plan, and ``within`` is the measured
        entropy of the first label within the other; None where there is none.
        """
        first = self._labels[0].name
        conditional = None
        if self._given is not None:
            replayed = self._replayed(_Settings.of(result.configuration.plan_settings))
            conditional = ConditionalEntropyBits(
                given=self._given.name,
                measured=within,
                expected=replayed[None].bits,
                random=self._random_within,
            )
        return replace(
            result,
            verdict=self._verdict(first, result.entropy_bits, result, fault),
            further_labels={
                name: replace(each, verdict=self._verdict(name, each.entropy_bits, result, fault))
                for name, each in result.further_labels.items()
            },
            conditional_entropy_bits=conditional,
        )

    def _depends_on_known(self, label: Label) -> bool:
        """Return whether what a label is held against depends on how many cells have one."""
        return bool(label.target.n_missing) and not self._is_of_sets

    def _random_bits(self, drawn_rows: NDArray[np.int64] | None) -> tuple[dict[str, float], float]:
        """Return what labels are held against, and the first within the other.

        Random sets come from the plan of single cells: it shuffles sets as a whole.
        """
        first, within, batch_size = self._labels[0], self._given, self._batch_size
        if self._is_of_sets:
            found = self._replay.of(1, 1, n_rows=MIXING_ROWS_OF_SETS)
            random = {each.name: found[each.name].bits.value for each in self._labels}
            return random, 0.0 if within is None else found[None].bits.value
        random = {each.name: each.target.random_entropy_bits(batch_size) for each in self._labels}
        if within is None:
            return random, 0.0
        codes, given = first.codes, within.codes
        if drawn_rows is not None:
            codes, given = codes[drawn_rows], given[drawn_rows]
        return random, random_conditional_entropy_bits(codes, given, batch_size)

    def _replayed_until_clear(self, settings: _Settings) -> _Replayed:
        n_rows = MIXING_ROWS
        while True:
            found = self._replay.of(*settings, n_rows=n_rows)
            near = any(self._is_near_floor(found, each) for each in self._labels)
            if n_rows >= MOST_MIXING_ROWS or not near:
                return found
            n_rows *= 4

    def _is_near_floor(self, replayed: _Replayed, label: Label) -> bool:
        bits, random = replayed[label.name].bits, self._random[label.name]
        if self._depends_on_known(label):
            random = replayed[_RandomOf(label.name)].bits.value
        return bits.low <= self._least_share * random <= bits.high

    def _entropy_of(self, label: Label, settings: _Settings) -> EntropyBits:
        bits = EntropyBits(
            expected=self._replayed(settings)[label.name].bits,
            random=self._random[label.name],
            random_of_known=self._random_of_known(label, settings),
        )
        if not self._has_theory:
            return bits
        counts, batch_size = label.target.counts, self._batch_size
        plan = self._replay.plan(*settings)
        block_size = effective_block_size(plan.strategy, plan.n_rows)
        return replace(
            bits,
            homogeneous=theory.expected_entropy_bits(
                counts, batch_size, block_size, settings.fetch_factor
            ),
            lower_bound=theory.lower_bound_bits(counts, batch_size, block_size),
            upper_bound=theory.upper_bound_bits(counts, batch_size),
        )

    def _random_of_known(self, label: Label, settings: _Settings) -> float | None:
        if not self._depends_on_known(label):
            return None
        return self._replayed(settings)[_RandomOf(label.name)].bits.value

    def _verdict(
        self, name: str, bits: EntropyBits, result: ConfigurationResult, fault: str | None
    ) -> Verdict | None:
        if fault is not None:
            return convicted(fault)
        if result.cells_per_second is None or bits.measured is None or not self._has_theory:
            return None
        configuration = result.configuration
        settings = _Settings.of(configuration.plan_settings)
        planned, judge = self._replayed(settings)[name], self._judges(settings.align)[name]
        # The first round counts here too.
        return judge.verdict(configuration, planned, bits, result.n_rounds + 1)

    def _judges_of(self, align: Any) -> dict[str, Judge]:
        selected = self._selected
        in_blocks = None if selected is None else selected.aligned(align).rows_in_blocks
        return {
            each.name: Judge(each.codes, each.target, self._batch_size, in_blocks)
            for each in self._labels
        }

    def _order(self, label: Label, block_size: int) -> StorageOrder:
        in_blocks, single_rows = _Settings(block_size, 1, None), _Settings(1, 1, None)
        return storage_order(
            self._replayed(in_blocks)[label.name],
            self._replayed(single_rows)[label.name],
            random_bits=max(
                self._random[label.name], self._random_of_known(label, in_blocks) or 0.0
            ),
            n_distinct=label.target.n_rows // self._batch_size,
        )
