"""What training would gain without loading: by a clock that is known, and in real loops."""

import contextlib
import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.dataset.torchrun import torchrun

from cellfeed import BlockShuffling, CellDataset, ParameterError, ReadOptions
from cellfeed_tuner import headroom

torch = pytest.importorskip("torch")

ROWS = np.arange(900)


class Clock:
    """Time that passes only where something says so."""

    def __init__(self):
        self.now = 1.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Loader:
    """A loader that reads so many fetches ahead, each in a known time, beside training."""

    def __init__(self, clock, *, seconds, fetch_factor, prefetch, n_fetches):
        self.clock, self.seconds, self.n_fetches = clock, seconds, n_fetches
        self.fetch_factor, self.prefetch = fetch_factor, prefetch
        self.read_options = ReadOptions(prefetch=prefetch)

    def __iter__(self):
        handed = list[float]()  # when each fetch was taken
        read = self.clock.now
        for number in range(self.n_fetches):
            is_room = handed[number - self.prefetch] if number >= self.prefetch else 0.0
            read = max(read, is_room) + self.seconds
            self.clock.now = max(self.clock.now, read)
            handed.append(self.clock.now)
            yield from range(self.fetch_factor)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("cellfeed_tuner._headroom.time", clock)
    return clock


@given(
    seconds=st.floats(0.01, 3),
    step=st.floats(0.001, 0.3),
    fetch_factor=st.integers(1, 12),
    prefetch=st.integers(1, 3),
)
def test_by_a_known_clock(seconds, step, fetch_factor, prefetch):
    clock = Clock()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cellfeed_tuner._headroom.time", clock)
        loader = Loader(
            clock,
            seconds=seconds,
            fetch_factor=fetch_factor,
            prefetch=prefetch,
            n_fetches=100_000,
        )
        with headroom(loader, seconds=200.0) as found:
            for _ in found:
                clock.now += step
        expected = max(step, seconds / fetch_factor)
        assert found.seconds_with_loading == pytest.approx(expected)
        assert found.seconds_without == pytest.approx(step)
        assert found.utilization.value == pytest.approx(step / expected)
        assert found.speedup.value == pytest.approx(expected / step)
        assert clock.now < 202.0


def measure(clock, loader, step=0.1, **options):
    with headroom(loader, **options) as found:
        for _ in range(1000):
            for _ in found:
                clock.now += step
    return found


@pytest.mark.parametrize(("seconds", "says"), [(1.0, "a bottleneck"), (0.1, "not the bottleneck")])
def test_says_what_follows(clock, seconds, says):
    loader = Loader(clock, seconds=seconds, fetch_factor=5, prefetch=1, n_fetches=1000)
    said = str(measure(clock, loader))
    assert f"is {says}" in said
    assert "changed the weights" in said
    assert str(measure(clock, loader, restore=[torch.nn.Linear(1, 1)])).count("\n") == 2


def test_progress_is_printed_from_the_start_and_every_few_seconds(clock, capsys):
    measure(clock, Loader(clock, seconds=1.0, fetch_factor=5, prefetch=1, n_fetches=1000))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "headroom: 0 of at most about 45 s, 0 rounds"
    passed = [int(line.split()[1]) for line in lines]
    assert len(lines) > 1
    assert all(5 <= after - before <= 15 for before, after in itertools.pairwise(passed))


@pytest.mark.parametrize("noise", [-0.03, 0.0, 0.03])
def test_nothing_is_said_to_be_gained_where_no_difference_is_measurable(clock, noise):
    """Steps take longer or shorter by chance."""
    loader = Loader(clock, seconds=1e-5, fetch_factor=1, prefetch=1, n_fetches=100_000)
    with headroom(loader, restore=[torch.nn.Linear(1, 1)]) as found:
        for _ in range(100):
            for _ in found:
                share = noise * (-1) ** found.n_rounds + 0.5 * abs(noise)
                clock.now += 0.1 * (1 + share * (clock.now % 2 < 1))
    said = str(found)
    assert "-" not in said
    assert found.speedup.low >= 1
    if found.utilization.high == 1:
        assert "ms a minibatch; no difference was measurable to minibatches that are ready" in said
        assert "if loading took no time" not in said
        assert "loading takes at most " in said
    else:
        assert found.seconds_without < found.seconds_with_loading


def test_an_epoch_may_be_shorter_than_a_turn(clock):
    loader = Loader(clock, seconds=0.2, fetch_factor=2, prefetch=1, n_fetches=3)
    found = measure(clock, loader, step=0.05)
    # Each epoch of three fetches waits for its first.
    assert found.seconds_with_loading == pytest.approx(0.1, rel=0.35)
    assert found.seconds_without == pytest.approx(0.05)


@pytest.mark.parametrize("seconds", [5.0, 30.0])
def test_says_how_long_it_needs(clock, seconds):
    loader = Loader(clock, seconds=seconds, fetch_factor=20, prefetch=1, n_fetches=1000)
    with pytest.raises(ParameterError, match=r"give more time, such as seconds=\d+") as caught:
        measure(clock, loader, seconds=6.0, step=0.01)
    needed = float(str(caught.value).partition("seconds=")[2].partition(",")[0])
    assert measure(clock, loader, seconds=needed, step=0.01).n_rounds


def test_training_that_becomes_slower(clock):
    """As on a machine that others begin to use: turns are as long as without them."""
    loader = Loader(clock, seconds=1e-5, fetch_factor=1, prefetch=1, n_fetches=100_000)
    begun = clock.now
    with headroom(loader, seconds=45.0) as found:
        for step, _ in enumerate(found):
            clock.now += 1e-4 if step < 10 else 1e-2
    assert found.n_rounds >= 3
    assert clock.now - begun < 10
    assert found.utilization.value == pytest.approx(1)


class Numbers:
    """A loader of a user's own, without a position."""

    def __iter__(self):
        return iter(range(5))


def test_training_that_ends_early_leaves_the_loader_as_it_was():
    loader = Numbers()
    found = headroom(loader)
    with pytest.raises(ParameterError, match="training ended after 1 minibatches"), found:
        next(iter(found))
    with pytest.raises(ParameterError, match="iterate within the block"):
        next(iter(found))
    with pytest.raises(ParameterError, match="nothing is measured yet"):
        str(found)
    with pytest.raises(ZeroDivisionError), headroom(loader) as found:
        next(iter(found)) / 0
    assert list(loader) == [0, 1, 2, 3, 4]


class Once(Numbers):
    def __iter__(self):
        return self

    def __next__(self):
        return 1


class Empty(Numbers):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("loader", "options", "says"),
    [
        (iter([1]), {}, "again and again, .* but got list_iterator"),
        (3, {}, "iterated over again and again"),
        (Once(), {}, "again and again"),
        (Empty(), {}, "has no minibatches"),
        (Numbers(), {"seconds": 0}, "`seconds > 0` must hold"),
        (Numbers(), {"restore": [3]}, "`restore` has a int without `state_dict`"),
    ],
)
def test_refuses(loader, options, says):
    with pytest.raises(ParameterError, match=says), headroom(loader, **options) as found:
        list(found)


def dataset():
    return CellDataset(ROWS, BlockShuffling(4), 8, 2, seed=3)


@contextlib.contextmanager
def no_waiting():
    """Turns of a hundredth of a second."""
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {"TURN_SECONDS": 0.01, "FEWEST_ROUNDS": 1, "MOST_ROUNDS": 1}.items():
            patched.setattr(f"cellfeed_tuner._headroom._{name}", value)
        yield


def numpy_state() -> list[int]:
    state: Any = np.random.get_state()  # noqa: NPY002
    return list(state[1])


def train(loader, model, optimizer):
    for _ in range(10_000):
        for minibatch in loader:
            optimizer.zero_grad()
            values = torch.as_tensor(np.asarray(minibatch), dtype=torch.float32)
            torch.nn.functional.dropout(model(values[:, None])).mean().backward()
            optimizer.step()
            random.random()
            np.random.random()  # noqa: NPY002


@pytest.mark.parametrize(
    "workers",
    [pytest.param(None, marks=pytest.mark.slow), 0, pytest.param(2, marks=pytest.mark.process)],
)
def test_nothing_is_kept_or_lost(workers):
    """Of weights, optimizers, random numbers, epochs and places in the data."""

    def of(data):
        return data if workers is None else data.loader(workers)

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    train_some = of(data := dataset())
    iterator = iter(train_some)
    taken = [np.asarray(next(iterator)) for _ in range(5)]
    del iterator
    before = {name: value.clone() for name, value in model.state_dict().items()}
    numbers: Any = random.getstate(), numpy_state(), torch.get_rng_state()
    with no_waiting(), headroom(train_some, restore=[model, optimizer]) as found:
        train(found, model, optimizer)
    assert found.n_steps > 6
    assert all((model.state_dict()[name] == value).all() for name, value in before.items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == numbers[0]
    assert numpy_state() == numbers[1]
    assert (torch.get_rng_state() == numbers[2]).all()
    rest = [np.asarray(each) for each in train_some]
    again = of(dataset())
    assert np.concatenate(taken + rest).tolist() == np.concatenate(list(again)).tolist()
    assert [np.asarray(each).tolist() for each in train_some] == [
        np.asarray(each).tolist() for each in again
    ]
    del data


def test_any_dataloader():
    values = torch.utils.data.TensorDataset(torch.arange(60.0))
    loader = torch.utils.data.DataLoader(values, batch_size=4, shuffle=True)
    with no_waiting(), headroom(loader) as found:
        for _ in range(1000):
            for (minibatch,) in found:
                assert minibatch.shape == (4,)
    assert found.n_rounds == 1


@pytest.mark.slow
@pytest.mark.process
def test_ranks_take_the_same_number_of_steps(tmp_path):
    """A step that all must take would never end if one took another number."""
    ranks = torchrun(
        tmp_path,
        2,
        """
        import time
        import torch
        from cellfeed_tuner import _headroom, headroom
        dist.init_process_group("gloo")
        _headroom._TURN_SECONDS = 0.05
        loader = make(seed=0).loader(0)
        with headroom(loader, seconds=4.0) as measured:
            for _ in range(100_000):
                for minibatch in measured:
                    time.sleep(0.002 * (1 + dist.get_rank()))
                    dist.all_reduce(torch.ones(1))
        found["n_steps"] = measured.n_steps
        found["epoch"] = epoch(loader)
        """,
    )
    assert ranks[0]["n_steps"] == ranks[1]["n_steps"] > 10
    rows = sorted(row for rank in ranks for minibatch in rank["epoch"] for row in minibatch)
    assert set(rows) == set(range(101))


@pytest.mark.filterwarnings("ignore")  # Lightning warns of small trainings
def test_lightning():
    pl: Any = pytest.importorskip("pytorch_lightning")

    class Model(pl.LightningModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, number):
            return self.layer(batch.float()[:, None]).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    loader, model = dataset().loader(0), Model()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with no_waiting(), headroom(loader, restore=[model]) as found:
        pl.Trainer(accelerator="cpu", max_epochs=1000, enable_checkpointing=False, **quiet).fit(
            model, found
        )
    assert found.n_rounds == 1
    assert np.concatenate(list(loader)).tolist() == np.concatenate(list(dataset())).tolist()
