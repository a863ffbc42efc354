"""Linear classifiers, against softmax regression and F1 scores written out in NumPy."""

from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from notebooks.training import (
    compare_settings,
    evaluate,
    macro_f1,
    paired_differences,
    train_linear_classifiers,
)
from scipy.sparse import csr_matrix
from scipy.stats import ttest_rel

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    ParameterError,
    Streaming,
    open_collection,
)

N_CELLS, N_VARS = 90, 6
TASKS = ("line", "drug")
TRAIN, TEST = np.arange(60), np.arange(60, 90)
RATE = 0.05


@pytest.fixture(scope="module")
def cells():
    """Expression that tells the line; a third of the drugs is missing.

    No whole numbers, or a gradient might vanish but for rounding, which Adam's first step turns
    into a whole one.
    """
    rng = np.random.default_rng(0)
    line = rng.integers(3, size=N_CELLS)
    counts = rng.gamma(1 + 4 * np.eye(3, N_VARS)[line]).astype(np.float32)
    drug = rng.integers(4, size=N_CELLS)
    drug[rng.random(N_CELLS) < 1 / 3] = -1
    return counts, {"line": line, "drug": drug}


@pytest.fixture(scope="module", params=["csr", "dense"])
def collection(request, cells, tmp_path_factory):
    counts, codes = cells
    obs = pd.DataFrame(
        {
            "line": pd.Categorical.from_codes(codes["line"], pd.Index(["a", "b", "c"])),
            "drug": pd.Categorical.from_codes(codes["drug"], pd.Index(["w", "x", "y", "z"])),
            "dosage": 1.0,
        },
        index=[f"cell{number}" for number in range(N_CELLS)],
    )
    path = tmp_path_factory.mktemp(request.param) / "cells.h5ad"
    X = csr_matrix(counts) if request.param == "csr" else counts
    ad.AnnData(X, obs=obs).write_h5ad(path)
    return open_collection(path, obs=["line", "drug", "dosage"])


def minibatches_of(collection, rows=TRAIN, seed=3):
    strategy = BlockShuffling(block_size=4, indices=rows)
    return CellDataset(collection, strategy, batch_size=8, fetch_factor=2, seed=seed)


def probabilities(X, weights, bias):
    logits = np.log1p(X) @ weights + bias
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


def trained_in_numpy(X, codes, n_classes, minibatches):
    """Softmax regression by Adam (Kingma and Ba 2015, algorithm 1), with its usual constants."""
    parameters = np.zeros((X.shape[1] + 1, n_classes))
    first, second = np.zeros_like(parameters), np.zeros_like(parameters)
    for step, rows in enumerate(minibatches, start=1):
        known = rows[codes[rows] >= 0]
        errors = probabilities(X[known], parameters[:-1], parameters[-1])
        errors -= np.eye(n_classes)[codes[known]]
        design = np.column_stack([np.log1p(X[known]), np.ones(known.size)])
        gradient = design.T @ errors / max(1, known.size)
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        corrected = first / (1 - 0.9**step), second / (1 - 0.999**step)
        parameters -= RATE * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)
    return parameters[:-1], parameters[-1]


def f1_by_class(labels, predictions):
    scores = []
    for each in sorted({*labels, *predictions}):
        pairs = list(zip(labels, predictions, strict=True))
        right = sum(known == predicted == each for known, predicted in pairs)
        wrong = sum((known == each) != (predicted == each) for known, predicted in pairs)
        scores.append(2 * right / (2 * right + wrong))
    return sum(scores) / len(scores)


def oracle_of(cells, task):
    """Weights and bias after an epoch of the plan that `minibatches_of` has."""
    counts, codes = cells
    delivered = minibatches_of(counts).plan(epoch=0)
    rows = np.concatenate([delivered.delivered_rows(n)[0] for n in range(delivered.n_fetches)])
    n_classes = codes[task].max() + 1
    return trained_in_numpy(counts, codes[task], n_classes, np.split(rows, range(8, 60, 8)))


@pytest.mark.parametrize("task", TASKS)
def test_an_epoch_is_adam_over_the_minibatches_of_the_plan(collection, cells, task):
    classifiers = train_linear_classifiers(minibatches_of(collection), [task], learning_rate=RATE)
    weights, bias = oracle_of(cells, task)
    # Categories are numbered by first appearance in a collection, and here by name.
    order = np.argsort(collection.obs[task].categories)
    linear = classifiers.linear
    np.testing.assert_allclose(linear.weight.detach().numpy()[order].T, weights, atol=1e-4)
    np.testing.assert_allclose(linear.bias.detach().numpy()[order], bias, atol=1e-4)


def test_tasks_trained_together_are_what_they_are_alone(collection):
    together = train_linear_classifiers(minibatches_of(collection), TASKS)
    start = 0
    for task in TASKS:
        alone = train_linear_classifiers(minibatches_of(collection), [task])
        stop = start + len(collection.obs[task].categories)
        torch.testing.assert_close(together.linear.weight[start:stop], alone.linear.weight)
        start = stop


def test_scores_are_those_of_cells_with_a_label(collection, cells):
    counts, codes = cells
    classifiers = train_linear_classifiers(minibatches_of(collection), TASKS, learning_rate=RATE)
    scores = evaluate(classifiers, CellDataset(collection, Streaming(indices=TEST), batch_size=8))
    assert list(scores) == list(TASKS)
    for task in TASKS:
        known = TEST[codes[task][TEST] >= 0]
        chances = probabilities(counts[known], *oracle_of(cells, task))
        labels = codes[task][known]
        loss = -np.log(chances[np.arange(known.size), labels]).mean()
        assert scores[task].loss == pytest.approx(loss, rel=1e-3)
        predicted = chances.argmax(axis=1)
        assert scores[task].macro_f1 == pytest.approx(f1_by_class(labels, predicted))
    assert (
        scores["line"].macro_f1 > 0.5 > scores["drug"].macro_f1
    )  # expression tells the line alone


def test_where_no_cell_has_a_label_there_is_no_score(collection, cells):
    _, codes = cells
    unlabelled = np.flatnonzero(codes["drug"] < 0)
    data = CellDataset(collection, Streaming(indices=unlabelled), batch_size=8)
    classifiers = train_linear_classifiers(data, ["drug"])
    assert not classifiers.linear.weight.any()
    score = evaluate(classifiers, data)["drug"]
    assert np.isnan([score.macro_f1, score.loss]).all()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1))
def test_macro_f1_is_the_mean_of_the_scores_of_classes_that_occur(pairs):
    labels, predictions = zip(*pairs, strict=True)
    assert macro_f1(labels, predictions) == pytest.approx(f1_by_class(labels, predictions))


@pytest.mark.parametrize(
    ("labels", "predictions"), [([0, 1], [0]), ([], []), ([0, -1], [0, 1]), ([0, 1], [0, -1])]
)
def test_macro_f1_refuses_what_is_no_pair_of_codes(labels, predictions):
    with pytest.raises(ParameterError, match="must be of one shape, not empty and not negative"):
        macro_f1(labels, predictions)


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        (["plate"], "'plate' is no categorical obs column"),
        (["dosage"], "'dosage' is no categorical obs column"),
        ([], "must name at least one obs column"),
    ],
)
def test_tasks_are_categorical_columns(collection, tasks, said):
    with pytest.raises((ColumnError, ParameterError), match=said):
        train_linear_classifiers(minibatches_of(collection), tasks)


def test_codes_of_another_collection_are_refused(collection):
    obs = pd.DataFrame({"line": pd.Categorical(["c", "a"])}, index=["0", "1"])
    other = open_collection(ad.AnnData(np.ones((2, N_VARS), np.float32), obs=obs), obs=["line"])
    classifiers = train_linear_classifiers(minibatches_of(collection), ["line"])
    with pytest.raises(ParameterError, match="'line' does not have the categories of training"):
        evaluate(classifiers, CellDataset(other, Streaming(), batch_size=2))


def test_a_comparison_trains_and_evaluates_with_each_setting_and_seed(collection):
    settings = {
        "in order": (Streaming(indices=TRAIN), 1),
        "blocks": (BlockShuffling(block_size=4, indices=TRAIN), 2),
    }
    test = CellDataset(collection, Streaming(indices=TEST), batch_size=8)
    found = compare_settings(
        collection, settings, test, TASKS, seeds=(3, 4), batch_size=8, learning_rate=RATE
    )
    by_run: Any = found.set_index(["setting", "seed", "task"])
    assert len(by_run) == 2 * 2 * 2
    for seed in (3, 4):
        train = minibatches_of(collection, seed=seed)
        alone = evaluate(train_linear_classifiers(train, TASKS, learning_rate=RATE), test)
        for task, score in alone.items():
            run = by_run.loc[("blocks", seed, task)]
            assert run.tolist() == [score.macro_f1, score.loss]
    first, second = (by_run.xs(seed, level="seed")["loss"] for seed in (3, 4))
    assert first["in order"].equals(second["in order"])  # nothing in it is random
    assert not first["blocks"].equals(second["blocks"])


def test_differences_are_taken_seed_by_seed():
    rng = np.random.default_rng(0)
    index = pd.MultiIndex.from_product(
        [["all", "few", "some"], range(5), TASKS], names=["setting", "seed", "task"]
    )
    scores = pd.DataFrame(rng.random((len(index), 2)), index, ["macro_f1", "loss"])
    found = paired_differences(scores.sample(frac=1, random_state=0).reset_index(), reference="all")
    assert len(found) == 2 * len(TASKS) * 2
    rows: Any = found.itertuples()
    for row in rows:
        of_task: Any = scores.xs(row.task, level="task")[row.score]
        test = ttest_rel(of_task[row.setting], of_task["all"])
        interval = test.confidence_interval(0.95)
        assert [row.low, row.high] == pytest.approx([interval.low, interval.high])
        assert row.value == pytest.approx((of_task[row.setting] - of_task["all"]).mean())
