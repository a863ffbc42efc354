"""Training for one epoch."""

from collections.abc import Sequence

import torch

from cellfeed import CategoricalColumn, CellDataset, Collection, ColumnError, ParameterError

from ._classifiers import MISSING, LinearClassifiers, summed_loss

__all__ = ["train_linear_classifiers"]


def train_linear_classifiers(
    dataset: CellDataset,
    tasks: Sequence[str],
    *,
    learning_rate: float = 1e-3,
    device: torch.device | str = "cpu",
) -> LinearClassifiers:
    """Train linear classifiers with Adam over one epoch of a dataset's minibatches.

    All tasks are trained in one pass, so cells are read once. Each minimises the mean
    cross-entropy of a minibatch over the cells whose label is known.

    Parameters
    ----------
    dataset
        Minibatches of a `cellfeed.Collection`; its next epoch is used.
    tasks
        Categorical obs columns of that collection.
    learning_rate
        Of Adam; by default that of the scDataset paper.
    device
        Where the classifiers are trained, and stay.

    Raises
    ------
    ParameterError
        No task is given.
    ColumnError
        A task is not a categorical obs column of the collection.
    """
    if not tasks:
        msg = "`tasks` must name at least one obs column, but got none"
        raise ParameterError(msg)
    collection = dataset.collection
    classifiers = LinearClassifiers(
        collection.n_vars, {task: _column(collection, task).categories for task in tasks}
    )
    classifiers.to(device)
    optimizer = torch.optim.Adam(classifiers.parameters(), lr=learning_rate, fused=True)
    for batch in dataset.loader():
        minibatch = batch.to(device)
        loss = torch.zeros((), device=device)
        for task, logits in classifiers(minibatch.X).items():
            codes = minibatch.obs[task]
            # An epoch's last minibatch may be short, and a column may have gaps.
            loss = loss + summed_loss(logits, codes) / (codes != MISSING).sum().clamp(min=1)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return classifiers


def _column(collection: Collection, task: str) -> CategoricalColumn:
    column = collection.obs.get(task)
    if not isinstance(column, CategoricalColumn):
        msg = (
            f"{task!r} is no categorical obs column of {collection!r}; "
            f"open it with `obs=[{task!r}]`, and name a column of categories"
        )
        raise ColumnError(msg)
    return column
