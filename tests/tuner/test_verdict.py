"""Verdicts over real plans: each is made to happen."""

from itertools import product

import numpy as np
import pytest
from tests.tuner.mixing import mixing_of

from cellfeed import BlockShuffling, EpochPlan
from cellfeed_tuner import (
    Configuration,
    ConfigurationResult,
    EntropyBits,
    Estimate,
    LabelResult,
    Verdict,
    minibatch_entropies,
    theory,
)
from cellfeed_tuner._interval import mean_with_interval
from cellfeed_tuner._mixing import standard_error_of, verdict, wrong_data

BATCH_SIZE = 64


def measured_rounds(
    codes: np.ndarray, block_size: int, fetch_factor: int, n_rounds: int
) -> list[float]:
    """What measuring gives: the first whole fetches of one epoch, or of several."""
    rounds: list[float] = []
    for epoch in range(1000, 1000 + n_rounds):
        plan = EpochPlan(
            strategy=BlockShuffling(block_size), n_rows=codes.size, batch_size=BATCH_SIZE,
            fetch_factor=fetch_factor, epoch=epoch,
        )  # fmt: skip
        entropies = minibatch_entropies(codes, plan)[: plan.n_whole_fetches * fetch_factor]
        rounds += entropies.reshape(-1, fetch_factor).mean(axis=1).tolist()
        if len(rounds) >= n_rounds:
            break
    return rounds[:n_rounds]


def judged(
    codes: np.ndarray,
    block_size: int,
    fetch_factor: int,
    *,
    n_rounds: int = 40,
) -> Verdict:
    """The verdict on a loader that delivers its plan."""
    rounds = measured_rounds(codes, block_size, fetch_factor, n_rounds)
    bits = mean_with_interval(rounds)
    entropy = EntropyBits(expected=bits, random=0.0, measured=bits)
    result = ConfigurationResult(
        configuration=Configuration(block_size=block_size, fetch_factor=fetch_factor),
        status="timed",
        cells_per_second=Estimate(1.0, 1.0, 1.0),
        n_rounds=len(rounds) - 1,  # the first of a measurement is counted for its entropy only
        labels={"plate": LabelResult(entropy_bits=entropy)},
    )
    (found,) = mixing_of({"plate": codes}, floor=0.0).judged(result, None).verdicts
    return found


def homogeneous(n_blocks: int, block_size: int, n_labels: int = 14, missing: float = 0.0):
    rng = np.random.default_rng(0)
    labels = np.arange(n_blocks) % n_labels
    labels[rng.random(n_blocks) < missing] = -1
    return np.repeat(rng.permutation(labels), block_size)


PLATES = np.sort(np.random.default_rng(0).integers(0, 14, 64_000))


@pytest.mark.parametrize(("block_size", "fetch_factor"), list(product([16, 64, 256], [1, 4, 16])))
def test_runs_of_labels_are_inside(block_size, fetch_factor):
    codes = homogeneous(4096, 256)
    found = judged(codes, block_size, fetch_factor)
    assert (found.kind, found.bits) == ("inside", 0.0)
    assert "inside the paper's bounds" in found.sentence


def test_labels_mixed_inside_blocks_are_inside_and_say_what_blocks_of_one_label_would_give():
    codes = np.random.default_rng(0).permutation(PLATES)
    found = judged(codes, 64, 4)
    assert (found.kind, found.bits) == ("inside", 0.0)
    expected = theory.expected_entropy_bits(np.bincount(codes), BATCH_SIZE, 64, 4)
    assert f"would give {expected:.3f}." in found.sentence


def test_missing_labels_may_be_below_the_bounds_though_the_plan_is_delivered():
    codes = homogeneous(4096, 64, missing=0.9)
    found = judged(codes, 64, 1, n_rounds=60)
    low = theory.lower_bound_bits(np.bincount(codes[codes >= 0]), BATCH_SIZE, 64)
    measured = np.mean(measured_rounds(codes, 64, 1, 60))
    assert found.kind == ("outside" if found.bits else "inside")
    assert found.bits == pytest.approx(min(0.0, measured - low), abs=found.error_bits)


@pytest.mark.parametrize("n_labels", [14, 40, 400])
@pytest.mark.parametrize("skew", [0.0, 2.0])
def test_random_sampling_is_inside_though_the_expansion_excludes_it(n_labels, skew):
    """With 400 labels, 64 rows cannot show all, and the expansion is below what is exact."""
    frequencies = np.arange(1, n_labels + 1) ** -skew
    codes = np.random.default_rng(0).choice(n_labels, 100_000, p=frequencies / frequencies.sum())
    found = judged(codes, 1, 64)
    assert (found.kind, found.bits) == ("inside", 0.0)
    upper = theory.upper_bound_bits(np.bincount(codes), BATCH_SIZE)
    random = theory.random_entropy_bits(np.bincount(codes), BATCH_SIZE)
    assert abs(random - upper) > 0.0005
    if random > upper:
        assert "inside the paper's bounds, widened to exact values" in found.sentence


def test_where_an_expansion_excludes_what_is_exact_the_bounds_do_not():
    entropy = EntropyBits(
        measured=None,
        expected=Estimate(3.5, 3.49, 3.51),
        homogeneous=3.19,
        lower_bound=3.2,  # an expansion, too, which excludes homogeneous blocks
        upper_bound=3.492,
        random=3.5,
    )
    assert entropy.bounds == (3.19, 3.5)


def test_a_fault_is_the_verdict_on_the_loader():
    found = wrong_data("minibatch 0 of epoch 0 has cell 3 where the plan has 7")
    assert (found.kind, found.bits, found.error_bits) == ("loader", 0.0, 0.0)
    assert found.sentence.startswith(
        "The loader delivered wrong data: minibatch 0 of epoch 0 has cell 3"
    )


def test_a_value_whose_error_touches_a_bound_is_inside():
    measured = Estimate(1.0, -np.inf, np.inf)
    bits = EntropyBits(
        measured=measured, expected=Estimate(1.0, 1.0, 1.0),
        homogeneous=0.99, lower_bound=0.5, upper_bound=0.99, random=0.99,
    )  # fmt: skip
    for n_rounds, kind in ((100, "inside"), (10_000, "outside")):
        error = standard_error_of(measured, n_rounds, 0.1, fetches_per_epoch=10**6)
        found = verdict(bits, standard_error=error)
        assert found is not None
        assert found.kind == kind
        assert found.error_bits == pytest.approx(3.89 * 0.1 / n_rounds**0.5, rel=0.01)
        assert found.bits == pytest.approx(0.0 if kind == "inside" else 0.01)


def test_what_lies_below_is_outside_with_its_distance():
    nothing = Estimate(0.0, 0.0, 0.0)
    bits = EntropyBits(
        measured=nothing, expected=nothing,
        homogeneous=3.6, lower_bound=3.5, upper_bound=3.7, random=3.65,
    )  # fmt: skip
    error = standard_error_of(nothing, 10, 0.0, fetches_per_epoch=100)
    found = verdict(bits, standard_error=error)
    assert found is not None
    assert (found.kind, found.bits) == ("outside", -3.5)
    assert "as planned: 3.500 below the paper's bounds (3.500 to 3.700)." in found.sentence
