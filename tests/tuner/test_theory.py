"""The formulas, against enumeration and against what the paper measured."""

from collections import Counter
from itertools import combinations, product
from math import comb, log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed import ParameterError
from cellfeed_tuner import theory

counts = st.lists(st.integers(1, 50), min_size=1, max_size=6)


def plug_in(labels) -> float:
    """The plug-in estimate of entropy as it is defined, in bits, of labels that are known."""
    known = [label for label in labels if label >= 0]
    n = len(known)
    return -sum(c / n * log2(c / n) for c in Counter(known).values()) if n else 0.0


def enumerated_mean(rows, batch_size) -> float:
    """Mean entropy over every way to draw a minibatch from the rows."""
    draws = combinations(range(len(rows)), batch_size)
    return sum(plug_in([rows[i] for i in draw]) for draw in draws) / comb(len(rows), batch_size)


def enumerated_expectation(p, sizes, n_rows) -> float:
    """Mean over every labelling of the blocks that a fetch covers, at every offset."""
    batch_size, block_size, fetch_factor = sizes
    fetch_size = batch_size * fetch_factor
    per_offset: list[float] = []
    for offset in range(block_size):
        n_blocks = -(-(offset + fetch_size) // block_size)
        total = 0.0
        for labels in product(range(len(p)), repeat=n_blocks):
            rows = np.repeat(labels, block_size)[offset : offset + fetch_size].tolist()
            total += np.prod([p[label] for label in labels]) * enumerated_mean(rows, batch_size)
        per_offset.append(total)
    starts = np.arange(block_size) * fetch_size % block_size
    behind_the_short_block = (starts - n_rows) % block_size
    return float(np.mean([per_offset[i] for i in (*starts, *behind_the_short_block)]))


@given(counts)
def test_entropy_is_that_of_the_normalised_counts(values):
    labels = [k for k, n in enumerate(values) for _ in range(n)]
    assert theory.entropy_bits(values) == pytest.approx(plug_in(labels), abs=1e-12)


@pytest.mark.parametrize(
    ("p", "n_rows", "sizes"),
    [
        *(
            (p, 0, sizes)
            for p in ((0.5, 0.5), (0.7, 0.2, 0.1))
            for sizes in (
                (2, 1, 1), (2, 1, 3), (4, 2, 1), (2, 2, 2), (3, 2, 1), (3, 2, 2), (2, 3, 1),
                (2, 4, 2),
            )
        ),
        # A short last block moves the boundaries of half the fetches.
        *(
            ((0.7, 0.2, 0.1), n_rows, sizes)
            for n_rows, sizes in (
                (101, (2, 2, 1)), (102, (2, 4, 2)), (101, (2, 4, 2)), (100, (3, 3, 2)),
                (100, (2, 3, 1)), (99, (2, 4, 1)),
            )
        ),
    ],
)  # fmt: skip
def test_expected_entropy_is_the_enumerated_one(p, n_rows, sizes):
    exact = enumerated_expectation(p, sizes, n_rows)
    computed = theory.expected_entropy_bits(p, *sizes, n_rows=n_rows)
    assert computed == pytest.approx(exact, abs=1e-9)


def test_blocks_and_fetches_without_a_common_divisor_are_as_exact():
    p = [0.6, 0.3, 0.1]
    coprime = theory.expected_entropy_bits(p, 64, 1023, 16)
    neighbours = [theory.expected_entropy_bits(p, 64, block_size, 16) for block_size in (768, 1280)]
    assert neighbours[0] > coprime > neighbours[1]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 3))
def test_random_entropy_is_the_enumerated_one_of_known_labels(values, batch_size, n_missing):
    rows = [k for k, n in enumerate(values) for _ in range(n)] + [-1] * n_missing
    exact = enumerated_mean(rows, min(batch_size, len(rows)))
    computed = theory.random_entropy_bits(values, batch_size, n_missing=n_missing)
    assert computed == pytest.approx(exact, abs=1e-9)


@settings(max_examples=30)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4), st.integers(0, 3))
def test_independent_entropy_is_the_enumerated_one(counts, batch_size, n_missing):
    p = [*counts, n_missing]
    labels = [*range(len(counts)), -1]
    expected = 0.0
    for drawn in product(range(len(p)), repeat=batch_size):
        chance = np.prod([p[each] / sum(p) for each in drawn])
        expected += chance * plug_in([labels[each] for each in drawn])
    found = theory.independent_entropy_bits(counts, batch_size, n_missing=n_missing)
    assert found == pytest.approx(expected, abs=1e-9)
    assert theory.independent_entropy_bits([], 64, n_missing=3) == 0


def test_true_random_sampling_is_the_expectation_of_single_rows_at_any_fetch_factor():
    p = [0.5, 0.3, 0.2]
    at_any = [theory.expected_entropy_bits(p, 64, 1, f) for f in (1, 16, 1024)]
    endless = theory.random_entropy_bits((np.array(p) * 1e7).astype(int), 64)
    assert at_any == pytest.approx([endless] * 3, abs=1e-4)


def test_expected_entropy_stays_finite_for_many_labels_and_large_minibatches():
    many = theory.expected_entropy_bits(np.ones(5000), 64, 16, 256)
    assert 5.5 < many < 6.0  # log2(64) is the most that 64 rows can have
    large = theory.expected_entropy_bits([0.5, 0.5], 4096, 1, 256)
    assert large == pytest.approx(theory.upper_bound_bits([0.5, 0.5], 4096), abs=1e-6)


def test_bounds_are_the_papers_formulas():
    p = np.full(14, 1 / 14)
    per_block = 13 / (2 * 64 * np.log(2))
    assert theory.upper_bound_bits(p, 64) == pytest.approx(log2(14) - per_block)
    assert theory.lower_bound_bits(p, 64, 16) == pytest.approx(log2(14) - 16 * per_block)
    assert theory.lower_bound_bits(p, 64, 64) == theory.lower_bound_bits(p, 64, 1000) == 0
    assert theory.lower_bound_bits([1, 1], 1, 1) == 0  # one row has one label
    for name, sizes in (("batch_size", (0, 1)), ("block_size", (4, -1)), ("block_size", (4, 0))):
        with pytest.raises(ParameterError, match=rf"^`{name} > 0` must hold, but got {name}="):
            theory.lower_bound_bits([1, 1], *sizes)
    assert theory.upper_bound_bits(np.ones(1000), 2) == 0  # never below what entropy can be


@pytest.mark.parametrize("p", [[], [0, 0], [-1, 2], [np.nan, 1], [[1, 2]], [np.inf, 1]])
def test_impossible_distributions_are_refused(p):
    with pytest.raises(ParameterError, match="frequencies"):
        theory.entropy_bits(p)
