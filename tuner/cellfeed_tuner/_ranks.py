"""The ranks of a training, the rank of this process, and how many ranks a machine feeds."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cellfeed import ParameterError
from cellfeed_tuner._constants import UTILIZATION
from cellfeed_tuner._interval import Estimate

_REMEDY = (
    "start with torchrun, or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT as it does; or call `autotune` in one process alone, with `ranks`"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Torchrun's environment variables; ``host`` and ``port`` are the master's."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str
    port: int

    @classmethod
    def here(cls) -> "World | None":
        """Return the ranks that this process belongs to; None if it trains alone.

        Raises
        ------
        ParameterError
            Variables are missing, or contradict each other or torch.distributed.
        """
        if not os.environ.get("WORLD_SIZE", "").strip() or _number("WORLD_SIZE") == 1:
            _check_alone()
            return None
        sizes = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        world = cls(
            **{name.lower(): _number(name) for name in sizes},
            host=_text("MASTER_ADDR"),
            port=_number("MASTER_PORT"),
        )
        world._check()
        return world

    def _check(self) -> None:
        are_in_order = (
            self.rank < self.world_size
            and self.local_rank < self.local_world_size <= self.world_size
            and self.local_rank <= self.rank
            and (self.world_size > self.local_world_size or self.rank == self.local_rank)
        )
        if not are_in_order:
            msg = (
                f"RANK={self.rank}, WORLD_SIZE={self.world_size}, LOCAL_RANK={self.local_rank} and "
                f"LOCAL_WORLD_SIZE={self.local_world_size} contradict each other; {_REMEDY}"
            )
            raise ParameterError(msg)
        from torch import distributed  # noqa: PLC0415 - only where there are several ranks

        if not (distributed.is_available() and distributed.is_initialized()):
            return
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        if (rank, world_size) != (self.rank, self.world_size):
            msg = (
                f"RANK={self.rank} and WORLD_SIZE={self.world_size}, but torch.distributed has "
                f"rank {rank} of {world_size}; {_REMEDY}"
            )
            raise ParameterError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The number of ranks that a recommendation is for.

    Parameters
    ----------
    n_local
        Ranks of one machine, which are measured side by side, and share its cores and memory.
    n_total
        Ranks of all machines, which divide an epoch.
    """

    n_local: int = 1
    n_total: int = 1

    @classmethod
    def of(cls, n: int | Sequence[int] | None) -> "Ranks":
        """Return ``n`` ranks of one machine, the fewest if several numbers are given.

        If None, the ranks that this process belongs to.

        Raises
        ------
        ParameterError
            ``n`` is below one, or empty; or see `World.here`.
        """
        if isinstance(n, Sequence):
            if not n:
                msg = "`ranks` must have a number, but got none"
                raise ParameterError(msg)
            n = min(n)
        if n is not None:
            if n < 1:
                msg = f"`ranks >= 1` must hold, but got ranks={n}"
                raise ParameterError(msg)
            return cls(n_local=n, n_total=n)
        world = World.here()
        if world is None:
            return cls()
        return cls(n_local=world.local_world_size, n_total=world.world_size)

    def set_environment(self, rank: int) -> None:
        """Set this process's environment to that of a local rank, with its share of cores."""
        os.environ |= {
            "RANK": f"{rank}",
            "LOCAL_RANK": f"{rank}",
            "WORLD_SIZE": f"{self.n_total}",
            "LOCAL_WORLD_SIZE": f"{self.n_local}",
        }

    @property
    def together(self) -> str:
        """A suffix for figures; empty for one rank."""
        return f" of {self.n_local} ranks together" if self.n_local > 1 else ""

    def __str__(self) -> str:
        if self.n_total == 1:
            return "1 rank"
        if self.n_total == self.n_local:
            return f"{self.n_local} ranks"
        return f"{self.n_local} of {self.n_total} ranks"


def _check_alone() -> None:
    """Refuse ranks of torch.distributed without variables: each would tune for itself."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        msg = (
            f"torch.distributed has {distributed.get_world_size()} ranks, but WORLD_SIZE is "
            f"{os.environ.get('WORLD_SIZE', 'not set')}; {_REMEDY}"
        )
        raise ParameterError(msg)


def _text(name: str) -> str:
    found = os.environ.get(name, "").strip()
    if not found:
        msg = f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but {name} is not set; {_REMEDY}"
        raise ParameterError(msg)
    return found


def _number(name: str) -> int:
    found = _text(name)
    is_number = found.isascii() and found.isdecimal() and len(found) < 10  # noqa: PLR2004
    if not is_number or (name.endswith("WORLD_SIZE") and int(found) == 0):
        msg = f"{name}={found!r} is not a valid number; {_REMEDY}"
        raise ParameterError(msg)
    return int(found)


# How many ranks are fed.

Limit = Literal["training", "threads", "processors", "memory", "storage", "network"]

_LIMITS: Mapping[Limit, str] = {
    "training": "training",
    "threads": "each rank's own threads",
    "processors": "the processors",
    "memory": "the bandwidth of memory",
    "storage": "storage",
    "network": "the network or the server",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FedRanks:
    """How well a number of ranks is fed.

    Parameters
    ----------
    n_ranks
        Ranks on this machine.
    utilization
        Share of its time that training computes, with its 95 % interval.
    basis
        "timed" if so many ranks were timed with the training step; else "predicted".
    limit
        What limits the pace: "training" if loading keeps up; each rank's "threads"; or what ranks
        share: "processors", "memory" (its bandwidth), "storage" or "network".
    needed_cells_per_second
        What so many ranks need together for training never to wait.
    is_beyond
        Whether that is more than was delivered in any measurement. The lower end of the interval
        is then what no more than that would give.
    """

    n_ranks: int
    utilization: Estimate
    basis: Literal["timed", "predicted"]
    limit: Limit
    needed_cells_per_second: float
    is_beyond: bool = False

    @property
    def remark(self) -> str:
        """What limits the pace, and what the figure rests on, in words."""
        said: str = self.basis
        if self.basis == "predicted" and self.is_beyond:
            said += ", beyond what was measured"
        if self.limit != "training":
            said += f"; limited by {_LIMITS[self.limit]}"
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many ranks this machine and this storage feed.

    Parameters
    ----------
    step_seconds
        How long each rank computes on a minibatch.
    ranks
        The numbers of ranks that were asked for, ascending; empty if too little was measured.
    one, two
        Cells per second of one rank and of two together, without a training step.
    note
        Why there are no figures; empty if there are.
    """

    step_seconds: float
    ranks: tuple[FedRanks, ...] = ()
    one: Estimate | None = None
    two: Estimate | None = None
    note: str = ""

    @property
    def n_fed(self) -> int:
        """The most ranks, of those asked for, of which as many and fewer reach 90 %; 0 if none."""
        return self._most(lambda each: each.utilization.value)

    @property
    def n_surely_fed(self) -> int:
        """The same by the lower ends of the intervals."""
        return self._most(lambda each: each.utilization.low)

    def _most(self, share: Callable[[FedRanks], float]) -> int:
        n = 0
        for each in self.ranks:
            if share(each) < UTILIZATION:
                break
            n = each.n_ranks
        return n

    @property
    def sentence(self) -> str:
        """The finding in words."""
        step = f"a training step of {1e3 * self.step_seconds:.3g} ms"
        if not self.ranks:
            return f"How many ranks with {step} are fed is not known: {self.note}."
        n, surely, most = self.n_fed, self.n_surely_fed, self.ranks[-1]
        if not n:
            fewest = self.ranks[0]
            return (
                f"With {step}, {Ranks.of(fewest.n_ranks)} would train "
                f"{fewest.utilization.value:.0%} of the time, below {UTILIZATION:.0%}: loading is "
                f"limited by {_LIMITS[fewest.limit]}."
            )
        basis = next(each.basis for each in self.ranks if each.n_ranks == n)
        said = (
            f"With {step}, this machine and storage feed {Ranks.of(n)} at a utilization of "
            f"{UTILIZATION:.0%}"
        )
        if basis == "predicted":
            known = f"surely {surely}" if surely else "surely none"
            said += f" (predicted{'' if surely == n else f', {known}'})"
        if n < most.n_ranks:
            after = next(each for each in self.ranks if each.n_ranks > n)
            if after.limit == "training":  # by the model, but not as it was measured
                return f"{said}; {Ranks.of(after.n_ranks)} reach {after.utilization.value:.0%}."
            return f"{said}; more are limited by {_LIMITS[after.limit]}."
        return f"{said}, the most that were asked for."
