"""The rank of this process, the number of ranks, the seed that they share, and how they begin.

A dataset is often made before the ranks meet: Lightning starts the other ranks, and
initialises torch.distributed, in ``fit``. Ranks and seed are therefore determined when an epoch
begins or a plan is requested, not when a dataset is made.

Ranks begin together: each states in the store of the process group what it begins, and the first
compares the statements and tells the others, so that all go on or all raise the same error.
"""

import json
import logging
import os
import secrets
import time
import warnings
from collections.abc import Mapping
from typing import Any

from cellfeed._errors import (
    DeliveryError,
    ParameterError,
    StateError,
    one_line,
    require_integer,
    require_positive,
    require_seed,
)
from cellfeed._torch import HAS_TORCH, dist, get_worker_info

Rank = tuple[int, int]  # rank, and the number of ranks
# Seconds between two looks into the store: short at first, since ranks come almost at once.
_LEAST_PAUSE, _MOST_PAUSE = 0.001, 0.1
# Seconds after which the log names the ranks that have not come.
_SAID_AFTER = 30.0
# Seconds that the first rank waits until others have heard of an error. Chosen: a look takes 0.1 s.
_MOST_LEAVING = 20.0

_logger = logging.getLogger("cellfeed")


class Ranks:
    """The current rank of this process, and the number of ranks.

    They are the given ones; else those of torch.distributed, if it is initialised; else this
    process is the only one. A worker process that was not forked gets them from the process that
    started it.

    Parameters
    ----------
    rank, world_size
        Both, or neither.

    Raises
    ------
    ParameterError
        One is given without the other, or is no integer.
    """

    def __init__(self, rank: int | None, world_size: int | None) -> None:
        self._given: Rank | None = None
        self._told: Rank | None = None
        self._has_warned = False
        if rank is None and world_size is None:
            return
        if rank is None or world_size is None:
            msg = (
                f"`rank` and `world_size` must be given together, but got {rank=}, {world_size=}; "
                "give both, or neither to use torch.distributed"
            )
            raise ParameterError(msg)
        # A plan checks that the rank is among them.
        self._given = require_integer("rank", rank), require_positive("world_size", world_size)

    @property
    def need_seed(self) -> str:
        """What was given that other processes share the order by, who are not asked; or empty."""
        return "" if self._given in (None, (0, 1)) else f"world_size={self._given[1]}"

    @property
    def group(self) -> Any:
        """The process group in which ranks begin together; None for a rank by itself."""
        group: Any = dist.group.WORLD if self._given is None and _is_in_group() else None
        return group if group is not None and group.size() > 1 else None

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
            return self._checked(*self._given)
        if _is_in_group():
            return dist.get_rank(), dist.get_world_size()
        if self._told is not None and get_worker_info() is not None:
            return self._told
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

    def __deepcopy__(self, _: Any) -> "Ranks":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """In a worker process, they are those of the process that starts it."""
        return vars(self) | {"_told": self.look()}


class CommonSeed:
    """A seed that is the same on all ranks.

    One that is not given is drawn. It is fixed when ranks first begin together, as that of the
    first, or when a single process first uses it.

    Parameters
    ----------
    seed
        The seed, or None.
    ranks
        The ranks.

    Raises
    ------
    ParameterError
        ``seed`` is not an integer, or is None where ranks are given.
    """

    def __init__(self, seed: int | None, ranks: Ranks) -> None:
        self._seed = secrets.randbits(63) if seed is None else require_seed(seed)
        self._is_given = self._is_fixed = seed is not None
        if not self._is_given and (given := ranks.need_seed):
            msg = f"`seed` must be given with {given}, so that all ranks use the same order"
            raise ParameterError(msg)

    @property
    def fixed(self) -> int | None:
        """The seed; None until it is fixed."""
        return self._seed if self._is_fixed else None

    def stated(self, rank: int) -> int | None:
        """Return the seed that a rank states: the first one's, or one that is fixed already."""
        return self._seed if rank == 0 else self.fixed

    def take(self, seed: int) -> None:
        """Use the seed of the first rank, which does not differ from one that is fixed."""
        self._seed, self._is_fixed = seed, True

    def require_no_other(self, seed: int) -> None:
        """Check that a seed can be that of a resumed run.

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

    def use(self, world_size: int) -> int:
        """Return the seed, which cannot change from now on.

        Raises
        ------
        ParameterError
            Several ranks have not begun together yet.
        """
        if world_size > 1 and not self._is_fixed:
            msg = (
                f"this process drew `seed` for itself, but there are {world_size} ranks, which "
                "take that of the first when they begin an epoch; give `seed`"
            )
            raise ParameterError(msg)
        self._is_fixed = True
        return self._seed


# Ranks begin together.


def begin_together(group: Any, statement: Mapping[str, Any]) -> dict[str, Any]:
    """State what this rank begins, wait for the others, and return what the first one stated.

    All ranks of the group call this, as a barrier. In all, they need a few operations for each rank
    on the store of the group.

    Parameters
    ----------
    group
        The process group.
    statement
        JSON values by name, which must be the same on all ranks; where a seed is None, the first
        rank's is taken.

    Raises
    ------
    ParameterError
        The ranks begin different things; the same error on all of them.
    DeliveryError
        A rank does not come within the timeout of the group, or the store is gone.
    """
    store_of = getattr(group, "get_group_store", None)
    if store_of is None:
        msg = "several ranks need PyTorch 2.8 or newer; update it, or give `rank` and `world_size`"
        raise ParameterError(msg)
    try:
        verdict = _exchanged(store_of(), group.rank(), group.size(), statement)
    except RuntimeError as error:
        if isinstance(error, DeliveryError):
            raise
        msg = f"ranks cannot begin an epoch together: {one_line(error)}; start all of them again"
        raise DeliveryError(msg) from error
    if "missing" in verdict:
        raise DeliveryError(verdict["missing"])
    if "difference" in verdict:
        raise ParameterError(verdict["difference"])
    first: dict[str, Any] = verdict["first"]
    return first


def _exchanged(store: Any, rank: int, n_ranks: int, statement: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the first rank tells all of them, once they have come."""
    # Counted in the store, which may outlast the group.
    number = store.add(f"cellfeed/begun by {rank}", 1)
    key = f"cellfeed/{number}"
    store.set(f"{key}/{rank}", json.dumps(statement, sort_keys=True))
    store.add(f"{key}/come", 1)
    if rank == 0:
        store.set(f"{key}/verdict", json.dumps(_verdict(store, key, n_ranks)))
        # All have seen the one before, as they have come to this one.
        for name in ("come", "verdict", *range(n_ranks)) if number > 1 else ():
            store.delete_key(f"cellfeed/{number - 1}/{name}")
    else:
        try:
            _wait(store, lambda: store.check([f"{key}/verdict"]), key, n_ranks)
        except BaseException:
            store.add(f"{key}/come", -1)  # so that no other goes on alone
            raise
    verdict: dict[str, Any] = json.loads(store.get(f"{key}/verdict"))
    if "first" not in verdict:
        # The first rank, which may have the store, waits until the others know the verdict.
        n_heard, began = store.add(f"{key}/heard", 1), time.monotonic()
        while rank == 0 and n_heard < n_ranks and time.monotonic() - began < _MOST_LEAVING:
            time.sleep(_MOST_PAUSE)
            n_heard = store.add(f"{key}/heard", 0)
    return verdict


def _verdict(store: Any, key: str, n_ranks: int) -> dict[str, Any]:
    """Return, on the first rank, what all ranks are told."""
    try:
        _wait(store, lambda: store.add(f"{key}/come", 0) >= n_ranks, key, n_ranks)
    except DeliveryError as error:
        return {"missing": str(error)}
    first, *others = (json.loads(store.get(f"{key}/{rank}")) for rank in range(n_ranks))
    for rank, its in enumerate(others, 1):
        differing = [
            f"{name}={value!r} on rank 0, {name}={its.get(name)!r} on rank {rank}"
            for name, value in first.items()
            if its.get(name) != value and not (name.startswith("seed") and its[name] is None)
        ]
        if differing:
            msg = (
                f"ranks begin different epochs: {'; '.join(differing)}; give all ranks the same "
                "files, parameters and state, call `set_epoch(epoch)` on all ranks, look at "
                "minibatches of one rank with `peek(n)`, or give rank=0, world_size=1 to a dataset "
                "that one rank uses by itself"
            )
            return {"difference": msg}
    return {"first": first}


def _wait(store: Any, is_ready: Any, key: str, n_ranks: int) -> None:
    """Wait for other ranks, for as long as the group does.

    Raises
    ------
    DeliveryError
        It took too long.
    """
    began, pause, has_said = time.monotonic(), _LEAST_PAUSE, False
    most = store.timeout.total_seconds()
    while not is_ready():
        waited = time.monotonic() - began
        if waited > (most if has_said else min(most, _SAID_AFTER)):
            missing = [k for k in range(n_ranks) if not store.check([f"{key}/{k}"])]
            who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing or [0]))}"
            msg = (
                f"{who} of {n_ranks} did not begin an epoch with the others within {waited:.0f} s; "
                "iterate on all ranks, look at minibatches with `peek(n)`, or give rank=0, "
                "world_size=1 to a dataset that one rank uses by itself"
            )
            if waited > most:
                raise DeliveryError(msg)
            _logger.warning(msg)
            has_said = True
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in nested mappings by their dotted names."""
    found = dict[str, Any]()
    for name, each in value.items():
        is_nested = isinstance(each, Mapping)
        found |= flat(each, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": each}
    return found


def _is_in_group() -> bool:
    return HAS_TORCH and dist.is_available() and dist.is_initialized()
