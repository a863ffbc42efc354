"""What the controller chooses, on machines that exist in numbers only."""

import random
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellfeed._fetch import Controller, FetchTimes, Setting

BAD = Setting(1, 1)
NOTHING = dict.fromkeys(
    ["waiting", "training", "processor", "planning", "reading", "decoding"], 0.0
)
SECONDS = 1.0


@dataclass
class Machine:
    """A machine that reads one fetch while it trains on the one before.

    Threads of training and of reading share the processors equally. With a barrier, training is
    as fast as the slowest of its threads.

    Attributes
    ----------
    decode, step
        Processor time of decoding a fetch, and time of training on it if nothing else runs.
    latency
        Time from the request of a fetch to its bytes.
    """

    processors: int = 8
    decode: float = SECONDS
    step: float = 0.1 * SECONDS
    training_threads: int = 0
    has_barrier: bool = False
    latency: float = 0.0
    noise: float = 0.0
    seed: int = 0
    number: int = 0
    now: float = 0.0
    arrivals: dict[int, float] = field(default_factory=dict)

    def __post_init__(self):
        self.random = random.Random(self.seed)

    def fetch(self, setting):
        """Return the times of the next fetch."""
        for number in range(self.number, self.number + setting.prefetch + 1):
            self.arrivals.setdefault(number, self.now + self.noisy(self.latency))
        reading = max(0.0, self.arrivals.pop(self.number) - self.now)
        self.number += 1
        to_train, to_decode = self.noisy(self.step), self.noisy(self.decode)
        busy, n, training_threads = to_train, setting.num_threads, self.training_threads
        alone = min(n, self.processors)
        share = min(1.0, self.processors / (n + training_threads)) if training_threads else 1.0
        speed, rate = share**2 if self.has_barrier else share, min(n * share, alone)
        before = min(reading, to_train)  # until the bytes are there
        both = min((to_train - before) / speed, to_decode / rate)
        trained = before + both + max(0.0, to_train - before - both * speed)
        decoded = reading + both + max(0.0, to_decode - both * rate) / alone
        if before == to_train:
            trained = to_train
        taken = max(trained, decoded)
        self.now += taken
        return FetchTimes(
            waiting=taken - trained,
            training=trained,
            processor=busy if training_threads else 0.0,
            planning=0.0,
            reading=n * reading,
            decoding=n * (decoded - reading),
        )

    def noisy(self, seconds):
        return seconds * self.random.lognormvariate(0, self.noise)


@dataclass
class Ran:
    settings: list[Setting]
    times: list[FetchTimes]

    @property
    def n_changes(self):
        return sum(a != b for a, b in zip(self.settings[1:], self.settings[:-1], strict=True))

    def seconds(self, begin=0, end=None):
        return sum(each.waiting + each.training for each in self.times[begin:end])


def run(machine, start, *, n=200, most=None, changes=None, is_fixed=False):
    """Return what happened in so many fetches; the machine may change before some of them."""
    most = most or Setting(machine.processors, 16)
    controller, setting, ran = Controller(start, most), start, Ran([], [])
    for number in range(n):
        for name, value in (changes or {}).get(number, {}).items():
            setattr(machine, name, value)
        ran.settings.append(setting)
        ran.times.append(machine.fetch(setting))
        if not is_fixed:
            setting = controller.after(ran.times[-1])
            assert 1 <= setting.num_threads <= most.num_threads
            assert 1 <= setting.prefetch <= most.prefetch
    return ran


TRAININGS: dict[str, dict[str, Any]] = {
    "sleeps": {},
    "sleeps for long": {"step": 0.5},
    "computes": {"step": 0.5, "training_threads": 8},
    "computes, with barriers": {"step": 0.5, "training_threads": 4, "has_barrier": True},
    "computes, waits": {"step": 0.05, "training_threads": 8},
    "two processors": {"processors": 2, "step": 1.0, "training_threads": 1, "decode": 0.6},
    "two processors, waits": {"processors": 2, "step": 0.5, "training_threads": 1},
    "bytes come late": {"latency": 2.0, "step": 0.3},
}


@cache
def best_fixed(training, noise):
    """Return the run with the best fixed setting."""
    machine = Machine(noise=noise, **TRAININGS[training])
    settings = product(range(1, machine.processors + 1), (1, 2, 4, 8, 16))
    runs = [run(replace(machine), Setting(*each), is_fixed=True) for each in settings]
    return min(runs, key=Ran.seconds)


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("training", TRAININGS)
class TestOfAnyTraining:
    @pytest.mark.parametrize("n_left_out", [20, 0], ids=["a bad start", "a good start"])
    def test_is_no_slower_than_the_best(self, training, noise, n_left_out):
        """After twenty fetches, where it starts badly."""
        machine = Machine(noise=noise, **TRAININGS[training])
        found = run(machine, BAD if n_left_out else Setting(machine.processors, 8))
        assert found.seconds(n_left_out) <= 1.02 * best_fixed(training, noise).seconds(n_left_out)

    def test_settings_come_to_rest(self, training, noise):
        found = run(Machine(noise=noise, **TRAININGS[training]), BAD, n=2000)
        assert found.n_changes <= 24
        assert Ran(found.settings[1000:], []).n_changes <= 4


@pytest.mark.parametrize(
    ("machine", "start", "after", "expected"),
    [
        (Machine(), BAD, 20, Setting(8, 1)),
        (Machine(step=0.5), Setting(8, 1), 0, Setting(8, 1)),
        (Machine(step=0.5, training_threads=4, has_barrier=True), Setting(8, 1), 59, Setting(4, 1)),
        (
            Machine(processors=2, step=1.0, training_threads=1, decode=0.6),
            *(Setting(2, 1), 59, Setting(1, 1)),
        ),
    ],
)
def test_takes_processors_that_training_does_not_need(machine, start, after, expected):
    found = run(replace(machine), start, n=60)
    assert found.settings[after:] == [expected] * (60 - after)


def test_takes_them_again_where_training_needs_them_no_longer():
    machine = Machine(step=0.5, training_threads=4, has_barrier=True)
    changes: dict[int, Any] = {100: {"step": 0.05, "training_threads": 0}}
    found = run(machine, Setting(8, 1), changes=changes)
    assert found.settings[99].num_threads < 8
    assert found.settings[120:] == [Setting(8, 1)] * 80


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("prefetch", [1, 8])
def test_recovers_within_twenty_fetches_from_a_disk_that_slows_down(noise, prefetch):
    how: dict[str, Any] = {"n": 300, "changes": {100: {"latency": 5.5}}}
    machine = Machine(step=0.35, noise=noise)
    found, slow, best = (
        run(replace(machine), Setting(8, each), is_fixed=is_fixed, **how)
        for each, is_fixed in ((prefetch, False), (prefetch, True), (16, True))
    )
    assert slow.seconds(120) > 1.5 * best.seconds(120)
    assert found.seconds(120) <= 1.02 * best.seconds(120)


def test_a_pause_of_the_loop_changes_nothing():
    changes: dict[int, Any] = {k: {"step": 30.0} for k in range(40, 200, 40)}
    changes |= {k + 1: {"step": 0.5} for k in changes}
    found = run(Machine(step=0.5), Setting(8, 1), changes=changes)
    assert found.n_changes == 0


@pytest.mark.parametrize("num_workers", [0, 1, 4, 40])
@pytest.mark.parametrize("prefetch", [1, 16, 100])
def test_trials_end_with_any_number_of_workers_and_fetches_ahead(num_workers, prefetch):
    controller = Controller(BAD, Setting(4, prefetch), num_workers)
    slow = FetchTimes(
        **NOTHING | dict.fromkeys(["waiting", "training", "reading", "decoding"], 1.0)
    )
    chosen = [controller.after(slow) for _ in range(3000)]
    tried = chosen.index(Setting(4, prefetch))
    assert BAD in chosen[tried:]  # as nothing was gained


def test_a_fetch_of_no_length_is_no_fault():
    controller = Controller(BAD, Setting(4, 16))
    assert [controller.after(FetchTimes(**NOTHING)) for _ in range(100)] == [BAD] * 100


TIMES = st.builds(FetchTimes, **dict.fromkeys(NOTHING, st.floats(0, 1e6)))


@given(
    times=st.lists(TIMES, max_size=120),
    most=st.builds(Setting, st.integers(1, 64), st.integers(1, 64)),
    num_workers=st.integers(0, 3),
    data=st.data(),
)
def test_whatever_the_times_the_same_give_the_same_within_bounds(times, most, num_workers, data):
    start = Setting(
        data.draw(st.integers(1, most.num_threads)), data.draw(st.integers(1, most.prefetch))
    )
    both = [Controller(start, most, num_workers) for _ in range(2)]
    for each in times:
        one, other = (controller.after(each) for controller in both)
        assert one == other
        assert 1 <= one.num_threads <= most.num_threads
        assert start.prefetch <= one.prefetch <= most.prefetch
