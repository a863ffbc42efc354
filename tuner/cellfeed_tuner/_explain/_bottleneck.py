"""Which stage decides how long a cell takes, by what the data set counted meanwhile."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed import Statistics
from cellfeed_tuner._constants import (
    LEAST_ACCOUNTED,
    LEAST_SAVING,
    LIKELY,
    MOST_ACCOUNTED,
    N_RESAMPLES,
    SURE,
)
from cellfeed_tuner._interval import Estimate, mean_with_interval

__all__ = [
    "Bottleneck", "BottleneckKind", "Stage", "StageModel", "StageName", "bottleneck",
    "microseconds", "with_training_step",
]  # fmt: skip

# Those of `cellfeed.Statistics`, where each is explained.
StageName = Literal[
    "planning", "reading", "decompressing", "placing", "library", "densifying", "making_tensors",
    "functions", "sending", "training",
]  # fmt: skip
BottleneckKind = StageName | Literal["nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Who does the stages of a fetch, side by side.

    While one fetch is delivered, the next is read by threads, and the one after it is planned. So a
    cell takes as long as the slowest of these lanes, and no less than all work of the processors
    divided among them:

    - reading: ``(reading + decompressing + placing) / threads + library``;
    - planning;
    - rows made dense, by as many threads;
    - the process that trains: tensors, your functions unless they have threads of their own, and
      the training step;
    - work: all of these, without waiting for bytes, functions and the training step, over the
      cores.

    Every worker process has lanes of its own, in which it also makes tensors and sends minibatches.

    Parameters
    ----------
    cores
        Cores that may be used.
    n_workers
        Worker processes.
    n_threads
        Threads that read in each process.
    n_function_threads
        Threads that your functions have in each; 0 if they have none of their own.
    """

    cores: float
    n_workers: int
    n_threads: int
    n_function_threads: int = 0

    def seconds_per_cell(
        self, stages: Mapping[StageName, float], *, without: StageName | None = None
    ) -> float:
        """Return the time of a cell, or what it would be ``without`` a stage.

        Of each stage, seconds that threads are busy with it for each cell, added up over all
        threads and processes; those that are not there take none.
        """

        def of(*names: StageName) -> float:
            return sum(max(0.0, stages.get(name, 0.0)) for name in names if name != without)

        lanes = max(1, self.n_workers)
        decoding = of("reading", "decompressing", "placing") / self.n_threads
        delivering = of("making_tensors", "sending")
        work = of("planning", "decompressing", "placing", "library", "densifying") + delivering
        functions = of("functions")
        if not self.n_function_threads:
            delivering, functions = delivering + functions, 0.0
        return max(
            (decoding + of("library")) / lanes,
            of("planning") / lanes,
            of("densifying") / self.n_threads / lanes,
            functions / max(1, self.n_function_threads) / lanes,
            delivering / lanes if self.n_workers else delivering + of("training"),
            of("training"),
            work / self.cores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage.

    Parameters
    ----------
    name
        Which.
    seconds_per_cell
        How long threads were busy with it, over all of them, with its 95 % interval.
    saving
        Share of the measured time that would be saved if it took none, by the model of stages
        that go on side by side: 0 if others would take as long all the same. Never more than the
        share that it takes.
    """

    name: StageName
    seconds_per_cell: Estimate
    saving: float

    @property
    def label(self) -> str:
        """The name in words."""
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Where the time of a cell goes.

    Parameters
    ----------
    kind
        The stage without which the most would be saved; "nothing" if none saves much.
    confidence
        Share of resampled rounds that name the same, without a training step.
    stages
        All stages that were timed, in the order in which a cell goes through them.
    model
        How stages go on side by side.
    measured_seconds_per_cell
        One over the throughput of the loader, as it was measured.
    accounted
        What the stages, put together, make of that: 1 if they explain it to the full.
    n_rounds
        Rounds in which they were counted.
    stored_bytes, decoded_bytes, useful_bytes
        Of each cell: bytes that are read, what they decompress to, and what of that is used; 0 if
        the format's library reads.
    """

    kind: BottleneckKind
    confidence: float
    stages: tuple[Stage, ...]
    model: StageModel
    measured_seconds_per_cell: float
    accounted: float
    n_rounds: int
    stored_bytes: float
    decoded_bytes: float
    useful_bytes: float

    @property
    def read_amplification(self) -> float | None:
        """Bytes that are decompressed for each one that is used; None if that is unknown."""
        return self.decoded_bytes / self.useful_bytes if self.useful_bytes else None

    @property
    def is_explained(self) -> bool:
        """Whether the stages, put together, take about as long as was measured."""
        return LEAST_ACCOUNTED <= self.accounted <= MOST_ACCOUNTED

    @property
    def seconds(self) -> dict[StageName, float]:
        """How long threads are busy with each stage, for each cell."""
        return {each.name: each.seconds_per_cell.value for each in self.stages}

    @property
    def sentence(self) -> str:
        """What this means, in one or two sentences."""
        if self.kind == "training":
            return (
                f"The loader is fast enough: the training step takes "
                f"{self.seconds['training'] * 1e6:,.1f} us for each cell, which is longer."
            )
        said = "No stage stands out."
        if self.kind != "nothing":
            certainty = "Clearly" if self.confidence >= SURE else "Probably"
            if not self.is_explained or self.confidence < LIKELY:
                certainty = "Perhaps"
            said = f"{certainty} bound by {_MEANINGS[self.kind]}: {self._times(self.kind)}."
        if self.is_explained:
            return said
        said = f"{said} The stages explain {self.accounted:.0%} of the time"
        if self.accounted < 1:
            return f"{said} only; what takes the rest is not known."
        return f"{said}: threads waited for processors."

    def _times(self, name: StageName) -> str:
        """Return what a stage takes, beside what a cell takes if it is a part of that."""
        (alone,) = (each.seconds_per_cell for each in self.stages if each.name == name)
        ends = (self.model.seconds_per_cell({name: end}) for end in astuple(alone))
        part, whole = Estimate(*ends), self.measured_seconds_per_cell
        if part.value > whole:
            return f"it takes {microseconds(part)} us for each cell"
        return f"it takes {microseconds(part)} us of the {whole * 1e6:,.1f} us that a cell takes"


_MEANINGS: dict[StageName, str] = {
    "planning": "planning, which one thread does",
    "reading": "reading bytes, from storage or the page cache",
    "decompressing": "decompression",
    "placing": "placing rows in minibatches",
    "library": "reading by the format's library (decompression and placing, not told apart)",
    "densifying": "making rows dense",
    "making_tensors": "making tensors of minibatches",
    "functions": "your own functions",
    "sending": "sending minibatches from worker processes",
    "training": "the training step",
}
_COUNTED = [name for name in get_args(StageName) if name != "training"]


def bottleneck(
    rounds: Sequence[Statistics],
    *,
    model: StageModel,
    cells_per_round: int,
    cells_per_second: float,
    seed: int = 0,
) -> Bottleneck | None:
    """Return where the time of a cell goes; None of fewer than two rounds, or nothing counted."""

    def per_cell(name: str) -> NDArray[np.float64]:
        return np.array([getattr(each, name) for each in rounds]) / cells_per_round

    if len(rounds) < 2:  # noqa: PLR2004 - a spread needs two
        return None
    samples = {name: each for name in _COUNTED if (each := per_cell(name)).any()}
    if not samples:
        return None
    measured = 1 / cells_per_second
    means = {name: float(each.mean()) for name, each in samples.items()}
    savings = _savings(means, model, measured)
    kind = _kind(savings)
    rng, times = np.random.default_rng(seed), np.array(list(samples.values()))

    def resampled() -> BottleneckKind:  # stages of one round stay together
        drawn = times[:, rng.integers(0, len(rounds), len(rounds))].mean(axis=1).tolist()
        return _kind(_savings(dict(zip(samples, drawn, strict=True)), model, measured))

    n_alike = sum(resampled() == kind for _ in range(N_RESAMPLES))
    return Bottleneck(
        kind=kind,
        confidence=n_alike / N_RESAMPLES,
        stages=tuple(
            Stage(name=name, seconds_per_cell=mean_with_interval(each), saving=savings[name])
            for name, each in samples.items()
        ),
        model=model,
        measured_seconds_per_cell=measured,
        accounted=model.seconds_per_cell(means) / measured,
        n_rounds=len(rounds),
        stored_bytes=float(per_cell("bytes_read").mean()),
        decoded_bytes=float(per_cell("bytes_decompressed").mean()),
        useful_bytes=float(per_cell("bytes_used").mean()),
    )


def with_training_step(found: Bottleneck, seconds: float) -> Bottleneck:
    """Return where the time of a cell goes when each takes so many seconds of training."""
    step = Stage(name="training", seconds_per_cell=Estimate(seconds, seconds, seconds), saving=0.0)
    stages = (*(each for each in found.stages if each.name != "training"), step)
    times = {each.name: each.seconds_per_cell.value for each in stages}
    savings = _savings(times, found.model, max(seconds, found.measured_seconds_per_cell))
    stages = tuple(replace(each, saving=savings[each.name]) for each in stages)
    return replace(found, kind=_kind(savings), stages=stages)


def _savings(
    seconds: Mapping[StageName, float], model: StageModel, measured: float
) -> dict[StageName, float]:
    """Return the share of the measured time that would be saved without each stage.

    Time that the stages do not explain goes on without any of them.
    """
    whole = model.seconds_per_cell(seconds)

    def saved(name: StageName) -> float:
        alone = model.seconds_per_cell({name: seconds[name]})
        return min(whole - model.seconds_per_cell(seconds, without=name), alone)

    return {name: saved(name) / max(whole, measured) for name in seconds}


def _kind(savings: Mapping[StageName, float]) -> BottleneckKind:
    name = max(savings, key=savings.__getitem__)
    return name if savings[name] >= LEAST_SAVING else "nothing"


def microseconds(seconds: Estimate) -> str:
    """Return a time with its interval in microseconds, as it is written."""
    value, low, high = (1e6 * each for each in (seconds.value, seconds.low, seconds.high))
    return f"{value:,.1f} [{low:,.1f}, {high:,.1f}]"
