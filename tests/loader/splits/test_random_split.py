import tracemalloc
import warnings
from fractions import Fraction
from math import ceil, floor
from typing import Any, Literal

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import ParameterError, random_split

Method = Literal["deterministic", "multinomial", "stochastic_rounding"]
METHODS: list[Method] = ["deterministic", "multinomial", "stochastic_rounding"]
ROUNDING: list[Method] = ["deterministic", "stochastic_rounding"]

# Of 20 rows, the second part at [0.7, 0.3] and seed 7.
GOLDEN = {
    "deterministic": [1, 2, 4, 9, 10, 13],
    "multinomial": [4, 5, 6, 9, 15, 16, 18],
    "stochastic_rounding": [0, 6, 11, 15, 16, 17],
}

seeds = st.integers(0, 2**64)
weights = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def shares(weights: list[int], n: int) -> list[Fraction]:
    return [Fraction(each * n, sum(weights)) for each in weights]


def as_fractions(weights: list[int]) -> list[float]:
    return [each / sum(weights) for each in weights]


def split_or_none(*args, **kwargs):
    """A split; None where the draw leaves a part empty, which is refused."""
    try:
        return random_split(*args, **kwargs)
    except ParameterError as error:
        if kwargs["method"] == "multinomial" and "gets none" in str(error):
            return None
        raise


@st.composite
def rows_and_weights(draw, *, most: int):
    """A number of rows, and weights by which each part has a share of at least one row."""
    parts = draw(weights)
    return draw(st.integers(ceil(sum(parts) / min(parts)), most)), parts


def is_near(size: int, share: Fraction, part: int, n_parts: int) -> bool:
    """Whether a part has its share, rounded up or down, give or take a row if there are more."""
    more = 0 if part == 0 or n_parts < 3 else n_parts - 2
    return floor(share) - more <= size <= ceil(share) + more


class TestRows:
    @given(rows_and_weights(most=10**4), seeds, st.sampled_from(ROUNDING))
    def test_sizes_are_shares(self, case, seed, method):
        n, weights = case
        parts = random_split(n, as_fractions(weights), seed=seed, method=method)
        for number, (part, share) in enumerate(zip(parts, shares(weights, n), strict=True)):
            assert is_near(part.size, share, number, len(weights))

    @pytest.mark.parametrize("method", ["multinomial", "stochastic_rounding"])
    def test_expected_sizes_are_the_shares(self, method):
        asked, n, n_draws = [0.45, 0.25, 0.3], 27, 2000
        sizes = np.array(
            [
                [each.size for each in random_split(n, asked, seed=seed, method=method)]
                for seed in range(n_draws)
            ]
        )
        p = np.array(asked)
        variance = n * p * (1 - p) if method == "multinomial" else 0.25
        assert np.all(np.abs(sizes.mean(axis=0) - n * p) < 4 * np.sqrt(variance / n_draws))
        assert np.all(sizes.std(axis=0) > 0)

    def test_every_row_is_as_likely_in_every_part(self):
        n_draws, counts = 2000, np.zeros(12)
        for seed in range(n_draws):
            counts[random_split(12, [0.75, 0.25], seed=seed)[1]] += 1
        assert np.all(np.abs(counts / n_draws - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n_draws))

    @given(st.integers(1, 10**4), st.integers(1, 9))
    def test_fractions_are_what_they_were_meant_to_be(self, n, k):
        # As floats, 1/3 is less than a third, and 0.1 more than a tenth.
        assert [each.size for each in random_split(n * k, [1 / k] * k, seed=0)] == [n] * k
        sizes = [each.size for each in random_split(10 * k, [0.1, 0.7, 0.2], seed=n)]
        assert sizes == [k, 7 * k, 2 * k]

    @given(
        st.lists(st.floats(0.01, 1), min_size=1, max_size=5),
        st.integers(500, 600),
        st.sampled_from(METHODS),
        seeds,
    )
    def test_each_row_is_in_one_part_of_any_fractions(self, shares, n, method, seed):
        fractions = [each / sum(shares) for each in shares]
        parts = split_or_none(n, fractions, seed=seed, method=method)
        if parts is None:
            return
        assert len(parts) == len(fractions)
        assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in parts)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(n))

    @pytest.mark.parametrize("method", METHODS)
    def test_the_seed_fixes_it(self, method):
        first, again, other = (
            random_split(1000, [0.8, 0.2], seed=seed, method=method) for seed in (5, 5, 6)
        )
        assert all(map(np.array_equal, first, again))
        assert not np.array_equal(first[1], other[1])

    def test_a_later_version_gives_the_same(self):
        test = {
            method: random_split(20, [0.7, 0.3], seed=7, method=method)[1] for method in METHODS
        }
        assert {method: rows.tolist() for method, rows in test.items()} == GOLDEN

    def test_takes_arrays_only(self):
        n = 2_000_000
        labels = np.arange(n) % 7
        random_split(n, [0.8, 0.2], seed=0, stratify=labels)
        tracemalloc.start()
        try:
            parts = random_split(n, [0.8, 0.2], seed=0, stratify=labels)
            assert tracemalloc.get_traced_memory()[1] < 32 * n
        finally:
            tracemalloc.stop()
        assert parts[0].size == 1_600_000


NAMES = [*[f"label {k}" for k in range(8)], None]


@st.composite
def labelled(draw, n_rows: int, *, most: int = len(NAMES), least: int = 1):
    """Labels of rows, some of which may be missing, of so many different ones."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(least, most))]
    others = st.lists(st.sampled_from(names), min_size=n_rows - least, max_size=n_rows - least)
    labels = [*names[:least], *draw(others)]
    draw(st.randoms(use_true_random=False)).shuffle(labels)
    return np.array(labels, object)


@st.composite
def strata_and_weights(draw):
    """Labels to stratify by, two rows to a label on average, and weights of parts."""
    n, parts = draw(rows_and_weights(most=80))
    n = max(n, 2)
    return draw(labelled(n, most=min(len(NAMES), n // 2))), parts


@st.composite
def groups_and_weights(draw, parts=weights):
    """Labels to group by, at least as many as there are parts, and weights of parts."""
    drawn = draw(parts)
    return draw(labelled(draw(st.integers(4 + len(drawn), 80)), least=len(drawn))), drawn


def rows_by_label(labels: np.ndarray) -> dict[object, np.ndarray]:
    return {each: np.flatnonzero([label == each for label in labels]) for each in set(labels)}


@pytest.mark.parametrize("parameter", ["stratify", "group"])
def test_masked_labels_are_missing(parameter):
    is_masked = np.arange(60) % 4 == 0
    labels = np.ma.array([1, 2, 3, 4, 5] * 12, mask=is_masked)
    missing = pd.Series(labels.data, dtype="Int64").mask(is_masked)
    given: list[dict[str, Any]] = [{parameter: labels}, {parameter: missing}]
    found, expected = (random_split(60, [0.5, 0.5], seed=0, **each) for each in given)
    assert [part.tolist() for part in found] == [part.tolist() for part in expected]


class TestStrata:
    @given(strata_and_weights(), seeds, st.sampled_from(ROUNDING))
    def test_each_label_is_divided_as_all_are(self, case, seed, method):
        labels, weights = case
        fractions = as_fractions(weights)
        parts = random_split(labels.size, fractions, seed=seed, method=method, stratify=labels)
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(labels.size))
        for rows in [np.arange(labels.size), *rows_by_label(labels).values()]:
            for number, share in enumerate(shares(weights, rows.size)):
                size = np.isin(rows, parts[number]).sum()
                assert is_near(size, share, number, len(weights))

    @given(st.lists(st.integers(2, 9), min_size=30, max_size=90), seeds)
    def test_many_labels_are_divided_as_all_are(self, counts, seed):
        labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
        train, test = random_split(labels.size, [0.8, 0.2], seed=seed, stratify=labels)
        of_labels = np.bincount(test := labels[test], minlength=len(counts))
        assert np.all(np.abs(of_labels - 0.2 * np.array(counts)) < 1 - 1e-9)
        assert train.size + test.size == labels.size
        assert abs(test.size - 0.2 * labels.size) < 1 - 1e-9

    def test_shares_that_are_integers_are_reached(self):
        labels = np.random.default_rng(0).integers(0, 300, 2000)
        parts = random_split(2000, [0.7, 0.2, 0.1], seed=0, stratify=labels)
        assert [each.size for each in parts] == [1400, 400, 200]

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("counts", "n_deviations"), [(np.array([3, 5, 8, 9]), 4), (np.arange(60) % 7 + 2, 5)]
    )
    def test_expected_sizes_are_the_shares_of_each_label(self, counts, n_deviations):
        """And each row of a label is as likely in each part."""
        labels, asked, n_draws = np.repeat(np.arange(counts.size), counts), [0.5, 0.3, 0.2], 1000
        drawn = np.zeros((labels.size, 3))
        for seed in range(n_draws):
            for k, rows in enumerate(random_split(labels.size, asked, seed=seed, stratify=labels)):
                drawn[rows, k] += 1
        sizes = np.add.reduceat(drawn, np.cumsum([0, *counts[:-1]])) / n_draws
        of_one = 0.5 / np.sqrt(n_draws)
        assert np.all(np.abs(sizes - np.outer(counts, asked)) < n_deviations * of_one)
        assert np.all(np.abs(drawn / n_draws - asked) < 5 * of_one)

    def test_deterministic_sizes_do_not_hang_on_the_seed(self):
        labels = np.repeat(["a", "b", "c"], [11, 13, 17])
        options: dict[str, Any] = {"method": "deterministic", "stratify": labels}
        splits = [random_split(41, [0.6, 0.3, 0.1], seed=seed, **options) for seed in range(9)]
        counts = [
            [np.unique(labels[each], return_counts=True) for each in split] for split in splits
        ]
        assert all(str(each) == str(counts[0]) for each in counts)

    def test_several_columns_are_balanced_together(self):
        plate, drug = np.repeat([0, 1], 40), np.tile(np.repeat(["x", "y"], 20), 2)
        cells = ad.AnnData(
            np.zeros((80, 1)),
            obs=pd.DataFrame({"plate": plate, "drug": drug}, index=[str(k) for k in range(80)]),
        )
        split = random_split(cells, [0.75, 0.25], seed=0, stratify=["plate", "drug"])
        both = plate[split[1]] * 2 + (drug[split[1]] == "y")
        assert np.bincount(both).tolist() == [5, 5, 5, 5]


class TestGroups:
    @given(groups_and_weights(), seeds, st.sampled_from(METHODS), st.booleans())
    def test_none_is_torn(self, case, seed, method, is_stratified):
        groups, weights = case
        strata = np.arange(groups.size) % 2 if is_stratified and method != "multinomial" else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = split_or_none(
                groups.size, as_fractions(weights), seed=seed, method=method, group=groups,
                stratify=strata,
            )  # fmt: skip
        if parts is None:
            return
        assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(groups.size))
        for rows in rows_by_label(groups).values():
            assert sum(np.isin(rows, part).any() for part in parts) == 1

    @given(groups_and_weights(st.integers(1, 9).map(lambda weight: [weight, 10 - weight])), seeds)
    def test_two_parts_are_off_by_a_group_at_most(self, case, seed):
        groups, (weight, _) = case
        by_group = rows_by_label(groups)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part, _ = random_split(
                groups.size, [weight / 10, 1 - weight / 10], seed=seed, group=groups
            )
        largest = max(each.size for each in by_group.values())
        assert abs(part.size - weight / 10 * groups.size) <= largest

    def test_what_can_be_had_exactly_is(self):
        donors, types = np.repeat(np.arange(20), 10), np.tile(np.repeat(["T", "B"], [7, 3]), 20)
        split = random_split(200, [0.7, 0.2, 0.1], seed=0, group=donors, stratify=types)
        for kind, n in (("T", 140), ("B", 60)):
            counts = [np.count_nonzero(types[rows] == kind) for rows in split]
            assert np.allclose(np.array(counts) / n, [0.7, 0.2, 0.1])

    def test_strata_are_balanced_by_the_choice_of_groups(self):
        # Half of the donors have one type, half the other: a choice by size alone may take any.
        donors = np.repeat(np.arange(12), 10)
        types = np.where(donors < 6, "T", "B")
        for seed in range(5):
            split = random_split(120, [0.5, 0.5], seed=seed, group=donors, stratify=types)
            assert [np.count_nonzero(types[rows] == "T") for rows in split] == [30, 30]

    def test_far_off_is_warned_of(self):
        donors = np.repeat(["a", "b"], [95, 5])
        said = (
            r"^whole groups of the labels of `group` do not divide as requested: "
            r"0\.\d+, 0\.\d+ instead of 0\.5, 0\.5; try another seed"
        )
        with pytest.warns(UserWarning, match=said):
            split = random_split(100, [0.5, 0.5], seed=0, group=donors)
        assert sorted(each.size for each in split) == [5, 95]

    def test_other_seeds_give_other_groups(self):
        donors = np.repeat(np.arange(100), 2)
        splits = [random_split(200, [0.5, 0.5], seed=seed, group=donors)[0] for seed in (0, 0, 1)]
        assert np.array_equal(splits[0], splits[1])
        assert not np.array_equal(splits[0], splits[2])
