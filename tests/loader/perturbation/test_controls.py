"""Controls of treated cells: of the same pool, each as likely, the same for any division."""

from dataclasses import replace
from typing import Any

import anndata
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.sampling.epochs import epoch_of
from tests.loader.sampling.suites import PlanConformance

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    GroupedSampling,
    MatchedControls,
    ParameterError,
    SamplingStrategy,
    Streaming,
)
from cellfeed.sampling import Permutation
from cellfeed.testing import StrategyCase

N_LEAST = 2  # rows: a control and a treated cell


def study(n_rows, seed):
    """Return treatments, of which 0 is the control, and two covariates; each may be missing."""
    rng = np.random.default_rng(seed)
    treatment = rng.integers(-1, 4, n_rows)
    treatment[: max(N_LEAST, n_rows // 3)] = 0
    treatment[n_rows // 2] = 1
    return rng.permutation(treatment), rng.integers(-1, 2, n_rows), rng.integers(0, 2, n_rows)


def matches(treatment, *covariates, n_distinct=1):
    def is_match(rows, controls):
        found = treatment[controls] == 0
        for each in covariates:
            found &= (each[controls] == each[rows][:, None]) & (each[controls] >= 0)
        n = [np.unique(each).size for each in controls]
        return found & (np.array(n) >= n_distinct)[:, None]

    return is_match


def chosen_by(kind, treatment, block_size, indices):
    labels = treatment if indices is None else treatment[indices]
    return {
        "blocks": lambda: BlockShuffling(block_size, indices),
        "in order": lambda: Streaming(indices),
        "by weight": lambda: BlockWeightedSampling(block_size, indices, weights=labels + 2),
        "balanced": lambda: ClassBalancedSampling(labels, block_size, indices),
        "sets": lambda: GroupedSampling(labels, 3, 1, indices, "pad"),
    }[kind]()


class TestConformance(PlanConformance):
    max_examples = 20

    @pytest.fixture
    def cases(self):
        @st.composite
        def cases(draw, n_rows):
            n_rows = max(n_rows, 12)
            treatment, *covariates = study(n_rows, draw(st.integers(0, 999)))
            covariates = covariates[: draw(st.integers(0, 2))]
            k = draw(st.integers(1, 4))
            does_replace = draw(st.booleans())
            kind = draw(st.sampled_from(["blocks", "in order", "by weight", "balanced", "sets"]))
            indices = None
            if draw(st.booleans()):
                is_kept = np.random.default_rng(n_rows).random(n_rows) < 0.8
                indices = np.flatnonzero(is_kept | (treatment <= 1))
            pool = sum(
                (3**place * (each + 1) for place, each in enumerate(covariates)), 0 * treatment
            )
            least = 1 if does_replace else k
            is_known = np.all([each >= 0 for each in covariates] or [pool >= 0], axis=0)
            in_pool = np.bincount(pool[(treatment == 0) & is_known], minlength=pool.max() + 1)
            allowed = np.arange(n_rows) if indices is None else indices
            is_treated = (treatment > 0) & is_known & (in_pool[pool] >= least)
            rows = allowed[is_treated[allowed]]
            if not rows.size:
                covariates, k, least = [], 1, 1
                rows = allowed[treatment[allowed] > 0]
            strategy = MatchedControls(
                chosen_by(kind, treatment, draw(st.integers(1, 20)), indices),
                treatment,
                0,
                covariates,
                k=k,
                control_block_size=draw(st.none() | st.integers(1, 20)),
                redraw=draw(st.sampled_from(["visit", "never"])),
                replace=does_replace,
                unmatched="drop",
            )
            n_positions = None
            if kind == "sets":
                n_positions = int((-(-np.bincount(treatment[rows]) // 3) * 3).sum())
            return StrategyCase(
                strategy=strategy,
                n_rows=n_rows,
                rows=rows,
                n_positions=n_positions,
                is_repeating=kind in ("by weight", "balanced", "sets"),
                is_random=kind != "in order",
                is_match=matches(treatment, *covariates, n_distinct=1 if does_replace else k),
            )

        return cases

    def test_rows_that_are_not_there(self, cases):
        with pytest.raises(ParameterError, match="one value for each row"):
            MatchedControls(BlockShuffling(), [0, 1, 1], 0).n_positions(2)


def controls_of(strategy, n_rows, key, together):
    positions = np.arange(strategy.n_positions(n_rows))
    order = strategy.epoch_order(n_rows=n_rows, epoch_key=key)
    return order(positions), order.companions(positions, together=together)


@pytest.mark.parametrize("dtype", [np.int8, "Int64", np.float32, object, "category"])
def test_minus_one_is_missing_whatever_the_dtype(dtype):
    treatment = pd.Series([0, 0, 1, 1, 2, -1, 1]).astype(dtype)
    pool = pd.Series([5, 5, 5, -1, 5, 5, 5]).astype(dtype)
    strategy = MatchedControls(Streaming(), treatment, 0, [pool], k=2, unmatched="drop")
    rows, controls = controls_of(strategy, 7, key=0, together=3)
    assert rows.tolist() == [2, 4, 6]
    assert np.sort(controls).tolist() == [[0, 1]] * 3


N_CONTROLS = 23


def two_pools():
    """23 controls of one pool, 5 of another, in between 60 treated cells of each."""
    pool = np.repeat([0, 1, 0, 1], [N_CONTROLS, 5, 60, 60])
    treatment = np.repeat(["none", "drug"], [N_CONTROLS + 5, 120])
    order = np.random.default_rng(1).permutation(pool.size)
    return treatment[order], pool[order]


@pytest.mark.slow
@pytest.mark.parametrize("does_replace", [False, True])
def test_each_control_of_a_pool_is_as_likely_for_each_treated_cell(does_replace):
    k = 2
    treatment, pool = two_pools()
    strategy = MatchedControls(
        BlockShuffling(4), treatment, "none", [pool], k=k, replace=does_replace
    )
    n_epochs, drawn = 400, np.zeros((pool.size, pool.size), np.int64)
    for key in range(n_epochs):
        rows, controls = controls_of(strategy, pool.size, key * 7919, together=32)
        np.add.at(drawn, (rows[:, None], controls), 1)
    for row in np.flatnonzero(treatment == "drug"):
        members = np.flatnonzero((treatment == "none") & (pool == pool[row]))
        counts, expected = drawn[row, members], n_epochs * k / members.size
        assert drawn[row].sum() == counts.sum() == n_epochs * k
        # 120 cells, each a test of chi square with up to 22 degrees of freedom.
        chi_square = ((counts - expected) ** 2).sum() / expected
        assert chi_square < members.size - 1 + 6 * np.sqrt(2 * (members.size - 1))


def test_draws_of_a_fetch_are_neighbours_and_of_no_other_fetch():
    n = 4096
    treatment = np.repeat(["none", "drug"], n)
    strategy = MatchedControls(BlockShuffling(1), treatment, "none", control_block_size=32)
    _, controls = controls_of(strategy, 2 * n, key=5, together=512)
    starts = list[int]()
    for fetch in controls.reshape(-1, 512):
        distinct = np.unique(fetch)
        steps = np.diff(distinct, prepend=-2)
        assert (steps != 1).sum() <= 512 // 32 + 1  # one run may go on at the start of the pool
        starts += distinct[steps != 1].tolist()
    assert np.unique(starts).size > len(starts) * 0.9


def test_never_means_that_a_cell_keeps_its_controls():
    treatment, pool = two_pools()
    strategy = MatchedControls(BlockShuffling(4), treatment, "none", [pool], k=2, redraw="never")
    by_row = list[dict[int, tuple[int, ...]]]()
    for key, together in ((0, 16), (1, 16), (2, 64)):
        rows, controls = controls_of(strategy, pool.size, key, together)
        by_row.append(dict(zip(rows.tolist(), map(tuple, controls.tolist()), strict=True)))
    assert by_row[0] == by_row[1] == by_row[2]
    assert len(set(by_row[0].values())) > 20


def test_treated_cells_come_in_the_order_of_the_strategy_alone():
    treatment, pool = two_pools()
    strategy = MatchedControls(BlockShuffling(4), treatment, "none", [pool])
    alone = BlockShuffling(4, np.flatnonzero(treatment == "drug"))
    plans = [
        EpochPlan(strategy=each, n_rows=pool.size, batch_size=8, fetch_factor=2, seed=3)
        for each in (strategy, alone)
    ]
    first, second = (plan.delivered_rows(1) for plan in plans)
    assert np.array_equal(first, second)


def test_block_sizes():
    treatment, pool = two_pools()
    strategy: Any = MatchedControls(BlockShuffling(4), treatment, "none", [pool])
    assert strategy.block_size == 4
    resized: Any = replace(strategy, block_size=64)
    assert resized.strategy.block_size == resized.block_size == 64
    assert resized.strategy.indices.tolist() == strategy.strategy.indices.tolist()
    assert MatchedControls(Streaming(), treatment, "none", block_size=8).block_size == 8


def test_pools_of_other_parameters_are_refused():
    obs = pd.DataFrame({"drug": ["none", "a"] * 4, "plate": list("ppqqppqq")})
    adata = anndata.AnnData(np.ones((8, 1)), obs=obs.set_index(obs.index.astype(str)))
    bound: Any = MatchedControls(BlockShuffling(1), "drug", "none", "plate").bound_to(adata)
    assert replace(bound, block_size=2).strategy.indices.tolist() == [1, 3, 5, 7]
    with pytest.raises(ParameterError, match="another treatment, control, within, k or replace"):
        replace(bound, within=[obs["plate"].to_numpy()])


def test_labels_of_indices_stay_with_their_rows():
    """Weights and labels may be those of the strategy's indices, of which some are left out."""
    treatment = np.array(["none", "a", "b", "a", "none", "b", "b", "b"])
    indices = np.array([0, 1, 2, 4, 5, 7])
    inner = GroupedSampling(treatment[indices], 1, indices=indices)
    strategy: Any = MatchedControls(inner, treatment, "none")
    assert strategy.strategy.indices.tolist() == [1, 2, 5, 7]
    rows, _ = controls_of(strategy, 8, 0, 4)
    assert sorted(rows.tolist()) == [1, 2, 5, 7]
    weighted = BlockWeightedSampling(1, indices, np.array([9.0, 1, 0, 9, 0, 2]), total_size=30)
    rows, _ = controls_of(MatchedControls(weighted, treatment, "none"), 8, 0, 4)
    assert np.bincount(rows, minlength=8).tolist() == [0, 10, 0, 0, 0, 0, 0, 20]


@pytest.mark.parametrize("control", [0, False, np.int64(0), 0.0, [0], pd.Series([0]), {0}])
@pytest.mark.parametrize("dtype", [np.int16, np.float32, bool, object, "category"])
def test_a_control_that_is_a_number_or_boolean(control, dtype):
    treatment = pd.Series([0, 1, 1, 0, 1]).astype(dtype)
    rows, controls = controls_of(MatchedControls(Streaming(), treatment, control), 5, 0, 3)
    assert rows.tolist() == [1, 2, 4]
    assert np.isin(controls, [0, 3]).all()


def test_controls_that_are_given_twice_count_once():
    treatment = ["none", "a", "none", "a"]
    indices = [0, 0, 0, 1, 1, 2, 3]
    for key in range(20):
        strategy = MatchedControls(Streaming(indices), treatment, "none", k=2)
        rows, controls = controls_of(strategy, 4, key, 3)
        assert rows.tolist() == [1, 1, 3]
        assert np.sort(controls).tolist() == [[0, 2]] * 3


class OfTheUser(SamplingStrategy):
    shuffles_fetch = False

    def n_positions(self, n_rows):
        return n_rows

    def epoch_order(self, *, n_rows, epoch_key):
        return Permutation(n_rows, epoch_key)


def test_a_strategy_without_indices_must_visit_treated_cells():
    strategy = MatchedControls(OfTheUser(), ["a", "none", "a"], "none")
    with pytest.raises(ParameterError, match=r"^the strategy visits row 1, "):
        controls_of(strategy, 3, 0, 3)


TREATMENT = ["none", "a", "b", "none", "a", "b"]
PLATE: Any = ["p", "p", "p", "q", "q", None]


NOT_MATCHED: list[tuple[dict[str, Any], str]] = [
    (
        {"control": "DMSO"},
        "^`control`: treatment has no value 'DMSO'; there are: 'none', 'a', 'b'$",
    ),
    ({"control": "None"}, "^`control`: treatment has no value 'None'; near: 'none'$"),
    ({"control": []}, "^`control`: treatment has no value None; "),
    ({"within": [PLATE]}, r"^1 treated cells have no control .* row 5 \(within\[0\]=None\)"),
    ({"k": 2, "within": [PLATE]}, "^4 treated cells have fewer than k=2 .*replace=True"),
    (
        {"k": 2, "within": [PLATE], "unmatched": "drop"},
        "^4 treated cells have fewer than k=2 .*; none is left to visit: use fewer columns, or r",
    ),
    ({"within": [PLATE[:3]]}, "`within` must have one value for each of 6 cells, but got 3"),
    ({"within": {"plate", "line"}}, "`within` must be a list .* set, which has no order"),
    (
        {"control": ["none", "a", "b"]},
        "none of the cells that are visited is treated; check `control`",
    ),
    ({"k": 0}, "`k >= 1`"),
    ({"redraw": "always"}, "`redraw` must be one of"),
    ({"unmatched": "keep"}, "`unmatched` must be one of"),
    ({"strategy": "blocks"}, "`strategy` must be a SamplingStrategy without controls"),
    ({"strategy": BlockShuffling(2, [1, 2])}, "give `control_indices`"),
    ({"strategy": BlockShuffling(2, [1, 9])}, "`indices < 6`"),
    ({"control_indices": [9]}, "`indices < 6`"),
]


@pytest.mark.parametrize(("given_", "message"), NOT_MATCHED)
def test_refused(given_, message):
    parameters = {"strategy": BlockShuffling(2), "treatment": TREATMENT, "control": "none"}
    with pytest.raises(ParameterError, match=message) as raised:
        MatchedControls(**parameters | given_)
    assert "\n" not in str(raised.value)


def test_pools_of_one_cell_and_cells_left_out():
    strategy = MatchedControls(
        BlockShuffling(2), TREATMENT, "none", [PLATE], k=3, replace=True, unmatched="drop"
    )
    rows, controls = controls_of(strategy, 6, 0, 4)
    assert sorted(rows.tolist()) == [1, 2, 4]
    assert controls.tolist() == [[3 if row == 4 else 0] * 3 for row in rows.tolist()]


def test_controls_of_other_rows_than_those_of_the_strategy():
    strategy = MatchedControls(BlockShuffling(2, [1, 2]), TREATMENT, "none", control_indices=[3])
    rows, controls = controls_of(strategy, 6, 0, 4)
    assert sorted(rows.tolist()) == [1, 2]
    assert controls.ravel().tolist() == [3, 3]


@given(st.lists(st.sampled_from(["x", "y", "z", None]), min_size=8, max_size=40))
def test_labels_of_any_kind_give_the_same_pairs(labels):
    labels = ["x", "y", *labels]
    kinds = [labels, np.array(labels, object), pd.Categorical(labels), pd.Series(labels)]
    drawn = {
        controls_of(MatchedControls(BlockShuffling(2), each, "x"), len(labels), 1, 4)[1].tobytes()
        for each in kinds
    }
    assert len(drawn) == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).map(sorted), st.integers(0, 2**64 - 1))
def test_a_treated_cell_that_is_given_twice_counts_twice(indices, key):
    treatment = ["a"] * 31 + ["none"]
    strategy = MatchedControls(Streaming(indices), treatment, "none", control_indices=[31])
    assert np.sort(epoch_of(strategy, 32, key)).tolist() == indices
