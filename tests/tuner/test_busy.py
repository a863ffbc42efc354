"""What other programs take of the processors."""

import os
from functools import partial
from itertools import count
from typing import NamedTuple

import psutil
import pytest
from tests.tuner.other_loaders import Opened

from cellfeed_tuner import Busy, Configuration
from cellfeed_tuner._machine import OtherPrograms, ProcessorClock
from cellfeed_tuner._measuring._measurement import LEAST_ROUNDS
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest

# Expressions that take some processor time, however long that is, and give a loader.
CPU_SECONDS = 0.5
BURN_HERE = (
    f"[0 for _ in iter(lambda: __import__('time').process_time() < {CPU_SECONDS}, False)] "
    "and range(9)"
)
BURN_IN_A_CHILD = (
    "__import__('subprocess').run([__import__('sys').executable, '-c', "
    f"'import time\\nwhile time.process_time() < {CPU_SECONDS}: pass']) and range(9)"
)


class Times(NamedTuple):
    """Times of a processor, as psutil gives them on Linux."""

    user: float = 0.0
    system: float = 0.0
    idle: float = 0.0
    iowait: float = 0.0
    guest: float = 0.0


@pytest.mark.parametrize(
    ("cpu_seconds", "n_cores", "usable", "other_cores", "share"),
    [
        (0.0, 4, 4.0, 0.0, 0.0),
        (15.0, 4, 4.0, 1.5, 0.375),
        (15.0, 64, 2.0, 1.5, 0.0),  # others have processors enough of their own
        (630.0, 64, 2.0, 63.0, 0.5),
        (50.0, 4, 4.0, 5.0, 1.0),  # by rounding of the system's clock
    ],
)
def test_what_was_not_left_to_use(cpu_seconds, n_cores, usable, other_cores, share):
    busy = Busy.of(OtherPrograms(10.0, cpu_seconds), n_cores=n_cores, usable=usable)
    assert busy is not None
    assert busy.other_cores == pytest.approx(other_cores)
    assert busy.share == pytest.approx(share)


def test_nothing_measured_says_nothing():
    assert Busy.of(OtherPrograms()) is None


@pytest.mark.parametrize(("share", "said"), [(0.09, False), (0.35, True)])
def test_it_is_said_where_it_matters(share, said):
    sentence = Busy(other_cores=1.0, share=share).sentence
    assert ("35% of the processors" in sentence) == said


def test_what_another_program_takes_is_counted_and_what_was_measured_is_not(monkeypatch):
    """Of two processors, one idle; of three seconds on the other, one waits for the disk."""
    now = Times(user=7.0, system=2.0, idle=90.0, iowait=1.0, guest=5.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [now, Times()])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    clock = ProcessorClock()
    now = Times(user=8.5, system=2.5, idle=90.0, iowait=2.0, guest=6.0)
    assert clock.others(0.0).cpu_seconds == pytest.approx(2.0)
    assert clock.others(1.5).cpu_seconds == pytest.approx(0.5)
    assert clock.others(2.1).cpu_seconds == 0  # by rounding of the system's clock


def test_processors_that_we_may_not_run_on_do_not_count(monkeypatch):
    user = count()
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: [Times(user=next(user)), Times()])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1}, raising=False)
    monkeypatch.setattr("time.process_time", lambda: 0.0)
    assert ProcessorClock().others(0.0).cpu_seconds == 0


@pytest.mark.parametrize("burn", [BURN_HERE, BURN_IN_A_CHILD])
def test_what_is_measured_takes_nothing_from_itself(burn):
    """All that ran is what others took, and what was measured did."""
    request = TimingRequest(
        configuration=Configuration(), batch_size=1, labels=(), cache="warm", seed=0,
        least_rounds=LEAST_ROUNDS, seconds=0.0,
    )  # fmt: skip
    with MeasuringProcess(Opened(partial(eval, burn))) as process:
        process.start()
        all_that_ran = ProcessorClock()
        outcome = process.run(request, limit_seconds=600.0)
        everything = all_that_ran.others(0.0)
    assert outcome.failure is None
    assert 0 < outcome.others.seconds <= everything.seconds
    ours = everything.cpu_seconds - outcome.others.cpu_seconds
    assert ours >= 0.8 * CPU_SECONDS  # the system counts in hundredths of a second
