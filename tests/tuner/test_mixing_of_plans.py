"""How plans mix labels: of any strategy, in blocks of unequal sizes, and where labels are missing.

What minibatches have is held against what random sampling with the strategy's frequencies has.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.tuner.mixing import BlockPlans, Label, LoaderPlans, Mixing, Selected, label_of, mixing_of
from tests.tuner.reports import html_report, html_summary, printed

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    EpochPlan,
    GroupedSampling,
    ParameterError,
    SamplingStrategy,
    Streaming,
)
from cellfeed.sampling import ChunkedRows, ChunkStarts
from cellfeed_tuner import Tunable, label_entropy, strategy_entropy, theory


class TestStrategies:
    TYPES = np.repeat([0, 1, 2], [40_000, 4_000, 400])
    PLATES = np.tile(np.repeat([0, 1, 2, 3], 100), 111)
    WEIGHTS = np.array([1.0, 5.0, 50.0])[TYPES]

    def mixing(self, strategy: SamplingStrategy, **labels: Any):
        """Replay a strategy over labels of a collection that nobody reads."""
        selected = Selected(range(self.TYPES.size), strategy=strategy)  # type: ignore[arg-type]
        rows = selected.drawn_rows()
        made = [label_of(name, codes, drawn=rows) for name, codes in labels.items()]
        plans = BlockPlans(
            self.TYPES.size, batch_size=64, seed=0, selected=selected, drawn_rows=rows
        )
        return Mixing(made, plans, entropy_floor=0.99), selected

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "strategy",
        [
            ClassBalancedSampling(TYPES),
            BlockWeightedSampling(weights=WEIGHTS),
            BlockWeightedSampling(weights=WEIGHTS, total_size=20_000),
            ClassBalancedSampling(TYPES, total_size=900, replace=False),
            BlockShuffling(drop_last=True),
        ],
    )
    def test_blocks_are_held_against_what_the_strategy_draws(self, strategy):
        mixing, selected = self.mixing(strategy, type=self.TYPES)
        for block_size, fetch_factor in [(16, 1), (16, 64), (64, 4)]:
            plan = EpochPlan(
                strategy=replace(strategy, block_size=block_size),
                n_rows=self.TYPES.size,
                batch_size=64,
                fetch_factor=fetch_factor,
            )
            expected = strategy_entropy(self.TYPES, plan)
            found = mixing[block_size, fetch_factor]["type"]
            assert found.expected.value == pytest.approx(expected.bits.value, abs=0.02)
            # Draws of an epoch are dealt out, so that a short one gives a little more than endless.
            assert found.random == pytest.approx(expected.random_bits, abs=0.02)
            assert found.homogeneous == pytest.approx(expected.homogeneous_bits, abs=0.02)
        assert selected.n_drawn == strategy.n_positions(self.TYPES.size)

    def test_the_plan_that_is_replayed_is_the_one_that_is_read(self):
        strategy = ClassBalancedSampling(self.TYPES, 4, total_size=10_000)
        mixing, _ = self.mixing(strategy, type=self.TYPES, plate=self.PLATES)
        (shuffled,) = label_entropy(self.TYPES, batch_size=64, block_sizes=[16], fetch_factors=[4])
        found = mixing[16, 4]
        assert found["type"].expected.value > shuffled.bits.value + 0.5
        assert found["plate"].share_of_random > 0.8

    def test_balanced_classes_are_held_against_equal_ones(self):
        found = self.mixing(ClassBalancedSampling(self.TYPES), type=self.TYPES)[0][1, 64]["type"]
        equal = theory.independent_entropy_bits([1, 1, 1], 64)
        assert found.random == pytest.approx(equal, abs=1e-3)
        assert found.share_of_random > 0.99
        low, high = found.bounds
        assert found.expected.low <= high  # beyond chance
        assert found.expected.high >= low

    def test_small_collections_are_held_against_many_epochs(self):
        rng = np.random.default_rng(0)
        plates = np.repeat([0, 1], [360, 40])
        donors = rng.choice(4, 400, p=[0.9, 0.05, 0.03, 0.02])
        selected = Selected(range(400), strategy=ClassBalancedSampling(plates))  # type: ignore[arg-type]
        label = label_of("donor", donors, drawn=selected.drawn_rows())
        weights = np.bincount(donors, 1 / np.bincount(plates)[plates])
        shares = np.sort(label.target.counts / label.target.n_rows)
        assert shares == pytest.approx(np.sort(weights / weights.sum()), abs=0.002)
        assert selected.n_drawn == 400

    def test_missing_labels_are_held_against_as_many_known_ones(self):
        is_missing = np.random.default_rng(0).random(self.TYPES.size) < 0.9
        strategy = BlockWeightedSampling(weights=np.array([1.0, 10.0, 100.0])[self.TYPES])
        labels = np.where(is_missing, -1, self.TYPES)
        found = self.mixing(strategy, type=labels)[0][1, 64]["type"]
        assert found.random_of_known is not None
        assert found.share_of_random == pytest.approx(1, abs=0.01)

    @pytest.mark.slow
    @pytest.mark.parametrize("n_missing", [0, 9_000])
    def test_sets_are_held_against_random_sets(self, n_missing):
        groups = self.TYPES * 4 + self.PLATES
        plates = np.where(np.arange(self.PLATES.size) < n_missing, -1, self.PLATES)
        strategy = GroupedSampling(groups, set_size=16, weights="equal")
        mixing, _ = self.mixing(strategy, group=groups, plate=plates)
        for block_size, fetch_factor in product([1, 16], [1, 16]):
            found = mixing[block_size, fetch_factor]
            # A minibatch has four sets, and so at most four groups.
            assert found["group"].random < 2
            assert found["group"].share_of_random == pytest.approx(1, abs=0.01)
            assert found["group"].homogeneous is None
        assert mixing.storage_order(16) is None

    def test_streaming_has_no_blocks_to_choose_and_sets_those_that_divide_them(self):
        mixing, selected = self.mixing(Streaming(), type=self.TYPES)
        assert selected.block_sizes([4, 16]) == (1,)
        assert mixing[1, 64]["type"].share_of_random < 0.1
        assert mixing[1, 64]["type"].homogeneous is None
        selected = self.mixing(GroupedSampling(self.TYPES, set_size=16), type=self.TYPES)[1]
        assert list(selected.block_sizes([4, 16, 64])) == [4, 16]
        assert list(selected.block_sizes(range(1, 65))) == [1, 2, 4, 8, 16]
        said = r"divide the sets of 16 cells.* \[1, 2, 4, 8, 16\]"
        with pytest.raises(ParameterError, match=said):
            selected.block_sizes([3, 64])

    @pytest.mark.parametrize(
        ("names", "shuffled"),
        [(["drug"], True), (["plate"], False), (["drug", "plate"], False), (["drug"] * 2, True)],
    )
    def test_files_are_shuffled_only_if_they_are_by_every_label(self, names, shuffled):
        drug = np.random.default_rng(0).integers(0, 3, 3000)
        codes = {"plate": np.repeat([0, 1, 2], 1000), "drug": drug}
        plans = BlockPlans(3000, batch_size=16, seed=0)
        labels = [label_of(name, codes[name]) for name in names]
        order = Mixing(labels, plans, entropy_floor=0.99).storage_order(256)
        assert order is not None
        assert (order.already_shuffled, order.block_size) == (shuffled, 256)


class TestUnequalBlocks:
    """Blocks of 4 and of 36 rows, as often, and a label for each row: one for each block."""

    P = (0.5, 0.3, 0.15, 0.05)
    N_ROWS = 400_000

    @staticmethod
    def in_chunks(sizes):
        """Rows of which so many begin in each chunk."""
        pointer = np.append(np.repeat(np.arange(len(sizes)), sizes), len(sizes))
        rows = ChunkedRows(n_rows=pointer.size - 1, chunk_size=1, pointer=pointer)
        return ChunkStarts(lambda: [rows])

    @pytest.fixture(scope="class")
    @classmethod
    def unequal(cls):
        rng = np.random.default_rng(0)
        sizes = rng.permutation(np.repeat([4, 36], cls.N_ROWS // 40))
        labels = np.repeat(rng.choice(len(cls.P), sizes.size, p=cls.P), sizes)
        return BlockShuffling(1, align=cls.in_chunks(sizes)), labels

    def test_sizes_are_told(self, unequal):
        strategy, labels = unequal
        sizes = strategy.block_sizes(labels.size)
        assert (sizes.n_blocks, sizes.mean, sizes.largest) == (self.N_ROWS // 20, 20, 36)
        assert sizes.effective == pytest.approx((4**2 + 36**2) / 40)

    @pytest.mark.parametrize("fetch_factor", [1, 4, 64])
    def test_they_mix_as_equal_ones_of_the_effective_size(self, unequal, fetch_factor):
        strategy, labels = unequal
        plan = EpochPlan(
            strategy=strategy, n_rows=labels.size, batch_size=256, fetch_factor=fetch_factor
        )
        found, counts = strategy_entropy(labels, plan), np.bincount(labels)
        expected = theory.expected_entropy_bits(counts, 256, 32.8, fetch_factor)
        assert found.homogeneous_bits == pytest.approx(expected, abs=2e-3)
        assert found.bits.value == pytest.approx(expected, abs=0.025 if fetch_factor == 1 else 0.01)
        # Far nearer than by the mean size of blocks, where blocks matter.
        if fetch_factor < 64:
            by_mean = theory.expected_entropy_bits(counts, 256, 20, fetch_factor)
            assert abs(found.bits.value - expected) < abs(found.bits.value - by_mean) / 3
        assert theory.lower_bound_bits(counts, 256, 32.8) < found.bits.value + 0.02

    def test_between_whole_sizes_theory_is_interpolated(self):
        of = theory.expected_entropy_bits
        low, high = (of(self.P, 64, size, 4) for size in (16, 17))
        assert of(self.P, 64, 16.25, 4) == pytest.approx(0.75 * low + 0.25 * high)
        assert of(self.P, 64, 16.0, 4) == low
        low, middle, high = (theory.lower_bound_bits(self.P, 64, size) for size in (16, 16.5, 17))
        assert middle == pytest.approx((low + high) / 2)

    def test_blocks_of_one_size_are_those_that_are_not_aligned(self):
        labels = np.repeat(np.arange(4), 16_000)
        strategy = BlockShuffling(16, align=self.in_chunks(np.full(4_000, 16)))
        plan = EpochPlan(strategy=strategy, n_rows=64_000, batch_size=64, fetch_factor=4)
        (equal,) = label_entropy(labels, batch_size=64, block_sizes=[16], fetch_factors=[4])
        found = strategy_entropy(labels, plan)
        assert found.homogeneous_bits == theory.expected_entropy_bits([1] * 4, 64, 16, 4)
        assert found.bits.value == pytest.approx(equal.bits.value, abs=0.02)

    def test_a_block_of_many_fetches_is_one_observation(self):
        strategy = BlockShuffling(1, align=self.in_chunks(np.full(20, 400)))
        plan = EpochPlan(strategy=strategy, n_rows=8_000, batch_size=20, fetch_factor=1)
        assert strategy_entropy(np.repeat(np.arange(20) % 2, 400), plan).bits.value == 0


N_CELLS = 400_000


class InOrder(Tunable):
    """Another loader, which has a plan."""

    def open(self, configuration):
        raise NotImplementedError

    def planned_rows(self, configuration, n_minibatches):
        return np.arange(min(N_CELLS // 64, n_minibatches) * 64).reshape(-1, 64)


class TestMissingLabels:
    """Labels that most cells lack: what minibatches have is a share of what can be had."""

    N_KNOWN, N_LABELS = 1_000, 10
    SIZES = ((1, 1), (16, 64), (64, 1), (1024, 4), (1024, 256))

    def codes(self, *, shuffled):
        known = np.repeat(np.arange(self.N_LABELS), self.N_KNOWN // self.N_LABELS)
        if shuffled:
            known = np.random.default_rng(0).integers(0, self.N_LABELS, self.N_KNOWN)
        return np.concatenate([known, np.full(N_CELLS - self.N_KNOWN, -1)])

    @pytest.mark.parametrize("sizes", SIZES)
    def test_cells_that_are_shuffled_among_each_other_have_all_that_can_be_had(self, sizes):
        """They lie together, so that some minibatches have many of them, and most have none."""
        found = mixing_of({"line": self.codes(shuffled=True)})[sizes]["line"]
        assert found.share_of_random == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("sizes", SIZES)
    def test_no_order_has_more_than_random_sampling(self, sizes):
        found = mixing_of({"line": self.codes(shuffled=False)})
        assert found[sizes]["line"].share_of_random < 1.02

    def test_labels_that_lie_together_are_not_shuffled(self):
        order = mixing_of({"line": self.codes(shuffled=False)}).storage_order(1024)
        assert order is not None
        assert not order.already_shuffled

    def test_the_plan_of_another_loader_is_held_against_the_same(self):
        codes = self.codes(shuffled=True)
        label = Label.of_values("line", np.where(codes < 0, np.nan, codes))
        found = Mixing([label], LoaderPlans(InOrder()), entropy_floor=0.99)[1, 1]["line"]
        assert found.random_of_known is not None
        assert found.share_of_random == pytest.approx(1.0, abs=0.05)

    def test_blocks_of_one_label_have_nothing_where_random_samples_have_something(self):
        codes = np.repeat(np.arange(8), 8_192)
        whole = mixing_of({"line": codes})[16, 16]["line"]
        assert whole.random_of_known is None
        assert whole.share_of_random == whole.expected.value / whole.random
        found = mixing_of({"line": np.where(codes > 3, -1, codes)})[64, 1]["line"]
        assert found.share_of_random == 0.0
        # Half of the minibatches have 64 labelled cells, and half none.
        known = theory.random_entropy_bits([8_192] * 4, 64)
        assert found.random_of_known == pytest.approx(known / 2, rel=0.1)

    def test_that_most_cells_lack_a_label_is_said_everywhere(self, result_of):
        result = result_of("recommended")
        n_missing = int(0.9975 * result.dataset.n_cells)
        census = replace(result.dataset.labels["plate"], n_missing=n_missing)
        missing = replace(result, dataset=replace(result.dataset, labels={"plate": census}))
        said = "plate is missing in 99.75% of the cells"
        for page in (html_report(missing, code=""), html_summary(missing)):
            assert said in page
            assert "on average 0.16 per minibatch" in page
        assert said in printed(missing)
        assert said not in html_summary(result)
