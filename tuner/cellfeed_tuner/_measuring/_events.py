"""What a child of the measuring process reports while it times a configuration."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cellfeed import Statistics
from cellfeed_tuner._measuring._bytes_read import BytesRead
from cellfeed_tuner._measuring._labels import LabelWithin
from cellfeed_tuner._measuring._sampled_cells import DeliveredCell

__all__ = [
    "Delivery",
    "Entropies",
    "Infeasible",
    "Requests",
    "Round",
    "Sampled",
    "Started",
    "by_round",
]


@dataclass(frozen=True, slots=True)
class Started:
    """The first minibatch is there.

    Parameters
    ----------
    worker_seconds
        Time to start the workers.
    first_minibatch_seconds
        Time from then to the first minibatch.
    waiting_bytes
        Memory that minibatches take which wait for a training loop that is slower than the
        workers; 0 without workers.
    n_threads, n_function_threads
        Threads of each process that read, and that the user's functions have.
    unshared_bytes
        Memory that several ranks hold, each by itself, but the processes measured share.
    """

    worker_seconds: float
    first_minibatch_seconds: float
    waiting_bytes: int
    n_threads: int = 1
    n_function_threads: int = 0
    unshared_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The configuration cannot be timed."""

    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One timed round.

    Parameters
    ----------
    seconds
        Time that it took.
    counts
        Whether it is free of start-up.
    waiting_seconds
        The part of it in which the training loop waited for minibatches.
    read
        What was read meanwhile; None where it is not as much as was delivered, since more or
        less was read ahead, or is not counted, as of a server.
    may_end
        Whether measuring may end with it.
    statistics
        What the data set counted meanwhile, if it counts.
    """

    seconds: float
    counts: bool
    waiting_seconds: float
    read: BytesRead | None
    may_end: bool = True
    statistics: Statistics | None = None


@dataclass(frozen=True, slots=True)
class Entropies:
    """Entropies of one label, or of one within another, in the minibatches that came out.

    Parameters
    ----------
    label
        The obs column, or the two.
    bits
        Mean over each round, first rounds too, shape (n_rounds,).
    """

    label: str | LabelWithin
    bits: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Delivery:
    """Whether the minibatches that came out are those of the plan, with the labels of their rows.

    Parameters
    ----------
    fault
        The first that is not, in words; empty if all are.
    """

    fault: str


@dataclass(frozen=True, slots=True)
class Requests:
    """How many requests were under way at a server at the end.

    Parameters
    ----------
    n
        How many; 0 if none was asked by this process.
    """

    n: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some cells of the last minibatch, with all that it has of them."""

    cells: tuple[DeliveredCell, ...]


def by_round(entropies: NDArray[np.float64], minibatches_per_round: int) -> NDArray[np.float64]:
    """Return the mean over each whole round, shape (n_rounds,)."""
    whole = entropies.size - entropies.size % minibatches_per_round
    means: NDArray[np.float64] = entropies[:whole].reshape(-1, minibatches_per_round).mean(axis=1)
    return means
