"""Where torch is not installed: the minibatches of the files given, pickled to stdout."""

import pickle
import sys
from importlib.machinery import PathFinder

import numpy as np


class WithoutTorch(PathFinder):
    """Finds what is installed, except for torch."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname == "torch" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutTorch

from cellfeed import *  # noqa: E402, F403 - all of it is there
from cellfeed import BlockShuffling, CellDataset, Cells, Minibatch, open_collection  # noqa: E402


def error_of(function):
    try:
        function()
    except ImportError as error:
        return type(error).__name__, error.name, str(error)
    return None


def fields(cells):
    assert type(cells) is Cells
    return cells.X, dict(cells.obs), cells.rows


collection = open_collection(sys.argv[1:], obs=["plate", "number"])
taken = collection[np.array([40, 3, 3])]
options = {
    "sparse": {},
    "dense": {"dense": True},
    "float64": {"dtype": "float64"},
    "transformed": {"fetch_transform": lambda cells: cells},
    "transformed and dense": {"fetch_transform": lambda cells: cells, "dense": True},
}
epochs = {
    name: [
        fields(cells) for cells in CellDataset(collection, BlockShuffling(4), 8, 2, seed=0, **each)
    ]
    for name, each in options.items()
}
indexed = list(CellDataset(np.arange(10), BlockShuffling(2), 4, seed=0))
dataset = CellDataset(collection, BlockShuffling(4), 8, 2, seed=0)
said = {
    "taken": fields(taken),
    "epochs": epochs,
    "indexed": indexed,
    "rows": dataset.plan(epoch=1).fetch(0).rows,
    "length": len(dataset),
    "errors": [
        error_of(dataset.loader),
        error_of(lambda: dataset.loader(num_workers=2)),
        error_of(taken.to_torch),
    ],
    "is_minibatch": isinstance(taken, Minibatch),
    "modules": [name for name in sys.modules if name.partition(".")[0] == "torch"],
}
sys.stdout.buffer.write(pickle.dumps(said))
