"""Throughputs and intervals, from rounds that were timed."""

from dataclasses import replace

import numpy as np
import pytest

from cellfeed import (
    ParameterError,
)
from cellfeed_tuner import (
    Configuration,
    Measurement,
)
from cellfeed_tuner._constants import FEWEST_ROUNDS
from cellfeed_tuner._interval import Spread
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS, pooled


def measurement(*seconds: float) -> Measurement:
    return Measurement(
        configuration=Configuration(block_size=1, fetch_factor=1),
        cache="cold",
        cells_per_round=100,
        round_seconds=seconds,
        peak_memory_bytes=len(seconds),
    )


def test_too_few_rounds_give_no_throughput():
    few = measurement(*[1.0] * (FEWEST_ROUNDS - 1))
    assert few.status == "not enough samples"
    assert few.cells_per_second is None


def test_few_rounds_give_a_throughput_that_is_not_relied_on():
    few = measurement(*[1.0] * (LEAST_ROUNDS - 1))
    assert few.status == "not enough samples"
    assert few.cells_per_second is not None


def test_rounds_that_are_all_alike_give_an_interval():
    speed = measurement(*[0.1] * LEAST_ROUNDS).cells_per_second
    assert speed is not None
    assert speed.low <= speed.value <= speed.high
    assert speed.overlaps(speed)


def test_throughput_is_cells_over_mean_time():
    speed = measurement(*[1.0, 2.0] * 4).cells_per_second
    assert speed is not None
    assert speed.value == pytest.approx(100 / 1.5)
    assert speed.low <= speed.value <= speed.high


def test_the_interval_of_one_process_is_that_of_batches_of_its_rounds():
    """Four batches of two, with Student's t of three degrees of freedom, in logarithms."""
    speed = measurement(1.0, 1.2, 1.1, 1.1, 1.4, 1.4, 1.2, 1.2).cells_per_second
    batches = np.array([1.1, 1.1, 1.4, 1.2])
    error = batches.std(ddof=1) / batches.mean() / 2
    times = np.exp(3.182446 * error)
    assert speed is not None
    assert [speed.low, speed.high] == pytest.approx([100 / 1.2 / times, 100 / 1.2 * times])


def test_an_interval_may_reach_beyond_the_fastest_round():
    speed = measurement(1.0, 1.0, 1.0, 1.5).cells_per_second
    assert speed is not None
    assert speed.high > 100 / 1.0


@pytest.mark.parametrize(("n", "n_rounds"), [(4, 8), (12, 8), (4, 200)])
def test_intervals_cover_the_truth_however_many_rounds_have_the_moment_in_common(n, n_rounds):
    """Replicates are off by 10 % each, their rounds by 1 %: of 95 % intervals, 95 % hold."""
    rng = np.random.default_rng(0)
    held, n_trials = 0, 400
    for _ in range(n_trials):
        # Several configurations, since one alone says little of how much replicates differ.
        several = [
            [
                np.exp(0.1 * rng.standard_normal() + 0.01 * rng.standard_normal(n_rounds))
                for _ in range(n)
            ]
            for _ in range(4)
        ]
        found = [pooled([measurement(*rounds) for rounds in each]) for each in several]
        spread = Spread.of(each.replicate_seconds for each in found)
        speed = found[0].cells_per_second_given(spread)
        assert speed is not None
        held += speed.low <= 100 <= speed.high
    assert 0.92 <= held / n_trials <= 0.99


def test_pooling_counts_what_was_killed():
    together = pooled(
        [replace(measurement(1.0), n_killed=1), replace(measurement(2.0), n_killed=2)]
    )
    assert together.n_killed == 3
    assert together.note == "killed 3 times, perhaps for want of memory, and tried again"


def test_pooling_joins_samples_and_keeps_the_highest_peak():
    together = pooled([measurement(1.0, 2.0), measurement(3.0, 4.0, 5.0)])
    assert together.round_seconds == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert together.replicate_seconds == (1.5, 4.0)
    assert together.peak_memory_bytes == 3


@pytest.mark.parametrize(
    "sizes",
    [
        {"block_size": 0, "fetch_factor": 1},
        {"block_size": 1, "fetch_factor": 0},
        {"block_size": 1, "fetch_factor": 1, "num_workers": -1},
    ],
)
def test_sizes_below_their_least_are_refused(sizes):
    with pytest.raises(ParameterError, match="must hold"):
        Configuration(**sizes)


def test_a_failure_after_enough_rounds_is_a_failure():
    failed = replace(measurement(), failure="the process was killed")
    assert pooled([measurement(*[1.0] * LEAST_ROUNDS), failed]).status == "failed"
