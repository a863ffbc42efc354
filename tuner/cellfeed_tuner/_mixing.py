"""How the labels of a collection are mixed in the minibatches of a grid's plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed import BlockShuffling, Collection, EpochPlan
from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._conditional_entropy import (
    Conditional,
    random_conditional_entropy_bits,
)
from cellfeed_tuner._entropy._epoch_course import LEAST_MINIBATCHES, EpochCourse, entropy_over_epoch
from cellfeed_tuner._entropy._grid_entropies import entropies_with_theory, replayed_entropies
from cellfeed_tuner._entropy._label_counts import LabelCounts, count_labels
from cellfeed_tuner._entropy._label_entropy import LabelEntropy
from cellfeed_tuner._entropy._storage_order import StorageOrder, order_of_replayed
from cellfeed_tuner._measuring._labels import label_codes
from cellfeed_tuner._progress import Progress
from cellfeed_tuner._result import (
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._verdicts._judge import Judge
from cellfeed_tuner._verdicts._verdict import Verdict, convicted

__all__ = ["Label", "Mixing"]

_Place = tuple[int, int]  # block size and fetch factor


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """An obs column.

    Parameters
    ----------
    name
        Of the column.
    codes
        Code of each cell's value in the order of storage, -1 where missing, shape (n_cells,).
    counted
        How often each occurs.
    """

    name: str
    codes: NDArray[np.integer]
    counted: LabelCounts

    @classmethod
    def of(cls, collection: Collection, name: str) -> "Label":
        """Return a column of a collection.

        Raises
        ------
        ColumnError
            The collection was opened without it.
        """
        codes = label_codes(collection, name)
        return cls(name, codes, count_labels(codes))


class Mixing:
    """Replays the plans of a grid over labels, and holds what is measured against that.

    Parameters
    ----------
    labels
        What minibatches are to be mixed by, the first label first.
    given
        What the first label is to be mixed within, or None.
    grid
        The configurations.
    batch_size
        Cells of a minibatch.
    seed
        Seed of the plans.
    on_progress
        Told how far the replay has come.
    """

    def __init__(
        self,
        labels: Sequence[Label],
        given: Label | None,
        grid: Sequence[Configuration],
        *,
        batch_size: int,
        seed: int,
        on_progress: Progress,
    ) -> None:
        self._labels = labels
        self._batch_size = batch_size
        self._seed = seed
        self._largest_block = max(each.block_size for each in grid)
        # None stands for the first label given the other.
        replayed: dict[str | None, ArrayLike | Conditional] = {
            each.name: each.codes for each in labels
        }
        if given is not None:
            replayed[None] = Conditional(labels[0].codes, given.codes)
        self._replayed = replayed_entropies(replayed, grid, batch_size, seed, on_progress)
        self._judges = {
            each.name: Judge(each.codes, each.counted, self._replayed[each.name], batch_size)
            for each in labels
        }
        self._conditional = {} if given is None else self._within(given)

    def entropies(self) -> Mapping[_Place, Mapping[str, EntropyBits]]:
        """Return the entropy of each label, the first first, by (block size, fetch factor)."""
        by_label = {
            each.name: entropies_with_theory(
                each.counted, self._replayed[each.name], self._batch_size
            )
            for each in self._labels
        }
        places = by_label[self._labels[0].name]
        return {
            place: {name: entropies[place] for name, entropies in by_label.items()}
            for place in places
        }

    def storage_order(self) -> StorageOrder:
        """Return the storage order by the first label that is not shuffled, if there is one."""
        orders = [self._order(each) for each in self._labels]
        return next((each for each in orders if not each.already_shuffled), orders[0])

    def judged(self, result: ConfigurationResult, fault: str | None) -> ConfigurationResult:
        """Return a result with a verdict on each label, and the conditional entropy.

        Parameters
        ----------
        result
            What was measured.
        fault
            Where its minibatches were not those of the plan, in words; None if they all were.
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
            conditional_entropy_bits=self._conditional.get(
                (configuration.block_size, configuration.fetch_factor)
            ),
        )

    def over_epoch(self, configuration: Configuration) -> dict[str, EpochCourse]:
        """Return each label's entropy over an epoch; nothing where that is too short."""
        plan = EpochPlan(
            strategy=BlockShuffling(block_size=configuration.block_size),
            n_rows=self._labels[0].codes.size,
            batch_size=self._batch_size,
            fetch_factor=configuration.fetch_factor,
            seed=self._seed,
        )
        if plan.n_delivered // plan.batch_size < LEAST_MINIBATCHES:
            return {}
        return {each.name: entropy_over_epoch(each.codes, plan) for each in self._labels}

    def _within(self, given: Label) -> dict[_Place, ConditionalEntropyBits]:
        random = random_conditional_entropy_bits(
            self._labels[0].codes, given.codes, self._batch_size
        )
        return {
            (each.block_size, each.fetch_factor): ConditionalEntropyBits(
                given=given.name, expected=each.bits, random=random
            )
            for each in self._replayed[None]
        }

    def _order(self, label: Label) -> StorageOrder:
        def at(block_size: int) -> LabelEntropy:
            return next(
                each
                for each in self._replayed[label.name]
                if (each.block_size, each.fetch_factor) == (block_size, 1)
            )

        counted = label.counted
        return order_of_replayed(
            at(self._largest_block),
            at(1),
            random_bits=theory.random_entropy_bits(
                counted.counts, self._batch_size, n_missing=counted.n_missing
            ),
            n_distinct=counted.n_rows // self._batch_size,
        )

    def _verdict(
        self, name: str, bits: EntropyBits, result: ConfigurationResult, fault: str | None
    ) -> Verdict | None:
        if fault is not None:
            return convicted(fault)
        if result.cells_per_second is None or bits.measured is None:
            return None
        # The first round counts here too.
        return self._judges[name].verdict(result.configuration, bits.measured, result.n_rounds + 1)
