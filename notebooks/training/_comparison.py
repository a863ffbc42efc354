"""The same classifiers trained on the same cells in different orders."""

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd
import torch

from cellfeed import CellDataset, Collection, SamplingStrategy
from cellfeed_tuner._interval import mean_with_interval

from ._scores import evaluate
from ._training import train_linear_classifiers

__all__ = ["compare_settings", "paired_differences"]

SCORES = ("macro_f1", "loss")


def compare_settings(
    collection: Collection,
    settings: Mapping[str, tuple[SamplingStrategy, int]],
    test: CellDataset,
    tasks: Sequence[str],
    *,
    seeds: Iterable[int],
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    device: torch.device | str = "cpu",
) -> pd.DataFrame:
    """Train and evaluate linear classifiers with each setting and seed.

    Parameters
    ----------
    collection
        The cells to train on.
    settings
        By name: the strategy, with the rows to train on as its ``indices``, and the fetch
        factor.
    test
        The cells to test on, over the same collection.
    tasks
        Categorical obs columns of the collection.
    seeds
        Seeds of the datasets, which determine the order of the cells. Nothing else is random.
    batch_size
        Rows of a minibatch in training.
    learning_rate, device
        As in `train_linear_classifiers`.

    Returns
    -------
    Columns ``setting``, ``seed``, ``task``, ``macro_f1`` and ``loss`` (see `Score`).

    Raises
    ------
    ParameterError, ColumnError
        As `train_linear_classifiers` and `evaluate` raise them.
    """
    seeds = tuple(seeds)
    rows = []
    for name, (strategy, fetch_factor) in settings.items():
        for seed in seeds:
            train = CellDataset(collection, strategy, batch_size, fetch_factor, seed=seed)
            classifiers = train_linear_classifiers(
                train, tasks, learning_rate=learning_rate, device=device
            )
            rows += [
                (name, seed, task, score.macro_f1, score.loss)
                for task, score in evaluate(classifiers, test).items()
            ]
    return pd.DataFrame(rows, columns=["setting", "seed", "task", *SCORES])


def paired_differences(scores: pd.DataFrame, *, reference: str) -> pd.DataFrame:
    """Return how far each setting's scores are from those of a reference, seed by seed.

    Parameters
    ----------
    scores
        What `compare_settings` returned.
    reference
        The setting to compare with.

    Returns
    -------
    Columns ``setting``, ``task``, ``score`` (``macro_f1`` or ``loss``), and the mean difference
    ``value`` with its 95 % interval from ``low`` to ``high`` (Student's, over seeds; infinite if
    there is one seed). The reference is left out.

    Examples
    --------
    >>> scores = pd.DataFrame(
    ...     [("a", 0, "drug", 0.2, 3.0), ("b", 0, "drug", 0.3, 2.0)],
    ...     columns=["setting", "seed", "task", "macro_f1", "loss"],
    ... )
    >>> paired_differences(scores, reference="b")[["setting", "task", "score", "value"]]
      setting  task     score  value
    0       a  drug  macro_f1   -0.1
    1       a  drug      loss    1.0
    """
    is_reference = scores["setting"] == reference
    pairs = scores[~is_reference].merge(
        scores[is_reference], on=["task", "seed"], suffixes=("", "_of_reference")
    )
    rows = []
    for (setting, task), part in pairs.groupby(["setting", "task"], sort=False):
        for score in SCORES:
            found = mean_with_interval(part[score] - part[f"{score}_of_reference"])
            rows.append((setting, task, score, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["setting", "task", "score", "value", "low", "high"])
