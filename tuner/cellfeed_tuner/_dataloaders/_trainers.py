"""The `tune_trainer` function: the DataLoader of a training with Lightning or transformers."""

import copy
import inspect
import itertools
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from cellfeed import ParameterError
from cellfeed_tuner._dataloaders._timer import StepError
from cellfeed_tuner._dataloaders._tune import TunedDataLoader, tune_dataloader
from cellfeed_tuner._measuring._timing import Step

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")  # the same code, under two names


def tune_trainer(
    trainer: Any,
    model: Any = None,
    data: Any = None,
    *,
    step: Step | None = None,
    **options: Any,
) -> TunedDataLoader:
    """Tune the training DataLoader of a ``Trainer`` of Lightning or of transformers.

    With Lightning, what is measured includes ``model.training_step`` and its backward pass, on a
    copy of the model that belongs to no trainer: parameters, buffers and metrics of the model stay
    as they are, nothing is logged, and no optimizer steps. If a copy cannot show how long training
    takes, or may do more than that, the DataLoader is measured alone, and a warning says why: if
    training is not on the CPU, if the model optimizes by itself (``automatic_optimization`` is
    false) or is completed by ``setup`` or ``configure_model``, or if the step fails.

    With transformers, the DataLoader is measured alone.

    Parameters
    ----------
    trainer
        A ``Trainer`` of Lightning, or of transformers: anything with ``get_train_dataloader``.
    model
        With Lightning, the ``LightningModule``.
    data
        With Lightning, a DataLoader, or a ``LightningDataModule``, which is prepared and set up as
        ``fit`` does; the model's own ``train_dataloader`` if None.
    step
        A training step of your own, in place of the model's.
    **options
        Further parameters of `tune_dataloader`.

    Returns
    -------
    As `tune_dataloader`; `TunedDataLoader.training_arguments` are those for transformers'
    ``TrainingArguments``.

    Raises
    ------
    ParameterError
        As `tune_dataloader`; or there is no single training DataLoader.
    """
    if hasattr(trainer, "get_train_dataloader"):
        loader = trainer.get_train_dataloader()
        # Accelerate has wrapped it, to move minibatches to a GPU and to divide them among ranks.
        return tune_dataloader(getattr(loader, "base_dataloader", loader), step, **options)
    loader = _training_loader(model, data)
    if step is not None:
        return tune_dataloader(loader, step, **options)
    why = _obstacle(trainer, model)
    if not why:
        try:
            return tune_dataloader(loader, _step_of(copy.deepcopy(model).train()), **options)
        except StepError as error:
            why = str(error)
    warnings.warn(
        f"the training step was not measured ({why}), only the DataLoader; give `step=` to know "
        "what training waits for",
        stacklevel=2,
    )
    return tune_dataloader(loader, **options)


def _training_loader(model: Any, data: Any) -> DataLoader[Any]:
    """Return the DataLoader that Lightning would train with."""
    source = model if data is None else data
    if hasattr(source, "train_dataloader"):
        if data is not None:
            data.prepare_data()
            data.setup("fit")
        source = source.train_dataloader()
    if not isinstance(source, DataLoader):
        msg = (
            f"training must be with one torch.utils.data.DataLoader, but got "
            f"{type(source).__name__}; pass one as `data`"
        )
        raise ParameterError(msg)
    return source


def _obstacle(trainer: Any, model: Any) -> str:
    """Return why a copy of a model does not show what training does; empty if it does."""
    imported = [sys.modules[name] for name in _LIGHTNING if name in sys.modules]
    kinds = [each.LightningModule for each in imported if isinstance(model, each.LightningModule)]
    if not kinds:
        return f"{type(model).__name__} is no LightningModule"
    device = trainer.strategy.root_device
    if device.type != "cpu" or trainer.world_size > 1:
        return f"training is on {trainer.world_size} x {device.type}"
    if trainer.precision != "32-true":
        return f"training is in {trainer.precision}"
    if not model.automatic_optimization:
        return "the model optimizes by itself"
    completing = ("setup", "configure_model")
    found = [n for n in completing if getattr(type(model), n) is not getattr(kinds[0], n)]
    return f"`{found[0]}` may complete the model" if found else ""


def _step_of(model: Any) -> Step:
    """Return the training step of a model, with its backward pass."""
    numbers = itertools.count()
    takes_number = "batch_idx" in inspect.signature(model.training_step).parameters

    def step(minibatch: Any) -> None:
        minibatch = model.on_after_batch_transfer(model.on_before_batch_transfer(minibatch, 0), 0)
        number = (next(numbers),) if takes_number else ()
        found = model.training_step(minibatch, *number)
        loss = found["loss"] if isinstance(found, Mapping) else found
        if loss is not None:
            loss.backward()
            model.zero_grad()

    return step
