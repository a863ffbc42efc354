"""The `Trainer` of Hugging Face transformers, for datasets of cells."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from cellfeed.extending import ParameterError, PathError

__all__ = ["CellTrainer"]

_FILE = "cellfeed_loader.json"  # in the folder of a checkpoint


class _NoTrainer:
    """What a Trainer is made of where transformers is not installed."""

    def __init__(self, *_: Any, **__: Any) -> None:
        msg = (
            "`CellTrainer` needs transformers, which is not installed; install it with "
            "`pip install transformers accelerate`"
        )
        raise ImportError(msg, name="transformers")


try:
    _Trainer: Any = importlib.import_module("transformers").Trainer
except ImportError:
    _Trainer = _NoTrainer


class CellTrainer(_Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` that trains and evaluates on datasets of cells.

    ``CellTrainer(model, arguments, train_dataset=dataset)`` takes the minibatches of the dataset as
    they are, so ``batch_transform`` must return what the model takes, such as
    ``{"X": ..., "labels": ...}``; sizes of minibatches, shuffling and seeds are those of the
    datasets, and not those of the arguments. ``dataloader_num_workers`` and
    ``dataloader_pin_memory`` of the arguments apply.

    Checkpoints contain the position of the training: ``resume_from_checkpoint`` goes on with the
    minibatch that would have followed, without reading those before it.

    Raises
    ------
    ImportError
        transformers is not installed.
    ParameterError
        ``train_dataset`` is not a dataset of cells.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._resumed: Any = None
        self.args.ignore_data_skip = True  # the loader itself goes on where it was
        callback: Any = importlib.import_module("transformers").TrainerCallback()
        callback.on_save = _save_position
        self.add_callback(callback)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **options: Any) -> Any:
        """Train; see `transformers.Trainer.train`.

        Raises
        ------
        PathError
            The checkpoint has no position, or there is none.
        StateError
            It is of other cells, parameters or another seed.
        """
        if resume_from_checkpoint:
            folder = resume_from_checkpoint
            if folder is True:
                last = importlib.import_module("transformers.trainer_utils").get_last_checkpoint
                folder = last(self.args.output_dir)
            file = Path(folder or self.args.output_dir, _FILE)
            if not file.is_file():
                msg = f"{file}: no such file; resume from a checkpoint that a CellTrainer saved"
                raise PathError(msg)
            self._resumed = json.loads(file.read_text())
        return super().train(resume_from_checkpoint, *arguments, **options)

    def get_train_dataloader(self) -> Any:
        """Return the loader of ``train_dataset``, which begins where a checkpoint was saved."""
        loader = self._loader_of(self.train_dataset, "train_dataset")
        if self._resumed is not None:
            loader.load_state_dict(self._resumed)
            self._resumed = None
        return self.accelerator.prepare(loader)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return a loader of a dataset to evaluate on."""
        if isinstance(eval_dataset, str):
            eval_dataset = self.eval_dataset[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self.accelerator.prepare(self._loader_of(dataset, "eval_dataset"))

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of a dataset to predict on."""
        return self.accelerator.prepare(self._loader_of(test_dataset, "test_dataset"))

    def _loader_of(self, dataset: Any, name: str) -> Any:
        loader = getattr(dataset, "loader", None)
        if loader is None:
            msg = f"`{name}` must be a CellDataset, but got {type(dataset).__name__}"
            raise ParameterError(f"{msg}; use transformers.Trainer for others")
        is_pinned = self.args.dataloader_pin_memory and self.args.device.type == "cuda"
        options = {"pin_memory": True} if is_pinned else {}
        return loader(self.args.dataloader_num_workers or None, **options)


def _save_position(arguments: Any, state: Any, control: Any, **objects: Any) -> None:  # noqa: ARG001
    """Save the position of the training into the folder of a checkpoint."""
    if state.is_world_process_zero:
        file = Path(arguments.output_dir, f"checkpoint-{state.global_step}", _FILE)
        file.write_text(json.dumps(objects["train_dataloader"].state_dict()))
