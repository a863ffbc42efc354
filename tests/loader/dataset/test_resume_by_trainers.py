"""Runs that others stop and resume: torchdata, Lightning, and whoever kills a process."""

import functools
import itertools
import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from tests.warm import python as warm
from torchdata.stateful_dataloader import StatefulDataLoader

from cellfeed import BlockShuffling, CellDataset, StateError


def _dataset() -> CellDataset:
    return CellDataset(np.arange(90), BlockShuffling(3), 4, 3, seed=5)


def _stateful(num_workers: int, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(_dataset(), batch_size=None, num_workers=num_workers, **options)


@functools.cache
def _whole(num_workers: int, **options: Any) -> list[list[int]]:
    """Four epochs of 23 minibatches."""
    reference = _stateful(num_workers, **options)
    return [each.tolist() for _ in range(4) for each in reference]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("n_before", [1, 8, 22, 23, 30, 46])
def test_the_loader_of_torchdata(num_workers, persistent, n_before):
    """Stopped after so many minibatches of epochs of 23."""
    whole = _whole(num_workers, persistent_workers=persistent)
    stopped = _stateful(num_workers, persistent_workers=persistent)
    for _ in range(n_before // 23):
        list(stopped)
    iterator = iter(stopped) if n_before % 23 else iter(())
    for _ in range(n_before % 23):
        next(iterator)
    state = stopped.state_dict()  # after the end of an iteration, or within one
    del iterator
    goes_on = _stateful(num_workers, persistent_workers=persistent)
    goes_on.load_state_dict(state)
    rest = [each.tolist() for _ in range(2) for each in goes_on]
    assert rest[:24] == whole[n_before : n_before + 24]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated", "ignore:ranks are not compared")
@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_the_loader_of_torchdata_on_other_ranks(num_workers, before, after):
    """A worker knows only what it has delivered itself."""

    def loader(rank, world_size):
        ranks = {"rank": rank, "world_size": world_size}
        dataset = CellDataset(np.arange(240), BlockShuffling(2), 4, 3, seed=5, **ranks)
        return StatefulDataLoader(dataset, batch_size=None, num_workers=num_workers)

    delivered = Counter[int]()
    for rank in range(before):
        stopped = loader(rank, before)
        for minibatch in itertools.islice(stopped, 13):
            delivered.update(minibatch.tolist())
        state = stopped.state_dict()
    resumed = [loader(rank, after) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(state)
    if num_workers > 1:
        with pytest.raises(StateError, match=f"on one of {before} ranks, but this is worker"):
            list(resumed[0])
        return
    for minibatch in itertools.chain(*resumed):
        delivered.update(minibatch.tolist())
    assert sorted(delivered) == list(range(240))
    assert delivered.total() - 240 < after


def test_lightning_saves_and_restores_it(tmp_path):
    """In the middle of an epoch, at its end and after it, with and without workers."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_LIGHTNING))
    printed = warm.output_of(script, tmp_path / "last.ckpt")
    for n_workers, n_before, whole, before, after in json.loads(printed):
        assert len(whole) == 36, (n_workers, n_before)
        assert before == whole[:n_before], (n_workers, n_before)
        assert after == whole[n_before:], (n_workers, n_before)


_LIGHTNING = """
    import json, logging, sys, warnings
    import numpy as np
    import torch
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl
    from cellfeed import BlockShuffling, CellDataset

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    path = sys.argv[1]

    class Model(pl.LightningModule):
        def __init__(self, n_wanted):
            super().__init__()
            self.layer, self.n_wanted, self.seen = torch.nn.Linear(1, 1), n_wanted, []

        def training_step(self, batch, number):
            self.seen.append([self.current_epoch, batch.tolist()])
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

        def on_train_batch_end(self, *arguments):
            if len(self.seen) == self.n_wanted:
                self.trainer.save_checkpoint(path)
                raise KeyboardInterrupt

    def fit(n_workers, n_wanted=None, checkpoint=None):
        model = Model(n_wanted)
        trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )
        dataset = CellDataset(np.arange(90), BlockShuffling(4), 8, 2, seed=3)
        try:
            trainer.fit(model, dataset.loader(n_workers), ckpt_path=checkpoint)
        except (KeyboardInterrupt, SystemExit):
            pass
        return model.seen

    found = []
    for n_workers, stops in ((0, (5, 12, 17, 24, 30)), (2, (5, 12, 30))):
        whole = fit(n_workers)
        for n in stops:
            before = fit(n_workers, n)
            found.append((n_workers, n, whole, before, fit(n_workers, checkpoint=path)))
    print(json.dumps(found))
"""


def test_lightning_in_the_ways_that_it_loses_its_place(tmp_path):
    """After a look, on the same minibatches, and where it drops a state or counts otherwise."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_LIGHTNING_ODDLY))
    found = json.loads(warm.output_of(script, tmp_path))
    assert found["after a look"] == found["whole"]
    assert found["a look within"] == [found["whole"], [0, 1, 2]]
    assert found["overfitting"] == found["whole"][:2] * 3
    assert found["held"] == [found["whole"][5:], []]
    for name, reason in (
        ("dropped", "`estimated_stepping_batches` was asked for before"),
        ("plain", "a DataLoader that is not `dataset.loader()` has no state"),
    ):
        seen, (warning,) = found[name]
        assert seen == found["whole"]
        assert warning.startswith("Lightning resumes within an epoch but has not restored this")
        assert f"because {reason}" in warning
        assert "hold the loader in a data module" in warning
    before = {cell for minibatch in found["whole"][:3] for cell in minibatch}
    for name in ("two ranks", "by loader", "reloaded", "by iterator", "limited"):
        rest = [minibatch for seen, _ in found[name] for minibatch in seen[:3]]
        assert sorted(cell for each in rest for cell in each) == sorted({*range(64)} - before)
        assert [[len(seen), said] for seen, said in found[name]] == [[3 + 4 + 4, []]] * 2
        assert found[f"{name}, validated"] == [0, 1, 2] * 2
    assert found["in a validation"] == [[4, 16], [8, 6]] * 2
    uninterrupted, stopped, resumed = found["in pairs"]
    assert stopped + resumed == uninterrupted
    seen, (said,) = found["resumed at an end before"]
    assert seen == found["whole"][8:]
    assert "starts again from its first minibatch, because the run had been resumed before" in said
    seen, (said,) = found["twice"]
    assert seen == found["whole"][8:]
    assert said.startswith("Lightning trains in epoch 1 again, though the loaded state is of its")
    for seen, said in found["max_steps"]:
        assert seen == found["whole"][8:]
        assert [each.partition(", as")[0] for each in said] == [
            "epoch 1 was set, so that the rest of epoch 0, after 5 minibatches, is not delivered"
        ]
    (limited, _), (before, _), (after, said) = found["shortened"]
    assert [before + after, said] == [limited, []]
    assert len(before) == 5
    assert len(after) == 10


_LIGHTNING_ODDLY = """
    import json, logging, re, sys, warnings
    import numpy as np
    import torch
    warnings.simplefilter("ignore")
    import pytorch_lightning as pl
    from cellfeed import BlockShuffling, CellDataset

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    path = f"{sys.argv[1]}/step.ckpt"

    class Model(pl.LightningModule):
        def __init__(self, stop=None):
            super().__init__()
            self.layer, self.stop, self.seen = torch.nn.Linear(1, 1), stop, []
            self.validated = []

        def training_step(self, batch, number):
            self.seen.append(batch.tolist())
            return self.layer(batch.float()[:, None]).mean()

        def validation_step(self, batch, number):
            if number == 0 and not self.trainer.sanity_checking:
                self.validated.append(self.current_epoch)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            n = self.trainer.estimated_stepping_batches
            return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=n)]

        def on_train_batch_end(self, *arguments):
            if len(self.seen) == self.stop:
                self.trainer.save_checkpoint(path)
                raise KeyboardInterrupt

    class Unscheduled(Model):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    class Iterating(Unscheduled):
        def training_step(self, dataloader_iter):
            batch, number, _ = next(dataloader_iter)
            return super().training_step(batch, number)

    class Pairing(Unscheduled):
        def training_step(self, dataloader_iter):
            self.validated.append(self.trainer.global_step)
            first, number, _ = next(dataloader_iter)
            super().training_step(first, number)
            return super().training_step(*next(dataloader_iter)[:2])

    class Looking(Unscheduled):
        def on_train_batch_end(self, *arguments):
            if len(self.seen) == 3:
                next(iter(self.trainer.train_dataloader.dataset))

    class Validating(Unscheduled):
        def stops(self):
            if self.stop and not self.trainer.sanity_checking:
                self.trainer.save_checkpoint(path)
                raise KeyboardInterrupt

        def on_validation_batch_end(self, *arguments):
            if self.stop == -1:
                self.stops()

        def on_validation_end(self):
            self.stops()

    class Held(pl.LightningDataModule):
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

    def loader(**ranks):
        return CellDataset(np.arange(64), BlockShuffling(4), 8, 2, seed=3, **ranks).loader()

    def plain():
        return torch.utils.data.DataLoader(loader().dataset, batch_size=None)

    def fit(data, stop=None, checkpoint=None, kind=Model, **options):
        model = kind(stop)
        trainer = fit.trainer = pl.Trainer(
            max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **options,
        )
        val = None if isinstance(data, Held) else loader()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                trainer.fit(model, data, val, ckpt_path=checkpoint)
            except (KeyboardInterrupt, SystemExit):
                pass
        fit.validated = model.validated
        said = [str(each.message) for each in said]
        known = re.compile("not restored|not deliv|again")
        return model.seen, [each for each in said if known.search(each)]

    looked_at = loader()
    next(iter(looked_at))
    found = {"whole": fit(loader())[0], "after a look": fit(looked_at)[0]}
    found["a look within"] = [fit(loader(), kind=Looking)[0], fit.validated]
    found["overfitting"] = fit(loader(), overfit_batches=2)[0]
    for name, data in (("dropped", loader), ("plain", plain), ("held", Held)):
        fit(data(), stop=5)
        found[name] = fit(data(), checkpoint=path)
    reloaded = {"reload_dataloaders_every_n_epochs": 1}
    for name, make, kind, options in (
        ("two ranks", Held, Unscheduled, {}), ("by loader", loader, Unscheduled, {}),
        ("reloaded", loader, Unscheduled, reloaded), ("by iterator", Held, Iterating, {}),
        ("limited", Held, Unscheduled, {"limit_train_batches": 100}),
    ):
        found[name], found[f"{name}, validated"] = [], []
        for rank in range(2):
            fit(make(), stop=3, kind=kind)
            resumed = make(rank=rank, world_size=2)
            found[name].append(fit(resumed, checkpoint=path, kind=kind, **options))
            found[f"{name}, validated"] += fit.validated
    found["in a validation"] = []
    for stop in (-1, -2):
        for before, after in ((2, 1), (1, 3)):
            stopped = fit(Held(rank=0, world_size=before), stop=stop, kind=Validating)
            resumed = fit(Held(rank=0, world_size=after), checkpoint=path, kind=Validating)
            found["in a validation"].append([len(seen) for seen, _ in (stopped, resumed)])
    pairs = {"kind": Pairing, "accumulate_grad_batches": 3}
    found["in pairs"] = []
    for stop, checkpoint in ((None, None), (4, None), (None, path)):
        fit(Held(), stop=stop, checkpoint=checkpoint, **pairs)
        found["in pairs"].append(fit.validated)
    fit(loader(), stop=8, kind=Unscheduled)
    fit(loader(), stop=3, checkpoint=path, kind=Unscheduled)
    found["resumed at an end before"] = fit(loader(), checkpoint=path, kind=Unscheduled)
    for checkpoint in (None, path):
        fit(Held(), stop=8, checkpoint=checkpoint, kind=Unscheduled)
    found["twice"] = fit(Held(), checkpoint=path, kind=Unscheduled)
    found["max_steps"] = []
    for make in (Held, loader):
        fit(make(), max_steps=5, kind=Unscheduled)
        fit.trainer.save_checkpoint(path)
        found["max_steps"].append(fit(make(), checkpoint=path, kind=Unscheduled))
    found["shortened"] = [
        fit(Held(), limit_train_batches=5, kind=Unscheduled, **options)
        for options in ({"stop": None}, {"stop": 5}, {"checkpoint": path})
    ]
    print(json.dumps(found))
"""


def test_a_training_that_is_killed_again_and_again(tmp_path):
    """At random moments, with other numbers of workers each time; every row is accounted for."""
    n_kills = settings().max_examples
    script = Path(__file__).with_name("killed_training.py")
    printed = warm.output_of(script, tmp_path, n_kills, 0, timeout=1800)
    n_killed, n_places = map(int, printed.split())
    assert n_killed == n_kills >= n_places > 1
    trainings = list(tmp_path.iterdir())
    assert trainings
    for training in trainings:
        seen = dict[int, Counter[int]]()
        for line in (training / "rows.txt").read_text().splitlines():
            epoch, *rows = map(int, line.split())
            seen.setdefault(epoch, Counter()).update(rows)
        assert sorted(seen) == list(range(12))
        assert all(rows == Counter(range(403)) for rows in seen.values())
