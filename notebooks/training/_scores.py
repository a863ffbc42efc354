"""Scores of classifiers on cells that they were not trained on."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike

from cellfeed import CellDataset, ParameterError

from ._classifiers import MISSING, LinearClassifiers, summed_loss

__all__ = ["Score", "evaluate", "macro_f1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a classifier on some cells.

    Parameters
    ----------
    macro_f1
        See `macro_f1`.
    loss
        Mean cross-entropy, nats.
    """

    macro_f1: float
    loss: float


def macro_f1(labels: ArrayLike, predictions: ArrayLike) -> float:
    """Return the unweighted mean over classes of the F1 score.

    A class's score is ``2 n_right / (n_labelled + n_predicted)``, the harmonic mean of precision
    and recall. Classes that occur among the labels or the predictions count, as in
    scikit-learn: one that is predicted but never correct counts as 0.

    Parameters
    ----------
    labels, predictions
        Codes of the classes, non-negative integers, of the same shape, at least one.

    Raises
    ------
    ParameterError
        The shapes differ, a code is negative, or there is none.

    Examples
    --------
    >>> macro_f1([0, 0, 1, 1], [0, 0, 1, 2])  # the scores are 1, 2/3 and 0
    0.5555555555555555
    """
    known, predicted = np.asarray(labels), np.asarray(predictions)
    if known.shape != predicted.shape or known.size == 0 or min(known.min(), predicted.min()) < 0:
        msg = (
            "`labels` and `predictions` must be of one shape, not empty and not negative, "
            f"but have shapes {known.shape} and {predicted.shape}"
        )
        raise ParameterError(msg)
    counts = _ClassCounts(int(max(known.max(), predicted.max())) + 1)
    counts.add(torch.from_numpy(known.ravel()), torch.from_numpy(predicted.ravel()))
    return counts.macro_f1()


def evaluate(classifiers: LinearClassifiers, dataset: CellDataset) -> dict[str, Score]:
    """Return the scores of classifiers on one epoch of a dataset.

    Cells without a label are left out. Memory is that of a minibatch.

    Parameters
    ----------
    classifiers
        What `train_linear_classifiers` returned.
    dataset
        The cells to test on, from the collection that the classifiers were trained on, or from one
        with the same categories.

    Returns
    -------
    A score for each task, NaN if no cell has a label.

    Raises
    ------
    ParameterError
        The categories are not those that the classifiers were trained on.
    """
    tallies = {task: _Tally(len(names)) for task, names in classifiers.categories.items()}
    _check_categories(classifiers, dataset)
    device = classifiers.linear.weight.device
    with torch.no_grad():
        for batch in dataset.loader():
            minibatch = batch.to(device)
            for task, logits in classifiers(minibatch.X).items():
                tallies[task].add(logits, minibatch.obs[task])
    return {task: tally.score() for task, tally in tallies.items()}


class _ClassCounts:
    """How often each class was the label, was predicted, and was both."""

    def __init__(self, n_classes: int) -> None:
        self._counts = torch.zeros(3, n_classes, dtype=torch.int64)

    def add(self, labels: torch.Tensor, predictions: torch.Tensor) -> None:
        right = labels[labels == predictions]
        for place, codes in enumerate((labels, predictions, right)):
            self._counts[place] += torch.bincount(codes, minlength=self._counts.shape[1])

    def macro_f1(self) -> float:
        labelled, predicted, right = self._counts.double()
        occurs = labelled + predicted > 0
        return float((2 * right / (labelled + predicted))[occurs].mean())


class _Tally:
    """The counts of one task."""

    def __init__(self, n_classes: int) -> None:
        self._counts = _ClassCounts(n_classes)
        self._loss, self._n_cells = 0.0, 0

    def add(self, logits: torch.Tensor, codes: torch.Tensor) -> None:
        has_label = codes != MISSING
        self._counts.add(codes[has_label].cpu(), logits.argmax(dim=1)[has_label].cpu())
        self._loss += float(summed_loss(logits, codes))
        self._n_cells += int(has_label.sum())

    def score(self) -> Score:
        loss = self._loss / self._n_cells if self._n_cells else float("nan")
        return Score(macro_f1=self._counts.macro_f1(), loss=loss)


def _check_categories(classifiers: LinearClassifiers, dataset: CellDataset) -> None:
    for task, categories in classifiers.categories.items():
        column = dataset.collection.obs.get(task)
        if not np.array_equal(getattr(column, "categories", ()), categories):
            msg = (
                f"obs column {task!r} does not have the categories of training, in their order; "
                "open all files as one collection, and give a strategy the rows to visit"
            )
            raise ParameterError(msg)
