"""Which stage decides how long a cell takes, by what the data set counted meanwhile."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed import Statistics
from cellfeed_tuner._explain._stage_model import StageModel, StageName
from cellfeed_tuner._interval import Estimate, mean_with_interval

__all__ = ["Bottleneck", "BottleneckKind", "Stage", "bottleneck", "with_training_step"]

BottleneckKind = StageName | Literal["nothing"]

# What would save less than this share of the time does not stand out.
_LEAST_SAVING = 0.15
_N_RESAMPLES = 1000
_SURE, _LIKELY = 0.95, 0.75
# Stages that explain less or more of the time than this share of it explain it badly.
_LEAST_ACCOUNTED, _MOST_ACCOUNTED = 0.7, 1.4


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
        return _LEAST_ACCOUNTED <= self.accounted <= _MOST_ACCOUNTED

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
        if self.kind == "nothing":
            said = "No stage stands out."
        else:
            said = f"{self._certainty} bound by {_MEANINGS[self.kind]}: {self._times(self.kind)}."
        return said if self.is_explained else f"{said} {self._caveat}"

    def _times(self, name: StageName) -> str:
        """Return what a stage takes, beside what a cell takes if it is a part of that."""
        (alone,) = (each.seconds_per_cell for each in self.stages if each.name == name)
        ends = (self.model.seconds_per_cell({name: end}) for end in astuple(alone))
        part = Estimate(*ends)
        whole = self.measured_seconds_per_cell
        if part.value > whole:
            return f"it takes {_microseconds(part)} us for each cell"
        return f"it takes {_microseconds(part)} us of the {whole * 1e6:,.1f} us that a cell takes"

    @property
    def _caveat(self) -> str:
        explained = f"The stages explain {self.accounted:.0%} of the time"
        if self.accounted < 1:
            return f"{explained} only; what takes the rest is not known."
        return f"{explained}: threads waited for processors."

    @property
    def _certainty(self) -> str:
        if not self.is_explained or self.confidence < _LIKELY:
            return "Perhaps"
        return "Clearly" if self.confidence >= _SURE else "Probably"


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
    """Return where the time of a cell goes.

    Parameters
    ----------
    rounds
        What was counted in each.
    model
        How stages go on side by side.
    cells_per_round
        How many cells came out of each.
    cells_per_second
        How many came out in a second.
    seed
        Seed of resampling.

    Returns
    -------
    None if there are fewer than two rounds, or nothing was counted in them.
    """

    def per_cell(name: str) -> NDArray[np.float64]:
        return np.array([getattr(each, name) for each in rounds]) / cells_per_round

    if len(rounds) < 2:  # noqa: PLR2004 - a spread needs two
        return None
    samples = {name: per_cell(name) for name in _COUNTED}
    samples = {name: each for name, each in samples.items() if each.any()}
    if not samples:
        return None
    measured = 1 / cells_per_second
    means = {name: float(each.mean()) for name, each in samples.items()}
    savings = _savings(means, model, measured)
    kind = _kind(savings)
    rng = np.random.default_rng(seed)
    named = Counter(
        _kind(_savings(_resampled(samples, rng), model, measured)) for _ in range(_N_RESAMPLES)
    )
    return Bottleneck(
        kind=kind,
        confidence=named[kind] / _N_RESAMPLES,
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
    """Return where the time of a cell goes when each takes this long in the training step.

    Parameters
    ----------
    found
        Without a training step.
    seconds
        Of the step, for each cell.
    """
    step = Stage(name="training", seconds_per_cell=Estimate(seconds, seconds, seconds), saving=0.0)
    stages = (*(each for each in found.stages if each.name != "training"), step)
    times = {each.name: each.seconds_per_cell.value for each in stages}
    measured = max(seconds, found.measured_seconds_per_cell)
    savings = _savings(times, found.model, measured)
    kind = _kind(savings)
    return replace(
        found,
        kind=kind,
        stages=tuple(replace(each, saving=savings[each.name]) for each in stages),
    )


def _resampled(
    samples: Mapping[StageName, NDArray[np.float64]], rng: np.random.Generator
) -> dict[StageName, float]:
    """Return means over rounds that are drawn again; stages of one round stay together."""
    (size,) = {each.size for each in samples.values()}
    drawn = rng.integers(0, size, size)
    return {name: float(each[drawn].mean()) for name, each in samples.items()}


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
    return name if savings[name] >= _LEAST_SAVING else "nothing"


def _microseconds(seconds: Estimate) -> str:
    value, low, high = (1e6 * each for each in (seconds.value, seconds.low, seconds.high))
    return f"{value:,.1f} [{low:,.1f}, {high:,.1f}]"
