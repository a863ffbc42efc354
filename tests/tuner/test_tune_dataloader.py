"""Any DataLoader is made again as it was, measured here, and returned with the best settings."""

import itertools
import multiprocessing
import os
import pickle
import random
import re
import signal
import time
import types
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests import commands, short_replicates
from tests.tuner.reports import html_summary
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from cellfeed import ParameterError
from cellfeed_tuner import (
    AutotuneInterrupted,
    AutotuneResult,
    Configuration,
    theory,
    tune_dataloader,
    tune_trainer,
)
from cellfeed_tuner._dataloaders import _tune
from cellfeed_tuner._dataloaders._remade import remade
from cellfeed_tuner._interval import is_unknown

N_ROWS = 50
ROWS = TensorDataset(torch.arange(N_ROWS), torch.arange(N_ROWS) % 3)
TUNED: dict[str, Any] = {"workers": [0], "budget": 0.6, "verbose": False}


def tune(loader, *arguments, **options) -> Any:
    return tune_dataloader(loader, *arguments, **options)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    short_replicates.shorten(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def no_process_is_left():
    before = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == before


class Doubled(DataLoader[Any]):
    """A subclass whose constructor takes other arguments, and adds an attribute."""

    def __init__(self, n_rows, times):
        super().__init__(TensorDataset(torch.arange(n_rows)), batch_size=4, shuffle=True)
        self.times = times

    def __iter__(self):
        for (rows,) in super().__iter__():
            yield rows * self.times


class Fixed(DataLoader[Any]):
    """A subclass that decides itself."""

    @property
    def num_workers(self):
        return 0

    @num_workers.setter
    def num_workers(self, number):
        pass


class Counting(IterableDataset[int]):
    """Numbers; divided among workers, unless that is forgotten."""

    def __init__(self, n_rows=N_ROWS, *, is_divided=True, seconds=0.0):
        self.n_rows, self.is_divided, self.seconds = n_rows, is_divided, seconds

    def __iter__(self):
        worker = get_worker_info()
        numbers = iter(range(self.n_rows)) if self.n_rows else itertools.count()
        if worker is not None and self.is_divided:
            numbers = itertools.islice(numbers, worker.id, None, worker.num_workers)
        for each in numbers:
            time.sleep(self.seconds)
            yield each


class Computing(Dataset[Any]):
    """Numbers that take a processor some time."""

    def __len__(self):
        return N_ROWS

    def __getitem__(self, row):
        return sum(range(20_000)) + row


class Slow(Dataset[Any]):
    """Rows for which each read waits."""

    def __init__(self, seconds, n_rows=4000):
        self.seconds, self.n_rows = seconds, n_rows
        self.file = None

    def __len__(self):
        return self.n_rows

    def __getitem__(self, row):
        self.file = self.file or f"opened by {os.getpid()}"
        time.sleep(self.seconds)
        return row


def flat(minibatch):
    parts = minibatch if isinstance(minibatch, list | tuple) else [minibatch]
    return [each.tolist() if isinstance(each, torch.Tensor) else each for each in parts]


def seen(loader):
    """The minibatches of an epoch, with the same random states each time."""
    torch.manual_seed(5)
    for each in (loader, loader.sampler):
        if isinstance(getattr(each, "generator", None), torch.Generator):
            each.generator.manual_seed(7)
    return [flat(each) for each in itertools.islice(loader, 100)]


@st.composite
def loaders(draw):
    """A DataLoader of any kind that the constructor takes."""
    own = torch.Generator() if draw(st.booleans()) else None
    arguments: dict[str, Any] = {"generator": own, "timeout": 0}
    if draw(st.booleans()):
        arguments["collate_fn"] = list
    kind = draw(st.sampled_from(["shuffled", "sampler", "batches", "single", "iterable"]))
    batch_size = draw(st.integers(1, 9))
    rows = draw(
        st.sampled_from(
            [
                RandomSampler(ROWS, generator=own),
                SequentialSampler(ROWS),
                WeightedRandomSampler([1.0] * 5 + [0.0] * 45, 20, generator=own),
            ]
        )
    )
    if kind in {"shuffled", "sampler", "iterable"}:
        arguments |= {"batch_size": batch_size, "drop_last": draw(st.booleans())}
    if kind == "iterable":
        return DataLoader(Counting(), **arguments)
    if kind == "shuffled":
        arguments["shuffle"] = draw(st.booleans())
    if kind == "sampler":
        arguments["sampler"] = rows
    if kind == "batches":
        arguments["batch_sampler"] = BatchSampler(rows, batch_size, draw(st.booleans()))
    if kind == "single":
        arguments |= {"batch_size": None, "sampler": rows}
    return DataLoader(ROWS, **arguments)


class TestRemade:
    @given(loaders())
    def test_it_delivers_the_same_minibatches(self, loader):
        assert seen(remade(loader)) == seen(loader)

    @given(
        loaders(), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.booleans(),
        st.sampled_from(["fork", "spawn", "forkserver"]),
    )  # fmt: skip
    @pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'pin_memory' arg")
    def test_it_has_the_settings_and_nothing_else_changed(
        self, loader, workers, prefetch, persistent, pin, method
    ):
        settings: dict[str, Any] = {
            "num_workers": workers, "prefetch_factor": prefetch, "persistent_workers": persistent,
            "pin_memory": pin,
        }  # fmt: skip
        made = remade(loader, **settings, multiprocessing_context=method)
        assert made.multiprocessing_context.get_start_method() == method
        same = ("dataset", "batch_size", "drop_last", "collate_fn", "generator", "timeout")
        expected = settings | {name: getattr(loader, name) for name in same}
        assert {name: getattr(made, name) for name in expected} == expected
        back = remade(made, num_workers=0)
        assert (back.num_workers, back.prefetch_factor, back.persistent_workers) == (0, None, False)
        assert seen(back) == seen(loader)

    def test_a_subclass_keeps_its_class_and_attributes(self):
        loader = Doubled(20, times=3)
        made = remade(loader)
        assert type(made) is Doubled
        assert seen(made) == seen(loader)

    @pytest.mark.filterwarnings("ignore")  # of its import
    def test_torchdatas_is_made_again(self):
        stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
        loader = stateful(ROWS, batch_size=8, shuffle=True, snapshot_every_n_steps=3)
        made: Any = remade(loader)
        assert seen(made) == seen(loader)
        assert made.snapshot_every_n_steps == 3

    def test_with_another_batch_size_rows_come_in_the_same_order(self):
        loader = DataLoader(ROWS, batch_size=4, shuffle=True)
        rows = [[row for each, _ in seen(one) for row in each] for one in (
            loader, remade(loader, batch_size=10),
        )]  # fmt: skip
        assert rows[0] == rows[1]

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (lambda: [1, 2], "must be a torch.utils.data.DataLoader, but got list"),
            (lambda: object.__new__(DataLoader), "has no attribute `dataset`"),
            (
                lambda: Fixed(ROWS),
                "Fixed cannot be made again",
            ),
            (
                lambda: pytest.importorskip("accelerate.data_loader").DataLoaderShard(ROWS),
                "DataLoaderShard wraps another DataLoader; tune that one",
            ),
        ],
    )  # fmt: skip
    def test_what_cannot_be_made_again_is_refused_in_one_line(self, make, said):
        with pytest.raises(ParameterError, match=re.escape(said)) as error:
            remade(make(), num_workers=2)
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def tuned():
    loader = DataLoader(ROWS, batch_size=10, shuffle=True)
    with pytest.MonkeyPatch.context() as patch:
        short_replicates.shorten(patch.setattr)
        return tune(loader, **TUNED | {"budget": 0.3})


class TestHere:
    """Without workers: what a result says."""

    def test_only_settings_that_exist_are_listed(self, tuned, tmp_path):
        chosen = tuned.result.recommended
        assert dict(chosen.configuration) == {"num_workers": 0} == tuned.arguments
        assert tuned.training_arguments == {"dataloader_num_workers": 0}
        assert str(chosen.configuration) == "0 workers"
        assert tuned.result.dataset.unit == "rows"
        tuned.result.save(tmp_path / "result.json")
        assert AutotuneResult.load(tmp_path / "result.json") == tuned.result

    def test_no_entropy_is_invented(self, tuned):
        result = tuned.result
        assert result.dataset.labels == {}
        assert result.chosen.labels == {}

    def test_the_report_is_about_this_loader(self, tuned, capsys):
        _tune._print(tuned.result)
        said = capsys.readouterr().out
        assert re.search(r"Recommended: 0 workers\n[\d,]+ \[[\d,]+, [\d,]+\] rows/s", said)
        assert "loader = DataLoader(..., num_workers=0)" in said
        for each in (said, repr(tuned.result), html_summary(tuned.result)):
            assert not re.search(r"block|fetch|cells|entropy|mix|bits", each), each

    def test_an_endless_epoch_is_none(self, capsys):
        result = tune(DataLoader(Counting(0), batch_size=8), **TUNED | {"verbose": True}).result
        assert result.dataset.n_cells == 0
        assert "epoch" not in capsys.readouterr().out

    def test_labels_are_reported_as_delivered(self):
        """Minibatches in order of storage, whose entropies are known: 0, or one bit."""
        rows = TensorDataset(torch.arange(N_ROWS), torch.arange(N_ROWS) // 5 * 5 // 6)
        labels = [rows[k : k + 10][1].tolist() for k in range(0, N_ROWS, 10)]
        loader = DataLoader(rows, batch_size=10)
        true = [theory.entropy_bits(np.unique(each, return_counts=True)[1]) for each in labels]
        for label in (1, lambda minibatch: minibatch[1]):
            result = tune(loader, label=label, **TUNED).result
            (census,), (found,) = (each.labels.values() for each in (result.dataset, result.chosen))
            bits = found.entropy_bits
            assert min(true) < bits.measured.value < max(true)
            assert bits.expected == bits.measured
            assert census.n_labels == 8
        assert f"{bits.measured.value:.3f} bits" in html_summary(result)

    @pytest.mark.parametrize(
        ("dataset", "label"),
        [
            ([{"x": k, "y": k % 2} for k in range(40)], "y"),
            ([(k, k % 2) for k in range(40)], 1),
        ],
    )
    def test_a_label_is_a_key_or_a_position(self, dataset, label):
        result = tune(DataLoader(dataset, batch_size=8), label=label, **TUNED).result
        assert list(result.dataset.labels) == [str(label)]
        measured = result.chosen.labels[str(label)].entropy_bits.measured
        assert measured.value == pytest.approx(1.0)

    def test_random_states_and_the_dataset_stay_as_they_were(self):
        dataset, generator = Slow(0.0, n_rows=200), torch.Generator().manual_seed(3)
        loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)
        states = torch.get_rng_state(), generator.get_state(), random.getstate()
        tuned = tune(loader, **TUNED)
        assert torch.equal(torch.get_rng_state(), states[0])
        assert torch.equal(generator.get_state(), states[1])
        assert random.getstate() == states[2]
        assert dataset.file is None
        assert tuned.loader.dataset is dataset

    def test_the_step_takes_every_minibatch_and_what_training_waits_is_known(self):
        rows = list[int]()

        def step(minibatch):
            rows.extend(minibatch[0].tolist())
            time.sleep(0.002)

        result = tune(DataLoader(ROWS, batch_size=10, shuffle=True), step, **TUNED).result
        epochs = [sorted(rows[k : k + N_ROWS]) for k in range(0, len(rows) - N_ROWS, N_ROWS)]
        assert epochs[0] == list(range(N_ROWS))
        waiting = result.recommended.waiting
        assert 0 <= waiting.share.low <= waiting.share.value <= waiting.share.high <= 1
        assert waiting.share.value < 0.5
        assert result.constraints.step_seconds >= 0.002
        assert result.chosen.cells_per_second.value <= 10 / 0.002

    def test_throughput_is_that_of_minibatches_where_their_sizes_are_unknown(self):
        loader = DataLoader(Slow(0.004, n_rows=60), batch_size=None)
        result = tune(loader, **TUNED).result
        assert result.dataset.unit == "minibatches"
        assert result.chosen.cells_per_second.value <= 250

    def test_explain_knows_its_unit(self, tuned, tmp_path):
        tuned.result.save(tmp_path / "result.json")
        said = commands.autotune("explain", tmp_path / "result.json", "--workers", 0)
        assert said.exit_code == 0, said.output
        assert "rows/s" in said.output
        assert not re.search(r"block|fetch|cells|entropy|bits", said.output)

    def test_several_batch_sizes_are_compared_by_rows(self):
        """A minibatch costs, its rows do not."""

        def collate(rows):
            time.sleep(0.004)
            return torch.tensor(rows)

        loader = DataLoader(Slow(0.0, n_rows=1000), batch_size=10, collate_fn=collate)
        tuned = tune(loader, batch_sizes=[100], **TUNED | {"budget": 20.0})
        assert tuned.loader.batch_size == 100
        assert tuned.training_arguments["per_device_train_batch_size"] == 100
        speeds = {
            each.configuration["batch_size"]: each.cells_per_second
            for each in tuned.result.configurations
        }
        assert speeds[100].value > 1.5 * speeds[10].value  # ten times, if no prior knew better

    def test_several_batch_sizes_of_an_iterable_are_no_repeated_rows(self):
        loader = DataLoader(Counting(200), batch_size=10)
        result = tune(loader, batch_sizes=[5], **TUNED).result
        assert {each.configuration["batch_size"] for each in result.configurations} == {5, 10}
        assert not any(each.note for each in result.configurations)

    @pytest.mark.parametrize(
        ("loader", "options", "said"),
        [
            (DataLoader(ROWS), {"budget": 0}, "`0 < budget < infinity` must hold, but got"),
            (DataLoader(ROWS), {"seed": -1}, "`seed >= 0` must hold"),
            (DataLoader(ROWS), {"workers": [-1]}, "`workers` must be numbers of at least 0"),
            (DataLoader(ROWS), {"prefetch_factors": []}, "must be at least 1"),
            (DataLoader(ROWS, batch_size=None), {"batch_sizes": [8]}, "with a `batch_size`"),
            (DataLoader(ROWS), {"start_methods": ["none"], "workers": [1]}, "but got 'none'"),
            (DataLoader(ROWS), {"label": "y"}, "`label` gives no labels of a list: "),
            (DataLoader(ROWS), {"label": lambda _: {}}, "a number or a word for each row"),
            (DataLoader(ROWS), {"step": lambda _: 1 / 0}, "`step` failed: ZeroDivisionError"),
            (DataLoader(Counting(3), drop_last=True, batch_size=4), {}, "delivers no minibatch"),
            (DataLoader(ROWS, collate_fn=lambda _: 1 / 0), {}, "DataLoader fails: division by"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_measured_is_refused_in_one_line(self, loader, options, said):
        with pytest.raises(ParameterError, match=re.escape(said)) as error:
            tune(loader, **TUNED | options)
        assert "\n" not in str(error.value)

    def test_what_can_be_read_once_only_is_refused(self):
        class Once(IterableDataset[int]):
            numbers = iter(range(40))

            def __iter__(self):
                return self.numbers

        with pytest.raises(ParameterError, match="can be read only once"):
            tune(DataLoader(Once(), batch_size=8), **TUNED)

    def test_ctrl_c_keeps_what_was_found(self, monkeypatch):
        stages = list[str]()

        def interrupt(_, stage, *__):
            stages.append(stage)
            if stages.count("throughput") == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(_tune.LiveDisplay, "show", interrupt)
        with pytest.raises(AutotuneInterrupted) as interruption:
            tune(DataLoader(ROWS, batch_size=8), **TUNED | {"budget": 60.0, "verbose": True})
        result: Any = interruption.value.result
        assert result.interrupted
        assert result.recommended.configuration == Configuration()


BUDGET: dict[str, Any] = {"budget": 6.0, "verbose": False, "prefetch_factors": [2]}


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class TestWorkers:
    """With workers: what is chosen, and that they end."""

    @pytest.mark.parametrize("waits", [False, True])
    def test_more_are_tried_where_rows_wait(self, waits, monkeypatch):
        monkeypatch.setattr(_tune, "usable_cpu_count", lambda: 2)
        dataset = Slow(0.2) if waits else Computing()
        result = tune(DataLoader(dataset, batch_size=1), **BUDGET).result
        most = max(each.configuration.num_workers for each in result.configurations)
        assert most > 4 if waits else most == 4

    @pytest.mark.smoke
    def test_rows_that_are_waited_for_get_workers(self):
        """Four of them read four times as much, on any number of cores."""
        loader = DataLoader(Slow(0.005), batch_size=4)
        tuned = tune(loader, workers=[0, 4], **BUDGET)
        assert tuned.loader.num_workers == 4
        (alone,) = [e for e in tuned.result.configurations if e is not tuned.result.chosen]
        said = "As it was (0 workers), it had 0." in tuned.result.recommended.reason
        assert said != is_unknown(alone.relative)  # on a busy machine
        assert tuned.result.chosen.cells_per_second.value < 1.2 * 4 / 0.005
        assert tuned.result.chosen.peak_memory_bytes > 1e6

    def test_cheap_rows_of_a_short_epoch_get_none(self):
        loader = DataLoader(ROWS, batch_size=10, num_workers=2)
        tuned = tune(loader, workers=[0, 2], **BUDGET)
        assert tuned.loader.num_workers == 0
        was = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": False}
        assert Configuration(**was) in [each.configuration for each in tuned.result.configurations]

    def test_the_start_of_workers_counts_in_each_epoch(self):
        """An epoch is as long as the start, so that workers that stay read it much faster."""
        loader = DataLoader(Slow(0.001, n_rows=40), batch_size=1, num_workers=2)
        result = tune(loader, workers=[2], **BUDGET).result
        speeds = {
            each.configuration["persistent_workers"]: each.cells_per_second
            for each in result.configurations
        }
        assert result.recommended.configuration["persistent_workers"]
        assert speeds[True].value > 1.3 * speeds[False].value

    @pytest.mark.parametrize("n_rows", [60, 0], ids=["counted", "endless"])
    def test_rows_that_each_worker_repeats_are_told(self, n_rows):
        dataset = Counting(n_rows, is_divided=False, seconds=0.002)
        tuned = tune(DataLoader(dataset, batch_size=4), workers=[0, 1, 2], **BUDGET)
        assert tuned.loader.num_workers < 2
        by_workers = {each.configuration.num_workers: each for each in tuned.result.configurations}
        assert by_workers[2].status == "failed"
        assert "does not divide its rows among workers" in by_workers[2].note

    def test_rows_that_workers_divide_are_tuned(self):
        for n_rows in (200, 0):
            loader = DataLoader(Counting(n_rows, seconds=0.004), batch_size=4)
            tuned = tune(loader, workers=[0, 4], **BUDGET)
            assert tuned.loader.num_workers == 4
            assert all(each.status != "failed" for each in tuned.result.configurations)

    def test_what_fails_in_workers_only_is_a_setting_that_failed(self):
        class Fails(Slow):
            def __getitem__(self, row):
                if get_worker_info() is not None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return row

        tuned = tune(DataLoader(Fails(0.0), batch_size=4), workers=[0, 1], **BUDGET)
        assert tuned.loader.num_workers == 0
        (failed,) = [e for e in tuned.result.configurations if e.configuration.num_workers]
        assert failed.status == "failed"
        assert "DataLoader worker (pid" in failed.note

    def test_what_takes_too_much_memory_is_a_setting_that_failed(self):
        loader = DataLoader(Slow(0.002, n_rows=200), batch_size=4)
        tuned = tune(loader, workers=[0, 1, 2], memory=2_000_000, **BUDGET)
        assert tuned.loader.num_workers == 0
        notes = {e.configuration.num_workers: e.note for e in tuned.result.configurations}
        assert re.fullmatch(r"it takes [\d,]+ MB, more than the 2 MB that it may take", notes[1])
        assert notes[2] in {"", "1 worker took more memory than is given"}
        assert tuned.result.constraints.memory_bytes == 2_000_000

    def test_what_cannot_be_pickled_is_forked_or_refused_in_one_line(self, monkeypatch):
        loader = DataLoader(Slow(0.005), batch_size=4, collate_fn=lambda rows: rows)
        spawning = remade(loader, num_workers=1, multiprocessing_context="spawn")
        with pytest.raises(ParameterError, match=r"cannot be started by 'spawn'.*fork") as error:
            tune(spawning, **BUDGET)
        assert "\n" not in str(error.value)
        monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "spawn")
        tuned = tune(loader, workers=[0, 4], **BUDGET)
        with_workers = [e.configuration for e in tuned.result.configurations]
        with_workers = [each for each in with_workers if each.num_workers]
        assert {each["multiprocessing_context"] for each in with_workers} == {"fork"}
        assert next(iter(tuned.loader)) == [0, 1, 2, 3]

    def test_spawned_workers_are_measured(self):
        loader = DataLoader(ROWS, batch_size=10, num_workers=1, multiprocessing_context="spawn")
        options = BUDGET | {"budget": 20.0}
        result = tune(loader, workers=[0, 1], **options).result
        timed = [e for e in result.configurations if e.configuration.num_workers]
        assert any(each.cells_per_second for each in timed)

    def test_ctrl_c_ends_the_workers(self):
        n_steps = 0

        def step(_):
            nonlocal n_steps
            n_steps += 1
            if n_steps > 100 and multiprocessing.active_children():  # workers have begun
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(AutotuneInterrupted) as interruption:
            tune(DataLoader(Slow(0.005), batch_size=4), step, workers=[0, 2, 4], budget=600.0)
        result = interruption.value.result
        assert result.interrupted
        assert result.recommended is not None

    def test_a_notebook_tunes_a_dataset_of_its_cells_in_one_line(self, tmp_path):
        nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
        defined = (
            "import time\n"
            "from torch.utils.data import DataLoader, Dataset\n"
            "from cellfeed_tuner import tune_dataloader\n"
            "class Own(Dataset):\n"
            "    def __len__(self):\n"
            "        return 4000\n"
            "    def __getitem__(self, row):\n"
            "        time.sleep(0.005)\n"
            "        return row\n"
            "loader = DataLoader(Own(), batch_size=4, collate_fn=lambda rows: rows)\n"
        )
        tune = "loader, result = tune_dataloader(loader, budget=6, workers=[0, 4])"
        cells = [defined, tune, "print(loader.num_workers, next(iter(loader)))", "result"]
        notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)])
        nbclient.NotebookClient(notebook, kernel_name="python3").execute()
        told = "".join(
            each.get("text", "") or each.data["text/plain"] for each in notebook.cells[1].outputs
        )
        assert "Recommended: 4 workers" in told
        assert "Measuring throughput" in told
        assert notebook.cells[2].outputs[-1]["text"].strip() == "4 [0, 1, 2, 3]"
        assert "Recommended: 4 workers" in notebook.cells[3].outputs[0]["data"]["text/html"]


class TestTrainers:
    def test_transformers_gets_its_arguments(self):
        """A stand-in: all that is asked of a Trainer is its DataLoader."""
        loader = DataLoader(ROWS, batch_size=10)
        wrapped = types.SimpleNamespace(base_dataloader=loader)
        trainer = types.SimpleNamespace(get_train_dataloader=lambda: wrapped)
        tuned = tune_trainer(trainer, **TUNED)
        assert tuned.training_arguments == {"dataloader_num_workers": 0}
        assert tuned.loader.dataset is ROWS


@pytest.fixture
def lightning():
    module: Any = pytest.importorskip("lightning.pytorch")
    return module


@pytest.fixture
def trainer(lightning):
    return lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip


def module_of(lightning, **members):
    """A LightningModule that counts its minibatches, with other members."""

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self):
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1)
            self.n_steps = 0

        def training_step(self, minibatch, batch_idx):
            self.n_steps += 1
            self.log("step", float(batch_idx))
            time.sleep(0.002)
            return self.norm(self.layer(minibatch[0][:, None].float())).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return type("Model", (Model,), members)()


@pytest.mark.slow  # to import it
class TestLightning:
    def test_its_step_is_measured_on_a_copy(self, lightning, trainer):
        model = module_of(lightning)
        before = pickle.dumps([each.tolist() for each in model.state_dict().values()])
        tuned = tune_trainer(trainer, model, DataLoader(ROWS, batch_size=10), **TUNED)
        result: Any = tuned.result
        assert result.constraints.step_seconds >= 0.002
        assert result.recommended.waiting.share.value < 0.5
        assert model.n_steps == 0
        assert pickle.dumps([each.tolist() for each in model.state_dict().values()]) == before
        assert all(each.grad is None for each in model.parameters())

    @pytest.mark.parametrize(
        ("members", "why"),
        [
            ({"automatic_optimization": False}, "the model optimizes by itself"),
            ({"setup": lambda *_: None}, "`setup` may complete the model"),
            ({"training_step": lambda *_: 1 / 0}, "`step` failed: ZeroDivisionError"),
        ],
    )
    def test_where_that_is_not_safe_the_loader_is_measured_alone(
        self, lightning, trainer, members, why
    ):
        loader = DataLoader(ROWS, batch_size=10)
        with pytest.warns(UserWarning, match=f"was not measured .*{why}.*`step=`"):
            tuned = tune_trainer(trainer, module_of(lightning, **members), loader, **TUNED)
        assert tuned.result.constraints.step_seconds is None

    def test_the_loader_is_that_of_the_data_or_of_the_model(self, lightning, trainer):
        asked = list[str]()

        class Data(lightning.LightningDataModule):  # type: ignore[misc, name-defined]
            def setup(self, stage):
                asked.append(stage)

            def train_dataloader(self):
                return DataLoader(ROWS, batch_size=5)

        step = len
        model = module_of(lightning, train_dataloader=lambda _: DataLoader(ROWS, batch_size=7))
        assert tune_trainer(trainer, model, Data(), step=step, **TUNED).loader.batch_size == 5
        assert asked == ["fit"]
        assert tune_trainer(trainer, model, step=step, **TUNED).loader.batch_size == 7
        with pytest.raises(ParameterError, match=r"one torch.utils.data.DataLoader, but got list"):
            tune_trainer(trainer, model, [DataLoader(ROWS)], step=step, **TUNED)
