"""Labels that most cells lack: what minibatches have is a share of what can be had."""

from dataclasses import replace

import numpy as np
import pytest
from tests.tuner.mixing import Label, LoaderPlans, Mixing, mixing_of
from tests.tuner.reports import html_report, html_summary, printed

from cellfeed_tuner import Tunable, theory

N_CELLS, N_KNOWN, N_LABELS = 400_000, 1_000, 10
RNG = np.random.default_rng(0)
SIZES = [(1, 1), (16, 64), (64, 1), (1024, 4), (1024, 256)]


def mixing(codes):
    return mixing_of({"line": codes})


def mostly_missing(known):
    codes = np.full(N_CELLS, -1)
    codes[:N_KNOWN] = known
    return codes


@pytest.mark.parametrize("sizes", SIZES)
def test_cells_that_are_shuffled_among_each_other_have_all_that_can_be_had(sizes):
    """They lie together, so that some minibatches have many of them, and most have none."""
    found = mixing(mostly_missing(RNG.integers(0, N_LABELS, N_KNOWN)))[sizes]["line"]
    assert found.share_of_random == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("sizes", SIZES)
def test_no_order_has_more_than_random_sampling(sizes):
    found = mixing(mostly_missing(np.repeat(np.arange(N_LABELS), N_KNOWN // N_LABELS)))
    assert found[sizes]["line"].share_of_random < 1.02
    assert not found.storage_order(1024).already_shuffled


class InOrder(Tunable):
    """Another loader, which has a plan."""

    def open(self, configuration):
        raise NotImplementedError

    def planned_rows(self, configuration, n_minibatches):
        return np.arange(min(N_CELLS // 64, n_minibatches) * 64).reshape(-1, 64)


def test_the_plan_of_another_loader_is_held_against_the_same():
    codes = mostly_missing(RNG.integers(0, N_LABELS, N_KNOWN))
    label = Label.of_values("line", np.where(codes < 0, np.nan, codes))
    found = Mixing([label], None, LoaderPlans(InOrder()), entropy_floor=0.99)[1, 1]["line"]
    assert found.random_of_known is not None
    assert found.share_of_random == pytest.approx(1.0, abs=0.05)


def test_blocks_of_one_label_have_nothing_where_random_samples_have_something():
    codes = np.repeat(np.arange(8), 8_192)
    codes[codes > 3] = -1
    found = mixing(codes)[64, 1]["line"]
    assert found.share_of_random == 0.0
    # Half of the minibatches have 64 labelled cells, and half none.
    known = theory.random_entropy_bits([8_192] * 4, 64)
    assert found.random_of_known == pytest.approx(known / 2, rel=0.1)


def test_where_no_label_is_missing_nothing_changes():
    found = mixing(np.repeat(np.arange(8), 8_192))[16, 16]["line"]
    assert found.random_of_known is None
    assert found.share_of_random == found.expected.value / found.random


def test_that_most_cells_lack_a_label_is_said_everywhere(result_of):
    result = result_of("recommended")
    n_missing = int(0.9975 * result.dataset.n_cells)
    missing = replace(result, dataset=replace(result.dataset, n_missing=n_missing))
    said = "plate is missing in 99.75% of the cells"
    for page in (html_report(missing, code=""), html_summary(missing)):
        assert said in page
        assert "on average 0.16 per minibatch" in page
    assert said in printed(missing)
    assert said not in html_summary(result)
