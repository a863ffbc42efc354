"""Entropy over an epoch: streaming drifts, block shuffling does not."""

from itertools import pairwise

import numpy as np
import pytest
from notebooks.figures import entropy_over_epoch, epoch_figure

from cellfeed import BlockShuffling, EpochPlan, ParameterError, Streaming
from cellfeed_tuner import minibatch_entropies

RNG = np.random.default_rng(0)
SORTED_THEN_SHUFFLED = np.concatenate([np.repeat(np.arange(5), 4_000), RNG.integers(0, 5, 20_000)])


def epoch(strategy, n_rows, *, fetch_factor=4, seed=0):
    return EpochPlan(
        strategy=strategy, n_rows=n_rows, batch_size=32, fetch_factor=fetch_factor, seed=seed
    )


@pytest.mark.parametrize("strategy", [Streaming(), Streaming(shuffle=True)])
def test_streaming_through_unequal_files_drifts(strategy):
    found = entropy_over_epoch(SORTED_THEN_SHUFFLED, epoch(strategy, 40_000))
    assert found.drifts
    assert found.drift_bits == pytest.approx(2.2, abs=0.1)
    assert found.sentence.startswith("Entropy drifts over an epoch: 0.0")


@pytest.mark.parametrize("block_size", [1, 16, 256])
@pytest.mark.parametrize("fetch_factor", [1, 4, 16])
def test_block_shuffling_of_the_same_files_does_not(block_size, fetch_factor):
    for seed in range(2):
        plan = epoch(BlockShuffling(block_size), 40_000, fetch_factor=fetch_factor, seed=seed)
        found = entropy_over_epoch(SORTED_THEN_SHUFFLED, plan)
        assert not found.drifts, found.sentence
        assert "stays within" in found.sentence


def test_a_single_file_that_is_less_mixed_is_found_where_it_lies():
    labels = RNG.integers(0, 5, 40_000)
    labels[24_000:28_000] = 0
    found = entropy_over_epoch(labels, epoch(Streaming(), 40_000))
    assert found.drifts
    assert found.departing_decile == 6
    assert found.departure_bits == pytest.approx(-2.27, abs=0.05)
    assert abs(found.drift_bits) < found.drift_error_bits


@pytest.mark.parametrize("n_rows", [40_000, 39_999, 3_333, 320])
@pytest.mark.parametrize("strategy", [BlockShuffling(7), Streaming()])
def test_deciles_are_those_of_all_full_minibatches(n_rows, strategy):
    labels = SORTED_THEN_SHUFFLED[:n_rows]
    plan = epoch(strategy, n_rows, fetch_factor=3)
    entropies = minibatch_entropies(labels, plan)
    ends = np.arange(11) * entropies.size // 10
    expected = [entropies[start:stop].mean() for start, stop in pairwise(ends)]
    found = entropy_over_epoch(labels, plan, n_rows=10**9)
    assert [each.value for each in found.deciles] == pytest.approx(expected)


def test_of_a_long_epoch_only_some_fetches_are_replayed():
    labels = np.tile(SORTED_THEN_SHUFFLED, 5)
    plan = epoch(BlockShuffling(16), labels.size)
    all_of_it = entropy_over_epoch(labels, plan, n_rows=10**9)
    some = entropy_over_epoch(labels, plan, n_rows=20_000)
    for each, exact in zip(some.deciles, all_of_it.deciles, strict=True):
        assert each.value == pytest.approx(exact.value, abs=each.high - each.low)


@pytest.mark.parametrize(
    ("n_fetches", "fetch_factor"), [(2, 64), (5, 64), (9, 64), (10, 64), (10, 2)]
)
def test_few_fetches_do_not_tell(n_fetches, fetch_factor):
    """A fetch that reaches from one tenth into the next tells nothing of either's spread."""
    n_rows = 32 * fetch_factor * n_fetches
    for strategy in (BlockShuffling(16), Streaming()):
        plan = epoch(strategy, n_rows, fetch_factor=fetch_factor)
        found = entropy_over_epoch(RNG.integers(0, 5, n_rows), plan)
        assert not found.drifts
        assert "too few fetches to tell" in found.sentence
        assert "as chance has it" not in found.sentence


@pytest.mark.slow
def test_chance_is_seldom_taken_for_drift():
    labels = np.repeat(RNG.integers(0, 5, 2_000), 16)
    drifting = [
        entropy_over_epoch(labels, epoch(BlockShuffling(16), labels.size, seed=seed)).drifts
        for seed in range(30)
    ]
    assert not any(drifting)


def test_impossible_input_is_refused():
    with pytest.raises(ParameterError, match="at least 10 full minibatches"):
        entropy_over_epoch([0, 1] * 50, epoch(Streaming(), 100))
    with pytest.raises(ParameterError, match="a label for each"):
        entropy_over_epoch([0, 1], epoch(Streaming(), 10_000))


def test_each_course_is_drawn_with_random_sampling():
    courses = {
        name: entropy_over_epoch(SORTED_THEN_SHUFFLED, epoch(strategy, 40_000))
        for name, strategy in {"streaming": Streaming(), "blocks": BlockShuffling(16)}.items()
    }
    figure = epoch_figure(courses, dict.fromkeys(courses, 2.3))
    assert [axes.get_title(loc="left") for axes in figure.axes] == list(courses)
    for axes, course in zip(figure.axes, courses.values(), strict=True):
        tenths = [[n, bits.value] for n, bits in enumerate(course.deciles, start=1)]
        assert any(np.array_equal(line.get_xydata(), tenths) for line in axes.lines)
        low, high = axes.get_ylim()
        assert low < min(bits for _, bits in tenths) < 2.3 < high
    own = epoch_figure(courses, {"streaming": 2.3, "blocks": 2.2}).axes
    assert own[0].get_ylim() != own[1].get_ylim()
