"""Several linear classifiers of the same cells, as columns of one matrix."""

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray

__all__ = ["MISSING", "LinearClassifiers", "summed_loss"]

MISSING = -1


class LinearClassifiers(torch.nn.Module):
    """Softmax regression of several obs columns on ``log(1 + X)``.

    One matrix product serves all tasks. They share no parameter, so each is trained as it would be
    alone. All parameters start at zero.

    Parameters
    ----------
    n_vars
        Number of genes.
    categories
        The classes of each task: the categories of the obs column with that name.

    Examples
    --------
    >>> import numpy as np
    >>> classifiers = LinearClassifiers(100, {"line": np.array(["a", "b"]), "drug": np.arange(9)})
    >>> logits = classifiers(torch.ones(8, 100))
    >>> {task: tuple(each.shape) for task, each in logits.items()}
    {'line': (8, 2), 'drug': (8, 9)}
    """

    def __init__(self, n_vars: int, categories: Mapping[str, NDArray[Any]]) -> None:
        super().__init__()
        self.categories = dict(categories)
        self.linear = torch.nn.Linear(n_vars, sum(map(len, categories.values())))
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, X: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the logits of each task.

        Parameters
        ----------
        X
            Counts of a minibatch, shape (n_cells, n_vars), sparse CSR or dense.

        Returns
        -------
        For each task float32, shape (n_cells, number of its categories).
        """
        dense = X if X.layout == torch.strided else X.to_dense()
        logits = self.linear(dense.to(torch.float32).log1p())
        parts = logits.split([len(names) for names in self.categories.values()], dim=1)
        return dict(zip(self.categories, parts, strict=True))


def summed_loss(logits: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy in nats, summed over the cells whose label is known."""
    return torch.nn.functional.cross_entropy(logits, codes, ignore_index=MISSING, reduction="sum")
