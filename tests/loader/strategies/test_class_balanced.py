"""Classes that are drawn equally often, by labels of any kind."""

import types
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.sampling.epochs import counts_of

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CategoricalColumn,
    CellDataset,
    ClassBalancedSampling,
    ColumnError,
    GroupedSampling,
    ParameterError,
    open_collection,
)

keys = st.integers(0, 2**64 - 1)


class TestClassBalanced:
    @given(
        st.lists(st.sampled_from(["B", "NK", "T", None]), max_size=60),
        st.sampled_from(["B", "NK", "T"]),
        st.integers(1, 200),
        st.integers(1, 20),
        keys,
    )
    def test_classes_are_equally_frequent_and_cells_of_a_class_too(
        self, others, one, total, block, key
    ):
        labels = [*others, one]
        present = {each for each in labels if each is not None}
        strategy = ClassBalancedSampling(labels, block, total_size=total)
        counts = counts_of(strategy, len(labels), key)
        for label, count in zip(labels, counts, strict=True):
            expected = 0.0
            if label is not None:
                expected = total / len(present) / labels.count(label)
            assert abs(count - expected) < 1 + 1e-6

    @given(
        st.lists(st.sampled_from(["B", "NK", "T", None]), min_size=3, max_size=40),
        st.data(),
        st.booleans(),
    )
    def test_classes_are_counted_among_indices(self, labels, data, has_columns):
        """Of labels of all rows, of those of the indices, and of a column, in the same way."""
        labels = np.array(["B", *labels], object)
        rows = st.lists(st.integers(1, labels.size - 1), min_size=1, max_size=30)
        indices = np.array(sorted([0, *data.draw(rows)]))
        if indices.size == labels.size:
            return  # which of the two the labels are of is not known
        expected = counts_of(
            ClassBalancedSampling(labels[indices], indices=indices, total_size=60), labels.size
        )
        given = labels
        if has_columns:
            given = "kind"
        strategy: Any = ClassBalancedSampling(given, indices=indices, total_size=60)
        codes, kinds = pd.factorize(labels)
        column = CategoricalColumn(codes, kinds)
        strategy = strategy.bound_to(types.SimpleNamespace(obs={"kind": column}))
        counts = counts_of(strategy, labels.size)
        for kind in kinds[kinds != None]:  # noqa: E711
            is_of_it = labels == kind
            assert abs(counts[is_of_it].sum() - expected[is_of_it].sum()) <= 1 + 1e-6

    @given(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=60),
        st.sampled_from([0, 0.25, 0.5, 1]) | st.floats(0, 1),
        st.integers(1, 200),
        keys,
    )
    def test_draws_of_a_class_are_a_power_of_its_cells(self, labels, power, total, key):
        sizes = {label: labels.count(label) for label in labels}
        shares = {label: size ** (1 - power) for label, size in sizes.items()}
        counts = counts_of(
            ClassBalancedSampling(labels, 1, total_size=total, power=power), len(labels), key
        )
        for label, count in zip(labels, counts, strict=True):
            expected = total * shares[label] / sum(shares.values()) / sizes[label]
            assert abs(count - expected) < 1 + 1e-6

    @pytest.mark.parametrize("power", [-0.1, 1.1, float("nan")])
    def test_a_power_is_between_no_balance_and_balance(self, power):
        with pytest.raises(ParameterError, match="`0 <= power <= 1` must hold, but got power="):
            ClassBalancedSampling([0, 1], power=power)

    def test_full_power_is_the_default_in_a_state_too(self):
        datasets = [
            CellDataset(np.arange(6), ClassBalancedSampling([0, 0, 0, 0, 1, 1], 1, power=power), 2)
            for power in (1, 1.0, 0.5)
        ]
        default = CellDataset(np.arange(6), ClassBalancedSampling([0, 0, 0, 0, 1, 1], 1), 2)
        configurations = [each.state_dict()["configuration"] for each in (default, *datasets)]
        assert configurations[0] == configurations[1] == configurations[2] != configurations[3]

    def test_classes_that_lie_together_have_equal_shares(self):
        labels = np.repeat(["a", "b", "c"], [700, 20, 3])
        for key in range(20):
            counts = counts_of(ClassBalancedSampling(labels, total_size=600), 723, key)
            per_class = np.add.reduceat(counts, [0, 700, 720])
            assert abs(per_class - 200).max() <= 8

    def test_of_truth_values(self):
        strategy = ClassBalancedSampling([True, False, False], total_size=4)
        assert counts_of(strategy, 3).tolist() == [2, 1, 1]

    def test_later_changes_to_the_callers_array_have_no_effect(self):
        labels = np.array([0, 0, 1])
        strategy = ClassBalancedSampling(labels)
        labels[:] = 0
        assert np.asarray(strategy.labels).tolist() == [0, 0, 1]

    def test_labels_go_with_indices_that_are_sorted(self):
        with pytest.warns(UserWarning, match="not sorted") as caught:
            strategy = ClassBalancedSampling([1, 0, 0], 1, indices=[9, 4, 5], total_size=4)
        assert caught[0].filename == __file__
        assert counts_of(strategy, 10)[[4, 5, 9]].tolist() == [1, 1, 2]

    def test_without_replacement_a_rare_class_is_drawn_whole(self):
        labels = np.repeat([0, 1, 2], [500, 100, 10])
        strategy = ClassBalancedSampling(labels, total_size=110, replace=False)
        counts = counts_of(strategy, 610)
        assert counts.max() == 1
        per_class = np.add.reduceat(counts, [0, 500, 600])
        assert per_class[2] == 10
        assert abs(per_class[:2] - 50).max() <= 8


class TestObsColumn:
    def test_is_looked_up_when_a_dataset_is_made(self, plates):
        collection = open_collection(plates, obs=["cell_type"])
        column = collection.obs["cell_type"]
        assert isinstance(column, CategoricalColumn)
        codes = column.codes
        strategy = ClassBalancedSampling("cell_type", 1, total_size=300)
        dataset = CellDataset(collection, strategy, 8, seed=0)
        assert len(dataset) == 38
        drawn = np.concatenate([np.asarray(batch.rows) for batch in dataset])
        assert abs(np.bincount(codes[drawn]) - 100).max() < 5
        by_array = CellDataset(
            collection, ClassBalancedSampling(codes, 1, total_size=300), 8, seed=0
        )
        assert np.array_equal(drawn, np.concatenate([np.asarray(batch.rows) for batch in by_array]))

    def test_is_counted_among_the_indices(self, plates):
        collection = open_collection(plates, obs=["plate"])
        indices = np.arange(30, 63)  # 7 of p1, 26 of p2
        strategy = ClassBalancedSampling("plate", 1, indices, total_size=200).bound_to(collection)
        counts = counts_of(strategy, 63)
        assert counts[30:37].sum() == counts[37:].sum() == 100

    def test_of_anndata_in_memory(self):
        table = type("Table", (), {"obs": pd.DataFrame({"line": ["a", "a", "b"]})})()
        bound = ClassBalancedSampling("line", 1, total_size=4).bound_to(table)
        assert counts_of(bound, 3).tolist() == [1, 1, 2]

    def test_of_several_each_combination_is_a_class(self, plates):
        collection = open_collection(plates, obs=["plate", "cell_type"])
        obs: Any = collection.obs
        columns = [obs[name].codes for name in ("plate", "cell_type")]
        strategy = ClassBalancedSampling(("plate", "cell_type"), 1, total_size=600)
        counts = counts_of(strategy.bound_to(collection), 63)
        per_class = pd.Series(counts).groupby(columns).sum()
        assert len(per_class) == 6
        assert abs(per_class - 100).max() < 6
        with pytest.raises(ParameterError, match=r"bound_to\(collection\)"):
            strategy.epoch_order(n_rows=63, epoch_key=0)

    def test_that_is_absent(self, plates):
        collection = open_collection(plates, obs=["plate"])
        with pytest.raises(ColumnError, match=r"obs has no column 'line'.*: plate; open it with"):
            CellDataset(collection, ClassBalancedSampling("line"), 8)
        with pytest.raises(ColumnError, match="a ndarray has no obs"):
            CellDataset(np.arange(5), ClassBalancedSampling("line"), 8)

    def test_that_is_not_looked_up_yet(self):
        with pytest.raises(ParameterError, match=r"'line', whose .* bound_to\(collection\)"):
            ClassBalancedSampling("line").epoch_order(n_rows=3, epoch_key=0)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([-1, -2, 7]),
        np.array([-1, -2, 7], np.int8),
        np.array([-1.0, -2.0, 7.5]),
        np.array([-1, -2, "b"], object),
        [None, -2, 7],
        [-1, None, 7],
        pd.array([-1, -2, 7], dtype="Int64"),
        pd.Series([-1, -2, 7]).astype("category"),
        pd.Series([-1.0, -2.0, 7.0]).astype("category"),
        pd.Series([-1, "a", "b"]).astype("category"),
        np.ma.array([5, 5, 7], mask=[True, False, False]),
        np.ma.array(["a", "b", "b"], mask=[True, False, False]),
        np.ma.array([-1.0, 2.0, 2.5], mask=[False, True, False]),
        np.array([-1, -2, 7], ">f8"),
        np.array([-1, -2, 7], ">i4"),
        np.array([10**15, -1, 7]),
        np.array([np.nan, 0.5, 2]),
        ["B", None, "NK"],
        ["-1", "a", "b"],
        pd.Categorical([None, "B", "NK"]),
        pd.Series(["B", "NK", None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [ClassBalancedSampling, GroupedSampling])
def test_minus_one_is_missing_whatever_the_dtype(labels, kind):
    """As NaN and None are; other negative numbers, and what is text, are classes."""
    of_ten = labels.repeat(10) if hasattr(labels, "repeat") else np.repeat(labels, 10).tolist()
    options = {"set_size": 2} if kind is GroupedSampling else {"total_size": 40}
    dataset = CellDataset(np.repeat(np.arange(3), 10), kind(of_ten, **options), 4, seed=0)
    drawn = set(np.concatenate([*dataset, *dataset]).tolist())
    values = np.asarray(labels, object)
    if isinstance(labels, np.ma.MaskedArray):
        values[labels.mask] = None
    is_missing = [pd.isna(each) or each == -1 for each in values]
    assert drawn == {k for k in range(3) if not is_missing[k]}


def test_tensors_are_labels():
    torch = pytest.importorskip("torch")
    for labels in (torch.tensor([0, 1] * 10), torch.tensor([0.5, -1.0] * 10)):
        strategy = ClassBalancedSampling(labels)
        other = ClassBalancedSampling(labels.numpy())
        drawn, expected = (
            np.concatenate(list(CellDataset(np.arange(20), each, 20, seed=0)))
            for each in (strategy, other)
        )
        assert np.array_equal(drawn, expected)


def test_masked_weights_and_indices_are_refused():
    masked = np.ma.array(np.arange(20), mask=np.arange(20) < 5)
    with pytest.raises(ParameterError, match=r"`weights` are masked; give `weights.filled\(0\)`"):
        BlockWeightedSampling(4, weights=masked)
    with pytest.raises(ParameterError, match=r"`indices` are masked; give `indices.compressed"):
        BlockShuffling(4, indices=masked)
    unmasked: Any = BlockShuffling(4, indices=np.ma.array([3, 4])).indices
    assert unmasked.tolist() == [3, 4]
