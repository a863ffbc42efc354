"""The rank of this process, the number of ranks, and the seed that they share.

A dataset is often made before the ranks meet: Lightning starts the other ranks, and
initialises torch.distributed, in ``fit``. Ranks and seed are therefore determined when an epoch
begins or a plan is requested, not when a dataset is made.
"""

import itertools
import json
import os
import secrets
import warnings
from collections.abc import Mapping
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any

from cellfeed._errors import ParameterError, StateError, require_integer, require_positive
from cellfeed._torch import HAS_TORCH, dist, get_worker_info

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CommonSeed", "Ranks", "RanksCompared"]

Rank = tuple[int, int]  # rank, and the number of ranks


class Ranks:
    """The current rank of this process, and the number of ranks.

    They are the given ones; else those of torch.distributed, if it is initialised; else this
    process is the only one. A worker process that was not forked gets them from the process that
    started it.

    Parameters
    ----------
    rank, world_size
        Both, or neither.
    device_mesh
        A dimension of a device mesh, in place of both.

    Raises
    ------
    ParameterError
        One is given without the other, ``rank`` is outside [0, world_size), or a mesh has several
        dimensions or does not contain this process.
    """

    def __init__(
        self, rank: int | None, world_size: int | None, device_mesh: "DeviceMesh | None" = None
    ) -> None:
        self._given: Rank | None = None
        self._is_of_mesh = device_mesh is not None
        self._told: tuple[int, Rank] | None = None  # the process that was told, and what
        self._has_warned = False
        if device_mesh is not None:
            if rank is not None or world_size is not None:
                msg = (
                    f"`device_mesh` determines rank and world size, but got also {rank=}, "
                    f"{world_size=}; leave these out"
                )
                raise ParameterError(msg)
            self._given = _of_mesh(device_mesh)
            return
        if rank is None and world_size is None:
            return
        if rank is None or world_size is None:
            msg = (
                f"`rank` and `world_size` must be given together, but got {rank=}, {world_size=}; "
                "give both, or neither to use torch.distributed"
            )
            raise ParameterError(msg)
        rank, world_size = require_integer("rank", rank), require_positive("world_size", world_size)
        if not 0 <= rank < world_size:
            msg = f"`0 <= rank < world_size` must hold, but got {rank=}, {world_size=}"
            raise ParameterError(msg)
        self._given = rank, world_size

    @property
    def are_asked_for(self) -> bool:
        """Whether they come from torch.distributed, or from a device mesh."""
        return self._given is None or self._is_of_mesh

    @property
    def n_with_one_seed(self) -> int:
        """Number of processes that share a seed, including those that get the same data."""
        return dist.get_world_size() if self._is_of_mesh and _is_in_group() else self.look()[1]

    def now(self) -> Rank:
        """Return rank and number of ranks; see `look` for a version without a warning.

        Raises
        ------
        ParameterError
            The given values contradict torch.distributed.

        Warns
        -----
        UserWarning
            Once, if ``WORLD_SIZE`` names other ranks that this process has not met.
        """
        expected, worker = os.environ.get("WORLD_SIZE", ""), get_worker_info()
        is_alone = self._given is None and self.look() == (0, 1) and not _is_in_group()
        is_first = not self._has_warned and (worker is None or worker.id == 0)
        if is_alone and is_first and expected.isdecimal() and int(expected) > 1:
            self._has_warned = True
            warnings.warn(
                f"WORLD_SIZE={expected}, but torch.distributed is not initialised, so this "
                "process reads all rows; initialise it first, or give `rank` and `world_size`",
                UserWarning,
                stacklevel=4,
            )
        return self.look()

    def look(self) -> Rank:
        """Return rank and number of ranks as `now` does, without a warning."""
        if self._given is not None:
            return self._given if self._is_of_mesh else self._checked(*self._given)
        if _is_in_group():
            return dist.get_rank(), dist.get_world_size()
        if self._told is not None and self._told[0] == os.getpid() and get_worker_info():
            return self._told[1]
        return 0, 1

    def _checked(self, rank: int, world_size: int) -> Rank:
        """Return the given values, if they are possible: there may be several equal groups."""
        if _is_in_group():
            rank_there, size_there = dist.get_rank(), dist.get_world_size()
            is_another = world_size == size_there and rank != rank_there
            if is_another or size_there % world_size:
                msg = (
                    f"{rank=} and {world_size=} were given, but torch.distributed has rank "
                    f"{rank_there} of {size_there}; leave both out to use torch.distributed"
                )
                raise ParameterError(msg)
        return rank, world_size

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_told"] = self.look() if get_spawning_popen() is not None else None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._told = state["_told"] and (os.getpid(), state["_told"])


class CommonSeed:
    """A seed that is the same on all ranks.

    Parameters
    ----------
    seed
        The seed. If None, one is drawn, and all ranks use that of the first once they have met.

    Raises
    ------
    ParameterError
        ``seed`` is not an integer.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = secrets.randbits(63) if seed is None else require_integer("seed", seed)
        self._is_common = self._is_given = seed is not None
        self._is_used = False

    def agree(self, world_size: int) -> None:
        """Take the first rank's seed. All ranks must call this.

        Raises
        ------
        ParameterError
            The seed of this process has been used already, or the ranks have not met.
        """
        if self._is_common or world_size == 1:
            return
        if not _is_in_group():
            msg = (
                f"`seed` must be given with {world_size=}, so that all ranks use the same order; "
                "or initialise torch.distributed first, which shares one"
            )
            raise ParameterError(msg)
        if self._is_used:
            msg = (
                "this process has already used a seed that it drew for itself, but there are "
                f"{world_size} ranks now, which need a common seed; give `seed`"
            )
            raise ParameterError(msg)
        drawn = [self._seed]
        dist.broadcast_object_list(drawn, src=0)
        self._seed, self._is_common = drawn[0], True

    def take(self, seed: int) -> None:
        """Use the seed of a resumed run, on all ranks.

        Raises
        ------
        StateError
            Another seed was given.
        """
        if self._is_given and seed != self._seed:
            msg = (
                f"the state is of a run with seed={seed}, but seed={self._seed} was given; leave "
                "`seed` out, or give the same"
            )
            raise StateError(msg)
        self._seed, self._is_common = seed, True

    def use(self, world_size: int) -> int:
        """Return the seed, which cannot change from now on.

        Raises
        ------
        ParameterError
            The ranks have not agreed on a seed.
        """
        if world_size > 1 and not self._is_common:
            msg = (
                f"this process drew `seed` for itself, but there are {world_size} ranks now; give "
                "`seed`, or iterate over `dataset.loader()`, where all ranks take that of the "
                "first"
            )
            raise ParameterError(msg)
        self._is_used = True
        return self._seed


class RanksCompared:
    """Compares what ranks read when they begin, to find a rank that differs.

    No rank waits: each publishes what it reads, and compares it with what others have published by
    then, so the last one sees all. Datasets are identified by the order in which they are made,
    which is the same on all ranks.

    Parameters
    ----------
    are_asked_for
        Whether ranks come from torch.distributed. Other ranks are not compared.
    """

    _numbers = itertools.count()

    def __init__(self, *, are_asked_for: bool) -> None:
        self._number = next(self._numbers) if are_asked_for else None

    @property
    def is_due(self) -> bool:
        """Whether ranks have met, and have not been compared yet."""
        return self._number is not None and _is_in_group() and dist.get_world_size() > 1

    def compare(self, identity: Mapping[str, Any]) -> None:
        """Compare the ranks, once, when it is due.

        Parameters
        ----------
        identity
            What this rank reads, as JSON values.

        Raises
        ------
        ParameterError
            Another rank reads something else.
        """
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no other way
        rank, prefix = dist.get_rank(), f"cellfeed/{self._number}"
        self._number = None
        mine = json.dumps(identity, sort_keys=True)
        store.set(f"{prefix}/{rank}", mine)
        for other in range(dist.get_world_size()) if rank == 0 else (0,):
            key = f"{prefix}/{other}"
            if other != rank and store.check([key]) and (its := store.get(key).decode()) != mine:
                raise ParameterError(_difference(rank, identity, other, json.loads(its)))


def _difference(rank: int, mine: Mapping[str, Any], other: int, its: Mapping[str, Any]) -> str:
    """Return the difference between what two ranks read, in one line."""
    differing = (
        "; ".join(
            f"{name}={value!r} on rank {rank}, {name}={its[part].get(name)!r} on rank {other}"
            for part in mine
            for name, value in mine[part].items()
            if its[part].get(name) != value
        )
        or "their parameters differ"
    )
    return (
        f"ranks read different data, and would wait for each other forever: {differing}; "
        "give all ranks the same files and parameters"
    )


def _of_mesh(mesh: "DeviceMesh") -> Rank:
    """Return rank and size in a mesh of one dimension."""
    n_dimensions = getattr(mesh, "ndim", None)
    if n_dimensions != 1 or not hasattr(mesh, "get_local_rank"):
        msg = (
            f"`device_mesh` must be a DeviceMesh with one dimension, but got {mesh!r}; give the "
            "dimension along which data differ, such as mesh['dp']"
        )
        raise ParameterError(msg)
    if mesh.get_coordinate() is None:
        msg = f"`device_mesh` must contain this process, rank {dist.get_rank()}, but got {mesh!r}"
        raise ParameterError(
            f"{msg}; leave it out, or make the dataset only in processes of the mesh"
        )
    return mesh.get_local_rank(), mesh.size()


def _is_in_group() -> bool:
    return HAS_TORCH and dist.is_available() and dist.is_initialized()
