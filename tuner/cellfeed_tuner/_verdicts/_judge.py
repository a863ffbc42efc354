"""A verdict for each measured configuration."""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner import theory
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy._label_counts import LabelCounts
from cellfeed_tuner._entropy._label_entropy import LabelEntropy
from cellfeed_tuner._entropy._minibatch_entropy import within_block_bits
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._verdicts._assumptions import departures
from cellfeed_tuner._verdicts._verdict import Measured, Theory, Verdict, verdict

__all__ = ["Judge"]


class Judge:
    """Holds what was measured against the plan and theory for one label.

    Parameters
    ----------
    codes
        Code of each row's label in the order of storage, -1 where missing, shape (n_rows,).
    counted
        How often each occurs.
    batch_size
        Rows of a minibatch.
    rows_in_blocks
        Gives rows of blocks of a size, block after block; in the order of storage if None.
    """

    def __init__(
        self,
        codes: NDArray[np.integer],
        counted: LabelCounts,
        batch_size: int,
        rows_in_blocks: Callable[[int], NDArray[np.int64]] | None = None,
    ) -> None:
        self._counted = counted
        self._batch_size = batch_size
        # Workers do not matter to either, and fetch factors not to the first.
        self._within_block_bits = cache(
            lambda block_size: within_block_bits(
                codes if rows_in_blocks is None else codes[rows_in_blocks(block_size)], block_size
            )
        )
        self._theory = cache(self._theory_of)

    def verdict(
        self,
        configuration: Configuration,
        planned: LabelEntropy,
        measured: Estimate,
        n_rounds: int,
    ) -> Verdict | None:
        """Return the verdict; None where the plan has too few whole fetches to tell.

        Parameters
        ----------
        configuration
            What was measured.
        planned
            The replay of its plan.
        measured
            Mean entropy of its minibatches with the 95 % interval.
        n_rounds
            Rounds that it rests on, at least.
        """
        block_size, fetch_factor = configuration.block_size, configuration.fetch_factor
        if planned.whole_fetches is None:
            return None
        fetch_size = self._batch_size * fetch_factor
        return verdict(
            Measured(
                bits=measured,
                n_rounds=n_rounds,
                fetches_per_round=configuration.fetches_per_round,
                fetches_per_epoch=self._counted.n_rows // fetch_size,
                fetches_per_block=-(-block_size // fetch_size),
            ),
            planned=planned.whole_fetches,
            epoch_bits=planned.bits.value,
            theory=self._theory(block_size, fetch_factor),
        )

    def _theory_of(self, block_size: int, fetch_factor: int) -> Theory:
        counts, batch_size = self._counted.counts, self._batch_size
        sizes = {"batch_size": batch_size, "block_size": block_size, "fetch_factor": fetch_factor}
        within = self._within_block_bits(block_size)
        return Theory(
            homogeneous=theory.expected_entropy_bits(counts, batch_size, block_size, fetch_factor),
            lower_bound=theory.lower_bound_bits(counts, batch_size, block_size),
            upper_bound=theory.upper_bound_bits(counts, batch_size),
            random=self._counted.random_entropy_bits(batch_size),
            departures=departures(self._counted, within, **sizes),
        )
