"""Lightning stops and resumes trainings on loaders, and on the data module that holds them."""

import contextlib
import logging
import re
import warnings
from itertools import chain
from typing import Any

import numpy as np
import pytest
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, ParameterError, StateError, Streaming

torch = pytest.importorskip("torch")
pl: Any = pytest.importorskip("pytorch_lightning")

from cellfeed.frameworks.lightning import CellDataModule  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns of small trainings


def dataset(n_rows=90, **options):
    return CellDataset(np.arange(n_rows), BlockShuffling(4), 8, 2, seed=3, **options)


class Model(pl.LightningModule):  # type: ignore[misc]
    """One that saves a checkpoint after so many steps, and stops."""

    def __init__(self, stop=None, path=None):
        super().__init__()
        self.layer, self.stop, self.path = torch.nn.Linear(1, 1), stop, path
        self.seen, self.inferred, self.validated = list[list[int]](), list[int](), list[int]()

    def training_step(self, batch, number):
        self.seen.append(batch.tolist())
        return self.layer(batch.float()[:, None]).mean()

    def validation_step(self, batch, number):
        self.inferred += batch.tolist()
        if number == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.current_epoch)

    def test_step(self, batch, number):
        self.inferred += batch.tolist()

    def predict_step(self, batch, number):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def on_train_batch_end(self, *_):
        if len(self.seen) == self.stop:
            self.save()

    def save(self):
        self.trainer.save_checkpoint(self.path)
        raise KeyboardInterrupt


class Scheduled(Model):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        n = self.trainer.estimated_stepping_batches  # for which Lightning drops states of loaders
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=int(n))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def trainer(**options):
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    defaults = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return pl.Trainer(**defaults | options)


def fit(data, model=None, checkpoint=None, validates=True, **options):
    """Return the minibatches of a training, and what it warns of its place."""
    model = model or Model()
    by = trainer(**options)
    has_own = not validates or isinstance(data, pl.LightningDataModule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(KeyboardInterrupt, SystemExit):
            by.fit(model, data, None if has_own else loader(), ckpt_path=checkpoint)
    known = re.compile("not restored|not deliv|again")
    said = [str(each.message) for each in caught if known.search(str(each.message))]
    if model.path is not None and model.stop is None:
        by.save_checkpoint(model.path)
    return model.seen, said


@pytest.mark.parametrize(
    ("kind", "num_workers"),
    [
        ("loader", 0),
        pytest.param("loader", 2, marks=[pytest.mark.process, pytest.mark.smoke]),
        ("module", 0),
        pytest.param("module", 2, marks=pytest.mark.process),
    ],
)
def test_training_goes_on_exactly(tmp_path, kind, num_workers):
    """By the module, also where a scheduler asks for the number of steps."""

    def run(checkpoint=None, **stop):
        if kind == "loader":
            return fit(dataset().loader(num_workers), Model(**stop), checkpoint, validates=False)
        data = CellDataModule(dataset(), num_workers=num_workers)
        return fit(data, Scheduled(**stop), checkpoint)

    whole, _ = run()
    assert len(whole) == 36
    for n in (5, 12, 30):  # within an epoch, at its end, within a later one
        path = tmp_path / f"{n}.ckpt"
        before, _ = run(stop=n, path=path)
        assert before == whole[:n]
        assert run(path) == (whole[n:], [])


def test_the_search_for_a_learning_rate_leaves_the_minibatches_as_they_are(tmp_path):
    tuner = pytest.importorskip("pytorch_lightning.tuner")
    expected, tried = fit(dataset().loader(), validates=False)[0], Scheduled()
    tried.lr = 0.1
    loader, by = dataset().loader(), trainer(default_root_dir=tmp_path)
    tuner.Tuner(by).lr_find(tried, loader, num_training=5)
    assert tried.seen
    tried.seen.clear()
    by.fit(tried, loader)
    assert tried.seen == expected


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


def loader(**ranks):
    """Epochs of 8 minibatches."""
    return dataset(64, **ranks).loader()


def plain():
    return torch.utils.data.DataLoader(loader().dataset, batch_size=None)


class Held(pl.LightningDataModule):  # type: ignore[misc]
    """A data module of the user's own."""

    def __init__(self, **ranks):
        super().__init__()
        self.loader = loader(**ranks)

    def val_dataloader(self):
        return loader()

    def train_dataloader(self):
        return self.loader

    def state_dict(self):
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state):
        self.loader.load_state_dict(state["loader"])


class Iterating(Model):
    def training_step(self, dataloader_iter):  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


class Looking(Model):
    def on_train_batch_end(self, *_):
        if len(self.seen) == 3:
            self.trainer.train_dataloader.dataset.peek(1)


class Validating(Model):
    """Stops in the first validation (-1), or at its end (-2)."""

    def save(self):
        if not self.trainer.sanity_checking:
            super().save()

    def on_validation_batch_end(self, *_):
        if self.stop == -1:
            self.save()

    def on_validation_end(self):
        if self.stop:
            self.save()


class TestPlacesThatLightningLoses:
    """After a look, on the same minibatches, and where it drops a state or counts otherwise."""

    @pytest.fixture(scope="class")
    def whole(self):
        return fit(loader(), Scheduled())[0]

    @pytest.fixture
    def path(self, tmp_path):
        return f"{tmp_path}/step.ckpt"

    def test_looks(self, whole):
        looked_at, looking = loader(), Looking()
        looked_at.peek(1)
        assert fit(looked_at)[0] == fit(loader(), looking)[0] == whole
        assert looking.validated == [0, 1, 2]

    def test_a_data_module_is_restored(self, whole, path):
        fit(Held(), Scheduled(5, path))
        assert fit(Held(), Scheduled(), path, num_sanity_val_steps=2) == (whole[5:], [])

    @pytest.mark.parametrize("make", [Held, loader])
    @pytest.mark.parametrize("kind", [Model, Iterating])
    def test_on_two_ranks(self, path, make, kind):
        """With streams, which leave the count of minibatches as it is."""
        streams: dict[str, Any] = {"streams": 2}
        whole = fit(make(**streams), kind())[0]
        fit(make(**streams), kind(3, path), num_sanity_val_steps=2)
        of_ranks = []
        for rank in range(2):
            model = kind()
            ranks = make(rank=rank, world_size=2, **streams)
            seen, said = fit(ranks, model, path, num_sanity_val_steps=2)
            assert (said, model.validated) == ([], [0, 1, 2])
            of_ranks.append(seen)
        assert [[*chain(*each)] for each in zip(*of_ranks, strict=True)] == whole[3:]

    @pytest.mark.parametrize("stop", [-1, -2])
    def test_in_a_validation(self, path, stop):
        stopped = fit(Held(), Validating(stop, path))[0]
        resumed = fit(Held(), Validating(), path)[0]
        assert (len(stopped), len(resumed)) == (8, 16)

    def test_a_limit_of_steps(self, whole, path):
        fit(Held(), Model(path=path), max_steps=5)
        seen, (said,) = fit(Held(), None, path)
        assert seen == whole[8:]
        assert said.startswith(
            "epoch 1 was set, so that the rest of epoch 0, after 5 minibatches, is not delivered"
        )

    def test_epochs_that_are_shortened(self, path):
        (limited, _), (before, _), (after, _) = (
            fit(Held(), model, checkpoint, limit_train_batches=5)
            for model, checkpoint in ((Model(), None), (Model(5, path), None), (Model(), path))
        )
        assert before + after == limited
        assert (len(before), len(after)) == (5, 10)


_BOTH = """
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


@pytest.mark.slow
@pytest.mark.process
def test_where_both_lightnings_are_imported_it_is_a_data_module_of_each():
    pytest.importorskip("lightning")
    assert warm.output_of("-c", _BOTH).split()[-2:] == ["30", "30"]
