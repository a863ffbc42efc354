"""What is read of files, as arrays; as a script, where torch is not installed."""

import pickle
import sys
from importlib.machinery import PathFinder
from typing import Any

import numpy as np

import cellfeed

OPTIONS: dict[str, dict[str, Any]] = {
    "sparse": {},
    "dense": {"dense": True},
    "float64": {"dtype": "float64"},
    "transformed": {"fetch_transform": lambda cells: cells},
    "transformed and dense": {"fetch_transform": lambda cells: cells, "dense": True},
}


class WithoutTorch(PathFinder):
    """Finds what is installed, except for torch."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


def arrays(cells):
    X = cells.X
    for convert in ("to_dense", "toarray"):
        X = getattr(X, convert, lambda same=X: same)()
    return np.asarray(X), {name: np.asarray(cells.obs[name]) for name in cells.obs}, cells.rows


def dataset_of(collection, **options):
    return cellfeed.CellDataset(collection, cellfeed.BlockShuffling(4), 8, 2, seed=0, **options)


def everything(paths):
    """What is the same with torch and without it."""
    collection = cellfeed.open_collection(paths, obs=["plate", "number"])
    dataset = dataset_of(collection)
    return {
        "taken": arrays(collection[np.array([40, 3, 3])]),
        "epochs": {
            name: [arrays(cells) for cells in dataset_of(collection, **each)]
            for name, each in OPTIONS.items()
        },
        "indexed": list(dataset_of(np.arange(40))),
        "rows": dataset.plan(epoch=1).fetch(0).rows,
        "length": len(dataset),
    }


def error_of(function):
    try:
        function()
    except ImportError as error:
        return type(error).__name__, error.name, str(error)
    return None


def without_torch(paths):
    collection = cellfeed.open_collection(paths)
    dataset, taken = dataset_of(collection), collection[[0]]
    first = {name: next(iter(dataset_of(collection, **each))) for name, each in OPTIONS.items()}
    return {
        "kinds": {name: (type(each), type(each.X).__name__) for name, each in first.items()},
        "errors": [
            error_of(dataset.loader),
            error_of(lambda: dataset.loader(num_workers=2)),
            error_of(taken.to_torch),
        ],
        "is_minibatch": isinstance(taken, cellfeed.Minibatch),
        "modules": [name for name in sys.modules if name.partition(".")[0] == "torch"],
    }


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch
    from cellfeed import *  # noqa: F403 - all of it is there

    sys.stdout.buffer.write(pickle.dumps((everything(sys.argv[1:]), without_torch(sys.argv[1:]))))
