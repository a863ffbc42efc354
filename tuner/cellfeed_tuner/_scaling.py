"""How many ranks this machine and its storage feed.

One rank and two ranks, side by side, read as fast as they can. From what they deliver, and from the
processor time that it takes, follows what limits any number of them: a rank's own threads, the
processors, or something that ranks share besides, such as a disk. A rank that computes for so long
on each minibatch is fed if it gets them as fast.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellfeed.machine import usable_cores, usable_cpu_count
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import FEWEST_ROUNDS, LEAST_LIMIT_LEFT
from cellfeed_tuner._interval import Estimate, mean_with_interval, pooled_estimate, scaled
from cellfeed_tuner._measuring._measurement import Measurement, pooled
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._ranks import FedRanks, Limit, Ranks, Scaling

# Share of the budget for measuring one and two ranks.
SCALING_SHARE = 0.35
# Turns of one rank and two: before ranks with a training step are timed, and in all.
FIRST_SCALING_TURNS, MOST_SCALING_TURNS = 2, 4
# Two ranks share something that is saturated if together they deliver less than this share of
# twice what one delivers. Chosen: beyond the noise of two replicates.
SHARED_SHARE = 0.9
# Processors are saturated if this share of them is busy. Chosen: rounds begin and end with waiting.
SATURATED_SHARE = 0.85
# Processors are saturated as well if a quarter of them is busy, and threads wait for one for this
# share of the time that they run.
WAITING_SHARE = 0.5
# Memory is what ranks share if half of the processors are busy, and a cell takes this many times
# the processor time beside another rank. Chosen: beyond the noise of two replicates.
SLOWED_TIMES = 1.2
# Loading keeps up with training if its utilization is predicted to be at least this.
KEPT_UP = 0.99

_N_NEW = 2  # rounds that do not count, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """What any number of ranks delivers, from what one and two did.

    Parameters
    ----------
    alone
        Cells per second of a single rank, by its number of threads: those that one rank has by
        itself, and those that each of two has. Several are the same if there is no such choice.
    together
        Cells per second of two ranks together.
    processor_seconds
        Processor time of a cell, of a rank alone and of one beside another; 0 if unknown.
    cores
        Cores that other programs leave.
    waits_for_processors
        For how long threads of two ranks waited for a processor, by how long they ran.
    cache
        State of the page cache.
    num_threads
        Threads that all ranks together have, each at least one; None if they are not divided.
    """

    alone: Mapping[int, Estimate]
    together: Estimate
    processor_seconds: tuple[float, float] = (0.0, 0.0)
    cores: float = math.inf
    waits_for_processors: float = 0.0
    cache: CacheState = "cold"
    num_threads: int | None = None

    def threads(self, n: int) -> int:
        """Return the threads of each of ``n`` ranks."""
        return max(1, self.num_threads // n) if self.num_threads else 1

    @property
    def seen(self) -> Estimate:
        """The most that was delivered."""
        return max(self.alone[self.threads(1)], self.together, key=lambda each: each.value)

    @property
    def shared(self) -> tuple[float, Limit]:
        """What all ranks together get at most, in cells per second, and why."""
        alone, beside = self.processor_seconds
        by_processors = self.cores / beside if beside else math.inf
        is_waited_for = (
            self.waits_for_processors >= WAITING_SHARE and self.together.value > by_processors / 4
        )
        if is_waited_for or self.together.value >= SATURATED_SHARE * by_processors:
            return self.together.value, "processors"
        if self.together.value < SHARED_SHARE * 2 * self.alone[self.threads(2)].value:
            is_slowed = 0 < SLOWED_TIMES * alone < beside
            if self.cache == "warm" or (is_slowed and self.together.value > by_processors / 2):
                return self.together.value, "memory"
            return self.together.value, "network" if self.cache == "remote" else "storage"
        return max(by_processors, self.together.value), "processors"

    def delivered(self, n: int) -> tuple[Estimate, Limit]:
        """Return what ``n`` ranks get together, in cells per second, and what limits it.

        Beyond what was measured, the lower end of the interval is what was delivered at most, and
        the upper end assumes that what ranks share is not saturated yet: Amdahl's law through one
        and two ranks.
        """
        most, limit = self.shared
        if n <= 2:  # noqa: PLR2004 - one and two were measured
            own = self.alone[self.threads(1)] if n == 1 else self.together
            return own, limit if own.value >= SHARED_SHARE * most else "threads"
        offered = scaled(self._alone(self.threads(n)), Estimate(n, n, n))
        value = min(offered.value, most)
        low = min(offered.low, self.seen.low)
        twice = 2 * self.alone[self.threads(2)].value
        serial = max(0.0, twice / self.together.value - 1)
        amdahl = n * self.alone[self.threads(2)].value / (1 + serial * (n - 1))
        if limit == "processors":
            high = min(offered.high, most * self.together.high / self.together.value)
        else:
            high = min(offered.high, max(amdahl, self.together.high))
        found = Estimate(value, min(low, value), max(high, value))
        return found, "threads" if offered.value < SHARED_SHARE * most else limit

    def _alone(self, threads: int) -> Estimate:
        """Return the rate of a rank: a part of its time is divided by its threads.

        All of it, if more threads are not faster because what ranks share was saturated by one.
        """
        many, few = self.threads(1), self.threads(2)
        if threads in self.alone or many == few:
            return self.alone.get(threads, self.alone[few])
        seconds_many, seconds_few = (1 / self.alone[each].value for each in (many, few))
        divided = max(0.0, (seconds_few - seconds_many) / (1 / few - 1 / many))
        if self.alone[many].value >= SHARED_SHARE * self.shared[0]:
            divided = math.inf
        divided = min(divided, seconds_few * few)
        seconds = seconds_few + divided * (1 / threads - 1 / few)
        ratio = seconds_few / seconds
        return scaled(self.alone[few], Estimate(ratio, ratio, ratio))


def fed(
    model: RankModel,
    counts: Sequence[int],
    *,
    step_seconds: float,
    batch_size: int,
    rounds: NDArray[np.float64],
    measured: Mapping[int, Estimate] | None = None,
) -> tuple[FedRanks, ...]:
    """Return how well so many ranks are fed.

    Parameters
    ----------
    model
        What ranks get.
    counts
        Numbers of ranks, ascending.
    step_seconds, batch_size
        Time of a training step of each rank, and its cells.
    rounds
        Times of rounds of whole fetches, relative to their mean, shape (n_rounds,). A fetch that
        takes longer than the training steps of the one before is waited for.
    measured
        Utilizations that were measured, by number of ranks.
    """
    of_rank = batch_size / step_seconds

    def used(cells_per_second: float) -> float:
        return float(1 / np.maximum(rounds * of_rank / cells_per_second, 1.0).mean())

    found = list[FedRanks]()
    for n in counts:
        speed, limit = model.delivered(n)
        value, low, high = (used(each / n) for each in (speed.value, speed.low, speed.high))
        is_measured = measured is not None and n in measured
        found.append(
            FedRanks(
                n_ranks=n,
                utilization=(measured or {}).get(n, Estimate(value, low, high)),
                basis="timed" if is_measured else "predicted",
                limit="training" if value >= KEPT_UP else limit,
                needed_cells_per_second=n * of_rank,
                is_beyond=not is_measured and n * of_rank > model.seen.value,
            )
        )
    return tuple(found)


@dataclass(slots=True, kw_only=True)
class ScalingSearch:
    """Measures one rank and two in turns, and what they need.

    Parameters
    ----------
    timed
        Times a configuration on so many ranks; see `Measurements.timed`.
    configuration
        The one that all ranks use.
    counts, step_seconds, batch_size
        See `fed`.
    left
        Returns for how many seconds measuring may go on.
    has_threads
        Whether the loader's threads are cellfeed's, which ranks divide.
    cache
        State of the page cache.
    """

    timed: Callable[..., Measurement]
    configuration: Configuration
    counts: Sequence[int]
    step_seconds: float
    batch_size: int
    left: Callable[[], float]
    has_threads: bool
    cache: CacheState
    _found: dict[str, list[Measurement]] = field(default_factory=dict, init=False)

    def run(self) -> Scaling:
        """Measure, and return what follows."""
        kinds = {"one": (self.configuration, 1), "two": (self.configuration, 2)}
        if (n := self._num_threads) is not None and n > 1:  # one of two has half of the threads
            kinds["share"] = self.configuration.changed(num_threads=n // 2), 1
        measured, longest = dict[int, Estimate](), 0.0
        for turn in range(MOST_SCALING_TURNS):
            if turn == FIRST_SCALING_TURNS:
                measured = self._with_step()
            before = self.left()
            if turn and before < longest:
                break
            for kind, (configuration, n_ranks) in kinds.items():
                found = self._time(configuration, n_ranks)
                if not found.round_seconds:
                    what = "one rank" if n_ranks == 1 else "two ranks side by side"
                    note = found.failure or "there was no time for whole fetches"
                    return Scaling(
                        step_seconds=self.step_seconds, note=f"timing {what} failed: {note}"
                    )
                self._found.setdefault(kind, []).append(found)
            longest = max(longest, before - self.left())
        return self._conclude(measured or self._with_step())

    @property
    def _num_threads(self) -> int | None:
        """Threads of each process of one rank alone; None if they are not divided."""
        if not self.has_threads or self.configuration.others.get("num_threads"):
            return None
        return max(1, usable_cpu_count() // max(1, self.configuration.num_workers))

    def _time(
        self, configuration: Configuration, n_ranks: int, step_seconds: float = 0.0
    ) -> Measurement:
        return self.timed(
            configuration,
            ranks=Ranks.of(n_ranks),
            step_seconds=step_seconds,
            least_rounds=FEWEST_ROUNDS,
            limit_seconds=max(LEAST_LIMIT_LEFT, self.left()),
        )

    def _with_step(self) -> dict[int, Estimate]:
        """Return utilizations with the training step, as far as there is time for them."""
        measured = dict[int, Estimate]()
        for n, kind in ((1, "one"), (2, "two")):
            rate = n * self.batch_size / self._speed(kind).value
            of_fetch = self.configuration.minibatches_per_round * max(self.step_seconds, rate)
            if n not in self.counts or (_N_NEW + FEWEST_ROUNDS) * of_fetch > self.left():
                continue
            found = self._time(self.configuration, n, self.step_seconds)
            if len(found.round_seconds) >= FEWEST_ROUNDS:
                measured[n] = utilization(found, self.step_seconds)
        return measured

    def _speed(self, kind: str) -> Estimate:
        seconds = [
            [s for each in found for s in each.replicate_seconds] for found in self._found.values()
        ]
        found = pooled(self._found[kind])
        mean = found.cells_per_round / float(np.mean(found.replicate_seconds))
        return pooled_estimate(mean, len(found.replicate_seconds), seconds)

    def _conclude(self, measured: Mapping[int, Estimate]) -> Scaling:
        one, two = self._speed("one"), self._speed("two")
        alone = "share" if "share" in self._found else "one"
        num_threads, both = self._num_threads, pooled(self._found["two"])
        processor_alone = _processor_seconds(pooled(self._found[alone]))
        processor_beside = _processor_seconds(both)
        others = both.others.cpu_seconds / both.others.seconds if both.others.seconds else 0.0
        model = RankModel(
            alone={max(1, (num_threads or 1) // 2): self._speed(alone), num_threads or 1: one},
            together=two,
            processor_seconds=(processor_alone, processor_beside),
            cores=max(1.0, usable_cores() - others),
            waits_for_processors=sum(each.waiting for each in both.round_processor)
            / max(1e-9, sum(each.running for each in both.round_processor)),
            cache=self.cache,
            num_threads=num_threads,
        )
        rounds = [
            np.divide(each.round_seconds, np.mean(each.round_seconds))
            for each in self._found["two"]
        ]
        return Scaling(
            step_seconds=self.step_seconds,
            ranks=fed(
                model,
                self.counts,
                step_seconds=self.step_seconds,
                batch_size=self.batch_size,
                rounds=np.concatenate(rounds),
                measured=measured,
            ),
            one=one,
            two=two,
        )


def utilization(found: Measurement, step_seconds: float) -> Estimate:
    """Return the share of its time that training computed, with its 95 % interval."""
    training = found.configuration.minibatches_per_round * step_seconds
    seconds = np.array(found.round_seconds)
    share = mean_with_interval(np.minimum(1.0, training / seconds), weights=seconds)
    return Estimate(*(min(1.0, max(0.0, e)) for e in (share.value, share.low, share.high)))


def _processor_seconds(found: Measurement) -> float:
    """Return the processor time of a cell; 0 if it is not known."""
    if len(found.round_processor) != len(found.round_seconds):
        return 0.0
    running = sum(each.running for each in found.round_processor)
    return running / (len(found.round_seconds) * found.cells_per_round)
