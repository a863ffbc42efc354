"""A data module for Lightning, from datasets of cells."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

from cellfeed.dataset import CellDataset, InterleavedDatasets
from cellfeed.extending import ParameterError, StateError

__all__ = ["CellDataModule"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # the same code, under two names


def _data_modules() -> tuple[type, ...]:
    """Return the class of each Lightning that is in use, or else of one that is installed."""
    there = [name for name in _PACKAGES if sys.modules.get(name)]
    for name in () if there else _PACKAGES:
        try:
            return (importlib.import_module(name).LightningDataModule,)
        except ModuleNotFoundError:
            continue
    return tuple(sys.modules[name].LightningDataModule for name in there)


_BASES: Any = _data_modules()


class CellDataModule(*_BASES):  # type: ignore[misc]
    """The datasets of a training in Lightning: ``trainer.fit(model, datamodule=data)``.

    It holds the loader of the training, whose position is saved in Lightning's checkpoints and
    restored from them before anything else, so that a training goes on with the minibatch that
    would have followed, also where a scheduler asks for ``estimated_stepping_batches``.

    Import Lightning first: of ``lightning`` and ``pytorch_lightning``, this is a data module of
    each that is imported.

    Parameters
    ----------
    train
        The dataset to train on.
    val, test, predict
        Datasets to validate, test and predict on.
    num_workers
        Number of worker processes of each loader. If None, the number that ``autotune``
        recommended, else 0.
    **options
        Other parameters of `torch.utils.data.DataLoader`, for all loaders.

    Raises
    ------
    ImportError
        Lightning is not installed.
    ParameterError
        Something is not a dataset.

    Examples
    --------
    >>> import numpy as np
    >>> import pytorch_lightning as pl
    >>> from cellfeed import BlockShuffling, CellDataset, Streaming
    >>> from cellfeed.frameworks.lightning import CellDataModule
    >>> train = CellDataset(np.arange(100), BlockShuffling(4), batch_size=10, seed=0)
    >>> data = CellDataModule(train, val=CellDataset(np.arange(20), Streaming(), batch_size=10))
    >>> len(data.train_dataloader()), len(data.val_dataloader())
    (10, 2)
    """

    def __init__(
        self,
        train: CellDataset | InterleavedDatasets | None = None,
        val: CellDataset | InterleavedDatasets | None = None,
        test: CellDataset | InterleavedDatasets | None = None,
        predict: CellDataset | InterleavedDatasets | None = None,
        *,
        num_workers: int | None = None,
        **options: Any,
    ) -> None:
        if not _BASES:
            msg = (
                "`CellDataModule` needs Lightning, which is not installed; install it with "
                "`pip install lightning`"
            )
            raise ImportError(msg, name="lightning")
        super().__init__()
        datasets = {"train": train, "val": val, "test": test, "predict": predict}
        for name, dataset in datasets.items():
            kinds = (CellDataset, InterleavedDatasets)
            if dataset is not None and not issubclass(type(dataset), kinds):
                msg = f"`{name}` must be a CellDataset, but got {type(dataset).__name__}"
                raise ParameterError(f"{msg}; give the dataset, not its loader")
        self._datasets = datasets
        self._options = options
        if num_workers is not None:
            self._options["num_workers"] = num_workers
        self._loader = self._loader_of("train")

    def _loader_of(self, name: str) -> Any:
        dataset = self._datasets[name]
        return [] if dataset is None else dataset.loader(**self._options)

    def train_dataloader(self) -> Any:
        """Return the loader of the training, the same each time."""
        return self._loader

    def val_dataloader(self) -> Any:
        """Return a loader of the cells to validate on; an empty list if there are none."""
        return self._loader_of("val")

    def test_dataloader(self) -> Any:
        """Return a loader of the cells to test on; an empty list if there are none."""
        return self._loader_of("test")

    def predict_dataloader(self) -> Any:
        """Return a loader of the cells to predict on; an empty list if there are none."""
        return self._loader_of("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the training; see `CellDataset.state_dict`."""
        return {"train": self._loader.state_dict()} if self._datasets["train"] is not None else {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Resume from a state: training goes on with the minibatch that would have followed.

        Raises
        ------
        StateError
            The state is damaged, or of other cells, parameters or another seed.
        """
        if self._datasets["train"] is None:
            return
        if not isinstance(state_dict, Mapping) or "train" not in state_dict:
            msg = "the state is damaged: it has no 'train'; load that of a CellDataModule"
            raise StateError(msg)
        self._loader.load_state_dict(state_dict["train"])
