"""Which stage limits throughput, from the times that the dataset counts."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed_tuner._interval import Estimate, mean_with_interval

if TYPE_CHECKING:  # it loads PyTorch
    from cellfeed import Statistics

# Smallest share of the time for a stage to be called the bottleneck.
LEAST_SAVING = 0.15
# Share of its time that training may wait for a loader that is called fast enough.
MUCH_WAITING = 0.01
# If the stages explain less or more than these shares of the time, they explain it badly.
LEAST_ACCOUNTED, MOST_ACCOUNTED = 0.7, 1.4

# Stages of `cellfeed.Statistics`, which documents them, and the training step.
StageName = Literal[
    "planning", "reading", "decompressing", "placing", "library", "densifying", "making_tensors",
    "functions", "sending", "training",
]  # fmt: skip
BottleneckKind = StageName | Literal["nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """How the stages of a fetch run side by side.

    While one fetch is delivered, threads read the next, and the one after that is planned. A cell
    therefore takes as long as the slowest of these lanes, and at least the total CPU time divided
    by the cores:

    - reading: ``(reading + decompressing + placing) / threads + library``;
    - planning;
    - densifying, by as many threads;
    - the training process: making tensors, user functions unless they have their own threads, and
      the training step;
    - CPU time: all of these except reading bytes, user functions and the training step.

    Each worker process has its own lanes, and also makes tensors and sends minibatches.

    Parameters
    ----------
    cores
        Usable cores.
    num_workers
        Worker processes.
    num_threads
        Reading threads per process.
    num_function_threads
        Threads per process for user functions; 0 if they have none of their own.
    """

    cores: float
    num_workers: int
    num_threads: int
    num_function_threads: int = 0

    def seconds_per_cell(
        self, stages: Mapping[StageName, float], *, without: StageName | None = None
    ) -> float:
        """Return the time per cell, or what it would be ``without`` a stage.

        ``stages`` has the busy seconds per cell of each stage, summed over threads and processes.
        """

        def of(*names: StageName) -> float:
            return sum(max(0.0, stages.get(name, 0.0)) for name in names if name != without)

        lanes = max(1, self.num_workers)
        decoding = of("reading", "decompressing", "placing") / self.num_threads
        delivering = of("making_tensors", "sending")
        work = of("planning", "decompressing", "placing", "library", "densifying") + delivering
        functions = of("functions")
        if not self.num_function_threads:
            delivering, functions = delivering + functions, 0.0
        return max(
            (decoding + of("library")) / lanes,
            of("planning") / lanes,
            of("densifying") / self.num_threads / lanes,
            functions / max(1, self.num_function_threads) / lanes,
            delivering / lanes if self.num_workers else delivering + of("training"),
            of("training"),
            work / self.cores,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a fetch.

    Parameters
    ----------
    name
        Name of the stage.
    seconds_per_cell
        Busy time summed over all threads, with its 95 % interval.
    saving
        Share of the measured time that removing the stage would save, according to the
        `StageModel`: 0 if another stage takes as long. Never more than the share it takes.
    """

    name: StageName
    seconds_per_cell: Estimate
    saving: float

    @property
    def label(self) -> str:
        """The name as text."""
        return self.name.replace("_", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """Where the time per cell goes.

    Parameters
    ----------
    kind
        The stage whose removal would save the most time; "nothing" if none would save much.
    is_certain
        Whether it would also be named if it took the low end of its interval, and all other stages
        the high ends of theirs; without a training step.
    stages
        All timed stages, in the order in which a cell passes through them.
    model
        How the stages run side by side.
    measured_seconds_per_cell
        Inverse of the measured throughput.
    accounted
        Time per cell according to the model, as a share of the measured time; 1 if the stages
        explain all of it.
    n_rounds
        Rounds in which they were counted.
    stored_bytes, decoded_bytes, useful_bytes
        Bytes per cell: read, decompressed, and used of those; 0 if the format's own library
        reads.
    waiting_share
        Share of its time that training waited for data, with a training step of that length; None
        if that was not measured.
    """

    kind: BottleneckKind
    is_certain: bool
    stages: tuple[Stage, ...]
    model: StageModel
    measured_seconds_per_cell: float
    accounted: float
    n_rounds: int
    stored_bytes: float
    decoded_bytes: float
    useful_bytes: float
    waiting_share: float | None = None

    @property
    def read_amplification(self) -> float | None:
        """Bytes decompressed per byte used; None if unknown."""
        return self.decoded_bytes / self.useful_bytes if self.useful_bytes else None

    @property
    def is_explained(self) -> bool:
        """Whether the model's time per cell is close to the measured one."""
        return LEAST_ACCOUNTED <= self.accounted <= MOST_ACCOUNTED

    @property
    def seconds(self) -> dict[StageName, float]:
        """Busy seconds per cell by stage."""
        return {each.name: each.seconds_per_cell.value for each in self.stages}

    @property
    def sentence(self) -> str:
        """The finding in one or two sentences."""
        if self.kind == "training":
            step = f"{self.seconds['training'] * 1e6:,.1f} us per cell"
            if (self.waiting_share or 0.0) >= MUCH_WAITING:
                return (
                    f"The training step takes longer than loading ({step}), but training waits for "
                    f"data {self.waiting_share:.1%} of the time."
                )
            return f"The loader is fast enough: the training step takes longer, {step}."
        said = "No stage dominates."
        if self.kind != "nothing":
            bound = "Bound" if self.is_explained and self.is_certain else "Possibly bound"
            said = f"{bound} by {_MEANINGS[self.kind]}: {self._times(self.kind)}."
        if self.is_explained:
            return said
        if self.accounted < 1:
            return f"{said} The stages explain only {self.accounted:.0%} of the time."
        return (
            f"{said} The stages add up to {self.accounted:.0%} of the time: threads waited for "
            "the CPU."
        )

    def _times(self, name: StageName) -> str:
        """Return the time that a stage takes, and what removing it would give."""
        (saving,) = (each.saving for each in self.stages if each.name == name)
        part = self.model.seconds_per_cell({name: self.seconds[name]})
        whole = self.measured_seconds_per_cell
        if part > whole:
            return f"{part * 1e6:,.1f} us per cell"
        taken = f"{part * 1e6:,.1f} of {whole * 1e6:,.1f} us per cell"
        if saving == 1:  # no other stage was counted
            return taken
        return f"{taken}; without it, loading would be {1 / (1 - saving):.1f}x as fast"


_MEANINGS: dict[StageName, str] = {
    "planning": "planning, which is single-threaded",
    "reading": "waiting for bytes from storage, the page cache or a server",
    "decompressing": "decompression",
    "placing": "copying rows into minibatches",
    "library": "the format's own library (decompression and copying are not separated)",
    "densifying": "densifying rows",
    "making_tensors": "making tensors",
    "functions": "your own functions",
    "sending": "sending minibatches from worker processes",
    "training": "the training step",
}
_COUNTED = [name for name in get_args(StageName) if name != "training"]


def bottleneck(
    rounds: "Sequence[Statistics]",
    *,
    model: StageModel,
    cells_per_round: int,
    cells_per_second: float,
) -> Bottleneck | None:
    """Return where the time per cell goes; None with fewer than two rounds or nothing counted."""

    def per_cell(name: str) -> NDArray[np.float64]:
        return np.array([getattr(each, name) for each in rounds]) / cells_per_round

    if len(rounds) < 2:  # noqa: PLR2004 - a spread needs two
        return None
    samples = {name: each for name in _COUNTED if (each := per_cell(name)).any()}
    if not samples:
        return None
    measured = 1 / cells_per_second
    times = {name: mean_with_interval(each) for name, each in samples.items()}
    means = {name: each.value for name, each in times.items()}
    savings = _savings(means, model, measured)
    kind = _kind(savings)
    least = {name: each.low if name == kind else each.high for name, each in times.items()}
    return Bottleneck(
        kind=kind,
        is_certain=_kind(_savings(least, model, measured)) == kind,
        stages=tuple(
            Stage(name=name, seconds_per_cell=each, saving=savings[name])
            for name, each in times.items()
        ),
        model=model,
        measured_seconds_per_cell=measured,
        accounted=model.seconds_per_cell(means) / measured,
        n_rounds=len(rounds),
        stored_bytes=float(per_cell("bytes_read").mean()),
        decoded_bytes=float(per_cell("bytes_decompressed").mean()),
        useful_bytes=float(per_cell("bytes_used").mean()),
    )


def with_training_step(
    found: Bottleneck, seconds: float, waiting_share: float | None = None
) -> Bottleneck:
    """Return where the time goes if training takes so many seconds per cell."""
    step = Stage(name="training", seconds_per_cell=Estimate(seconds, seconds, seconds), saving=0.0)
    stages = (*(each for each in found.stages if each.name != "training"), step)
    times = {each.name: each.seconds_per_cell.value for each in stages}
    savings = _savings(times, found.model, max(seconds, found.measured_seconds_per_cell))
    stages = tuple(replace(each, saving=savings[each.name]) for each in stages)
    return replace(found, kind=_kind(savings), stages=stages, waiting_share=waiting_share)


def _savings(
    seconds: Mapping[StageName, float], model: StageModel, measured: float
) -> dict[StageName, float]:
    """Return the share of the measured time that removing each stage would save.

    Time that the stages do not explain is not saved.
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
    """Return a time with its interval in microseconds, formatted; no time is negative.

    Examples
    --------
    >>> microseconds(Estimate(2e-6, -1e-6, 5e-6))
    '2.0 [0.0, 5.0]'
    """
    value, low, high = (1e6 * max(0.0, each) for each in astuple(seconds))
    return f"{value:,.1f} [{low:,.1f}, {high:,.1f}]"
