"""The data module for Lightning holds its loaders."""

import contextlib
import logging
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, ParameterError, StateError, Streaming

torch = pytest.importorskip("torch")
pl: Any = pytest.importorskip("pytorch_lightning")

from cellfeed.frameworks.lightning import CellDataModule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of small trainings


def dataset(**options):
    return CellDataset(np.arange(90), BlockShuffling(4), 8, 2, seed=3, **options)


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, n_wanted=None, path=None):
        super().__init__()
        self.layer, self.n_wanted, self.path = torch.nn.Linear(1, 1), n_wanted, path
        self.seen = list[list[int]]()
        self.inferred = list[int]()

    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def validation_step(self, batch, number):
        self.inferred += batch.tolist()

    def test_step(self, batch, number):
        self.inferred += batch.tolist()

    def predict_step(self, batch, number):
        return batch

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        n = self.trainer.estimated_stepping_batches  # for which Lightning drops states of loaders
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=int(n))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_batch_end(self, *_):
        if len(self.seen) == self.n_wanted:
            self.trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def trainer(**options):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    return pl.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )


def fit(model, checkpoint=None, **options):
    with contextlib.suppress(KeyboardInterrupt, SystemExit), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer().fit(model, datamodule=CellDataModule(dataset(), **options), ckpt_path=checkpoint)
    return model.seen


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_goes_on_exactly_where_a_scheduler_asks_for_the_number_of_steps(
    tmp_path, num_workers
):
    whole = fit(Model(), num_workers=num_workers)
    assert len(whole) == 36
    for n in (5, 12, 30):
        path = tmp_path / f"{n}.ckpt"
        before = fit(Model(n, path), num_workers=num_workers)
        assert before + fit(Model(), path, num_workers=num_workers) == whole


def test_the_search_for_a_learning_rate_leaves_the_minibatches_as_they_are(tmp_path):
    tuner = pytest.importorskip("pytorch_lightning.tuner")
    trained, tried = Model(), Model()
    tried.lr = 0.1
    trainer().fit(trained, dataset().loader())
    loader, by = dataset().loader(), trainer(default_root_dir=tmp_path)
    tuner.Tuner(by).lr_find(tried, loader, num_training=5)
    assert tried.seen
    tried.seen.clear()
    by.fit(tried, loader)
    assert tried.seen == trained.seen


def test_each_part_has_its_cells():
    def streamed(start, stop):
        return CellDataset(np.arange(100), Streaming(range(start, stop)), 8)

    data = CellDataModule(
        dataset(), val=streamed(0, 20), test=streamed(20, 45), predict=streamed(45, 60)
    )
    model, by = Model(), trainer()
    by.fit(model, datamodule=data)
    assert model.inferred == [*range(20)] * 3
    model.inferred.clear()
    by.test(model, datamodule=data, verbose=False)
    assert model.inferred == [*range(20, 45)]
    assert torch.cat(by.predict(model, datamodule=data)).tolist() == [*range(45, 60)]
    alone = CellDataModule(test=streamed(0, 5))
    assert (alone.state_dict(), alone.train_dataloader(), alone.val_dataloader()) == ({}, [], [])
    alone.load_state_dict({})


def test_mistakes():
    with pytest.raises(ParameterError, match="give the dataset, not its loader"):
        CellDataModule(dataset().loader())
    with pytest.raises(StateError, match="it has no 'train'"):
        CellDataModule(dataset()).load_state_dict({})


def test_where_both_lightnings_are_imported_it_is_a_data_module_of_each():
    script = """
import warnings
import lightning.pytorch, pytorch_lightning, numpy, torch
from cellfeed import CellDataset, Streaming
from cellfeed.frameworks.lightning import CellDataModule

warnings.simplefilter("ignore")
for package in (lightning.pytorch, pytorch_lightning):
    class Model(package.LightningModule):
        n = 0

        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, _):
            self.n += len(batch)
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters())

    model, data = Model(), CellDataModule(CellDataset(numpy.arange(30), Streaming(), 10))
    package.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(model, datamodule=data)
    print(model.n)
"""
    pytest.importorskip("lightning")
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ran.stdout.split()[-2:] == ["30", "30"], ran.stderr
