"""A classifier in JAX, or in NumPy if JAX is not installed: no torch in the loop.

python examples/jax_numpy.py 'plates/*.h5ad'
"""

import importlib
import importlib.util
import sys
from typing import Any

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL = "cell_line"
LIBRARY = "jax.numpy" if importlib.util.find_spec("jax") else "numpy"
xp: Any = importlib.import_module(LIBRARY)


def step(weights: Any, X: Any, labels: Any, rate: float = 1e-3) -> tuple[Any, Any]:
    """Return the weights after a step of gradient descent, and the loss before it."""
    scores = X @ weights
    shares = xp.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    true = xp.eye(weights.shape[1], dtype=weights.dtype)[labels]
    loss = -xp.log((shares * true).sum(1)).mean()
    return weights - rate * (X.T @ (shares - true)) / len(X), loss


def main(plates: str) -> None:
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(
        collection,
        BlockShuffling(16),
        batch_size=64,
        fetch_factor=16,
        dense=True,
        transform=[NormalizeTotal(1e4), Log1p()],
        as_torch=False,
        seed=0,
    )
    n_classes = len(collection.obs[LABEL].categories)
    weights = xp.zeros((collection.n_vars, n_classes), xp.float32)
    for epoch in range(2):
        total = 0.0
        for cells in dataset.loader():  # iterating over dataset itself needs no torch at all
            weights, loss = step(weights, xp.asarray(cells.X), xp.asarray(cells.obs[LABEL]))
            total += float(loss)
        print(f"epoch {epoch} in {LIBRARY}: loss {total / len(dataset):.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
