"""Machines of which the truth is known, and searches and whole runs on them.

What tests know of the insides of the tuner's search is in this file: how a request to time a
configuration is answered, and what a search is made of.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from unittest.mock import patch

import numpy as np
from bench.backtest.replay import entropy_of

from cellfeed import Collection
from cellfeed_tuner import (
    AutotuneResult,
    Configuration,
    ConfigurationResult,
    Constraints,
    EntropyBits,
    autotune,
    profile,
)
from cellfeed_tuner._choose import Choice, Requirements
from cellfeed_tuner._machine import OtherPrograms, ProcessorTime
from cellfeed_tuner._measuring._measurement import Measurement
from cellfeed_tuner._measuring._process import MeasuringError, Outcome
from cellfeed_tuner._measuring._timing import CountedRounds, Findings, Round, Started, TimingRequest
from cellfeed_tuner._searching._replicates import Measurements
from cellfeed_tuner._searching._search import Search
from cellfeed_tuner._searching._space import Space
from cellfeed_tuner._time_budget import TimeBudget

__all__ = [
    "BATCH_SIZE",
    "CountedRounds",
    "Findings",
    "Found",
    "Machine",
    "MeasuringError",
    "Outcome",
    "Round",
    "Space",
    "Started",
    "TimingRequest",
    "autotune_on",
    "entropy_of",
    "profile_on",
    "searched",
    "timed",
]

BATCH_SIZE = 64
Entropies = Mapping[tuple[int, int], Mapping[str, EntropyBits]]


def timed(
    seconds: Iterable[float],
    *,
    n_new: int = 0,
    waiting: float = 0.0,
    memory: int = 100,
    findings: Sequence[Findings] = (),
) -> Outcome:
    """The answer to a request whose rounds took so long; the first ``n_new`` do not count."""
    rounds = [
        Round(float(each), number >= n_new, waiting, None) for number, each in enumerate(seconds)
    ]
    events = (Started(0.0, 0.0, 0), *rounds, *findings) if rounds else ()
    return Outcome(events=events, peak_memory_bytes=memory, failure=None)


@dataclass
class Machine:
    """A measuring process that answers at once; its clock goes on as if it had worked.

    Parameters
    ----------
    cost
        Seconds per cell of a configuration.
    n_cells
        Cells of an epoch.
    memory
        Bytes that a configuration takes.
    factor
        By how much a look is slower than usual, given its configuration and number.
    start_seconds, overhead
        Seconds until it is ready, and of each look beside its rounds.
    noise, round_noise, drift
        Relative errors: of a look, of a round, and of the load from one look to the next.
    fails
        Whether a configuration fails.
    dies_at
        The look at which the process dies.
    compiles
        Seconds for which code is compiled in a look, given its number.
    """

    cost: Callable[[Configuration], float]
    n_cells: int = 10**6
    memory: Callable[[Configuration], int] = lambda each: 100 + each.minibatches_per_round
    factor: Callable[[Configuration, int], float] = lambda _each, _number: 1.0
    start_seconds: float = 0.0
    overhead: float = 0.0
    noise: float = 0.0
    round_noise: float = 0.0
    drift: float = 0.0
    seed: int = 0
    fails: Callable[[Configuration], bool] = lambda _: False
    dies_at: int | None = None
    compiles: Callable[[int], float] = lambda _number: 0.0
    now: float = 1000.0
    log_load: float = 0.0
    asked: list[Configuration] = field(default_factory=list)
    asked_at: list[float] = field(default_factory=list)
    n_samples: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng((self.seed, 7))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def clock(self) -> float:
        return self.now

    def start(self) -> None:
        self.now += self.start_seconds

    def speed(self, each: Configuration) -> float:
        return 1 / self.cost(each)

    def run(self, request: Any, *, limit_seconds: float) -> Outcome:
        if not isinstance(request, TimingRequest):  # a sample for advice on storage
            self.n_samples += 1
            self.now += limit_seconds
            return Outcome(events=(), peak_memory_bytes=0, failure=None)
        each, number = request.configuration, len(self.asked)
        if number == self.dies_at:
            raise MeasuringError("the measuring process died")
        self.asked.append(each)
        self.asked_at.append(self.now)
        self.log_load += self.drift * self.rng.standard_normal()
        if self.fails(each):
            self.now += 0.1
            return Outcome(events=(), peak_memory_bytes=0, failure="no workers here")
        compiling = self.compiles(number)
        factor = self.factor(each, number) * (10.0 if compiling else 1.0)
        return self.answer(request, factor, limit_seconds, compiling)

    def answer(
        self, request: TimingRequest, factor: float, limit_seconds: float, compiling: float = 0.0
    ) -> Outcome:
        each = request.configuration
        error = np.exp(self.log_load + self.noise * self.rng.standard_normal())
        reading = each.minibatches_per_round * BATCH_SIZE * self.cost(each) * factor * error
        computing = request.step_seconds * each.minibatches_per_round
        seconds = max(reading, computing)  # it reads ahead while training computes
        n_rounds = self.n_cells // BATCH_SIZE // each.minibatches_per_round
        n_new = CountedRounds.n_new(n_rounds, has_workers=each.num_workers > 0)
        enough = min(request.most_rounds, math.ceil(request.seconds / seconds))
        wanted = n_new + max(request.least_rounds, enough)
        n = min(wanted, int(max(0.0, limit_seconds - self.overhead) / seconds))
        rounds = seconds * np.exp(self.round_noise * self.rng.standard_normal(n))
        self.now += self.overhead + rounds.sum() if n == wanted else limit_seconds
        return timed(
            rounds, n_new=n_new, waiting=seconds - computing, memory=self.memory(each),
            findings=[Findings(compiling_seconds=compiling)],
        )  # fmt: skip


@dataclass
class Found:
    """What a search has found.

    ``asked`` is what was measured before the search was over, in this order; ``entropies`` is what
    it was given.
    """

    search: Search
    results: list[ConfigurationResult]
    choice: Choice | None
    asked: list[Configuration]
    seconds: float
    entropies: Entropies

    @property
    def chosen(self) -> Configuration:
        assert self.choice is not None
        return self.choice.configuration

    def by_status(self, status: str) -> list[ConfigurationResult]:
        return [each for each in self.results if each.status == status]


def measurements_by(
    process: Any,
    *,
    labels: Sequence[str] = ("plate",),
    cache: Any = "cold",
    seed: int = 0,
    budget: float = 60.0,
) -> Measurements:
    return Measurements(
        process=process,
        labels=labels,
        batch_size=BATCH_SIZE,
        cache=cache,
        seed=seed,
        budget=TimeBudget(budget, process.clock),
    )


def _seen(busy: float) -> Measurement:
    """A round of a second, for a part of which its only thread waited for a processor."""
    return Measurement(
        configuration=Configuration(), cache="cold", cells_per_round=BATCH_SIZE,
        round_seconds=(1.0,), round_processor=(ProcessorTime(1.0 - busy, busy),),
        others=OtherPrograms(1.0, busy),
    )  # fmt: skip


def searched(
    machine: Any,
    grid: Iterable[Configuration] | Space,
    entropies: Entropies,
    *,
    floor: float = 0.95,
    need: float | None = None,
    step_seconds: float | None = None,
    memory: int = 10**9,
    row_bytes: float = 100.0,
    study: Any = None,
    busy: float = 0.0,
    **measuring: Any,
) -> Found:
    """Search a grid, or a space that is too large to list, by a machine's clock.

    Other programs took a part ``busy`` of the time until then. Options that are not named are those
    of `measurements_by`.
    """
    space = grid if isinstance(grid, Space) and grid.is_large else None
    if isinstance(grid, Space):
        grid = grid.coarse_grid() if space else grid.grid()
    grid = list(grid)
    n_cells, began = machine.n_cells, machine.now
    search = Search(
        measurements=measurements_by(machine, **measuring),
        requirements=Requirements(
            n_cells=n_cells,
            row_bytes=row_bytes,
            batch_size=BATCH_SIZE,
            constraints=Constraints(
                entropy_floor=floor,
                memory_bytes=memory,
                need_cells_per_second=(step_seconds and BATCH_SIZE / step_seconds) or need,
                step_seconds=step_seconds,
            ),
            entropies=entropies.__getitem__,
        ),
        space=space,
        study=study,
    )
    if busy:
        search.measurements.learn_pace(_seen(busy), 1.0)
    search.run(grid)
    asked = list(machine.asked)
    search.survey()
    results = search.results(search.timed if space else grid)
    choice, seconds = search.choose(results), machine.now - began
    return Found(search, results, choice, asked, seconds, entropies)


def autotune_on(
    machine: Machine,
    collection: Collection,
    *,
    budget: float,
    spent: float = 0.0,
    writing_seconds: float = 0.0,
    **settings: Any,
) -> AutotuneResult:
    """Run `autotune` on a machine, by its clock, after ``spent`` seconds of the budget."""
    time_budget = partial(
        TimeBudget,
        clock=machine.clock,
        started=machine.now - spent,
        writing_seconds=writing_seconds,
    )
    module = "cellfeed_tuner._autotune."
    with (
        patch(f"{module}TimeBudget", time_budget),
        patch(f"{module}MeasuringProcess", lambda: machine),
    ):
        return autotune(collection, budget=budget, **settings)


def profile_on(machine: Machine, collection: Collection, **settings: Any) -> AutotuneResult:
    """Run `profile` on a machine, by its clock."""
    module = "cellfeed_tuner._profile."
    with (
        patch(f"{module}TimeBudget", partial(TimeBudget, clock=machine.clock)),
        patch(f"{module}MeasuringProcess", lambda: machine),
    ):
        return profile(collection, **settings)
