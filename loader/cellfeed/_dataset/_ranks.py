"""The rank of this process, the number of ranks, the seed that they share, and where they are.

A dataset is often made before the ranks meet: Lightning starts the other ranks, and
initialises torch.distributed, in ``fit``. Ranks and seed are therefore determined when an epoch
begins or a plan is requested, not when a dataset is made.

Ranks tell each other through the store of torch.distributed, in which nobody waits: a collective
would hang if one rank alone takes a minibatch.
"""

import contextlib
import itertools
import json
import os
import secrets
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, TypeAlias

from cellfeed._errors import (
    ParameterError,
    StateError,
    one_line,
    require_integer,
    require_positive,
    require_seed,
)
from cellfeed._torch import HAS_TORCH, dist, get_worker_info

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Rank = tuple[int, int]  # rank, and the number of ranks
# Of each rank, that others may look at.
_N_BEGINNINGS = 16
# Groups of a mesh along which stages of a pipeline send to each other, by their usual names.
_PIPELINES = ("mesh_pp", "mesh_pipe", "mesh_pipeline", "mesh_stage")
# How long a rank that has found a difference waits for others to find it: twenty seconds, since
# others may still be starting their workers on a busy machine.
_N_WAITS, _WAIT_SECONDS = 400, 0.05


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
        self.mesh_group: str | None = None  # the name of the group of a mesh
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
            self.mesh_group = device_mesh.get_group().group_name
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
    def may_be_several(self) -> bool:
        """Whether this process is not by itself by its parameters."""
        return self._given is None or self._is_of_mesh or self._given[1] > 1

    @property
    def are_of_group(self) -> bool:
        """Whether they are those of torch.distributed, which is initialised, or of a mesh."""
        return self._is_of_mesh or self.look() == (dist.get_rank(), dist.get_world_size())

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
        self._seed = secrets.randbits(63) if seed is None else require_seed(seed)
        self._is_common = self._is_given = seed is not None
        self._is_used = False

    def agree(self, world_size: int, compared: "RanksCompared") -> None:
        """Take the seed of the rank that is first to ask; none waits for another.

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
        self._seed, self._is_common = compared.common("seed", self._seed), True

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

    def take(self, seed: int) -> None:
        """Use the seed of a resumed run, on all ranks; see `require_no_other`."""
        self.require_no_other(seed)
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


Clock: TypeAlias = tuple[tuple[str, int], ...]
"""Number of collectives that a rank has begun in each of its groups, by name. Two ranks compare
those of the groups that both are in."""


class Beginning(NamedTuple):
    """Where an iteration of a rank began.

    Parameters
    ----------
    clock
        The collectives that the rank had begun.
    epoch
        The epoch.
    n_before
        Number of its minibatches that had been delivered before.
    seed
        The seed, as a JSON value.
    """

    clock: Clock
    epoch: int
    n_before: int
    seed: Any

    @property
    def place(self) -> tuple[int, int, Any]:
        """What is the same on all ranks."""
        return self.epoch, self.n_before, self.seed

    @staticmethod
    def of(json_value: Any) -> "Beginning":
        """Return what was written as JSON."""
        clock, *place = json_value
        return Beginning(tuple((name, n) for name, n in clock), *place)

    def text(self, *, with_seed: bool) -> str:
        """Return it as text."""
        after = f" after {self.n_before:,} minibatches" if self.n_before else ""
        return f"epoch {self.epoch}{after}" + (f" with seed={self.seed}" if with_seed else "")


@dataclass(slots=True)
class _Interval:
    """What a rank began between two collectives, in how much of it ranks trained, and last."""

    begun: list[Beginning] = field(default_factory=list)
    n_trained: int = 0
    trained: Beginning | None = None


_Intervals: TypeAlias = list[_Interval]


class RanksCompared:
    """Compares what the ranks read, and which epochs they begin, to find a rank that differs.

    No rank waits: each publishes what it reads and where its iterations begin, and looks at what
    others have published by then. Datasets are identified by the order in which they are made,
    which is the same on all ranks, and copies by those of the same dataset since the last
    collective. Iterations belong together if they began between the same two collectives, which
    torch.distributed counts: all ranks of a group begin the same collectives, so whatever they did
    before the last of them is known to all of these. Ranks that share no group in which there was a
    collective, as some do on a mesh of several dimensions, are compared through others.

    Parameters
    ----------
    ranks
        The ranks. They are compared if they are those of torch.distributed.
    """

    _numbers = itertools.count()
    # Of all datasets, in one group: what this rank trained in last, as dataset and beginning, and
    # when it began those over which others may not iterate, by number.
    _trained: ClassVar[deque[tuple[str, Beginning]]] = deque(maxlen=_N_BEGINNINGS)
    _own: ClassVar[dict[str, Clock]] = {}
    _group_of_all: ClassVar[Any] = None

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._number = str(next(self._numbers)) if ranks.may_be_several else None
        # Number of collectives of all ranks, and copies since.
        self._copied: tuple[int | None, int] = (None, 0)
        self._has_compared = False
        self._begun: dict[Clock, _Interval] = {}
        self._published: set[int] = set()  # ranks that have published where they began
        self._is_watched = False  # whether this rank may be the only one that has
        self._has_warned = False  # that ranks cannot be compared
        self._group: Any = None  # that these are of

    @property
    def is_due(self) -> bool:
        """Whether ranks have met, and what they read has not been compared yet."""
        return not self._has_compared and self._have_met

    @property
    def clock(self) -> Clock | None:
        """The collectives that this rank has begun; None if it is not compared with others.

        The same numbers in another `group` are not the same time.
        """
        if not self._have_met:
            return None
        counts = ((name, _n_collectives(group)) for name, group in self._groups())
        return tuple((name, n) for name, n in counts if n is not None) or None

    def _groups(self) -> Iterator[tuple[str, Any]]:
        """Yield the groups whose collectives belong to training, with their names.

        They are, after that of all ranks, those of meshes, except for stages of a pipeline: gloo
        counts what these send, too, which are different numbers. In others, such as of a thread
        that saves checkpoints, ranks need not be in step.
        """
        of_mesh = self._ranks.mesh_group
        for group, name in dist.distributed_c10d._world.pg_names.items():  # noqa: SLF001 - no other
            is_of_all = group is dist.distributed_c10d._get_default_group()  # noqa: SLF001
            described = str(getattr(group, "group_desc", ""))
            is_of_mesh = described.startswith("mesh_") and described not in _PIPELINES
            if is_of_all or is_of_mesh or name == of_mesh:
                yield name, group

    @property
    def n_elsewhere(self) -> int:
        """Number of collectives of this rank in other groups that may be of training."""
        if not self._have_met:
            return 0
        counted, backend = {name for name, _ in self._groups()}, dist.get_backend()
        return sum(
            _n_collectives(group) or 0
            for group, name in dist.distributed_c10d._world.pg_names.items()  # noqa: SLF001 - no other
            if name not in counted and dist.get_backend(group) == backend
        )

    def warn_of_other_groups(self, beginning: Beginning, n_elsewhere: int) -> None:
        """Warn, once, if ranks train in groups by which they are not compared.

        Parameters
        ----------
        beginning, n_elsewhere
            Where an iteration began, and `n_elsewhere` when it did.
        """
        is_compared = self.clock != beginning.clock
        if is_compared or self._has_warned or self.n_elsewhere == n_elsewhere:
            return
        self._has_warned = True
        warnings.warn(
            f"since epoch {beginning.epoch} began, there were collectives in other groups, but "
            "none in the group of all ranks or of a device mesh, so that ranks cannot be compared; "
            "call torch.distributed.barrier() after each epoch, also after one that is broken off",
            UserWarning,
            stacklevel=2,
        )

    def _shared_groups(self) -> dict[int, set[str]]:
        """Return the names of these groups that each rank shares with this one."""
        found = dict[int, set[str]]()
        for name, group in self._groups():
            for rank in dist.get_process_group_ranks(group):
                found.setdefault(rank, set()).add(name)
        return found

    @property
    def group(self) -> Any:
        """What tells the group in which ranks are compared from others; None without one."""
        return _store() if self._have_met else None

    @property
    def _have_met(self) -> bool:
        is_several = self._number is not None and _is_in_group() and dist.get_world_size() > 1
        return is_several and self._ranks.are_of_group

    def common(self, name: str, value: int) -> int:
        """Return the value of the rank that is first to ask for it.

        Raises
        ------
        ParameterError
            The rank that has the store of torch.distributed is gone.
        """
        store, key = _store(), f"cellfeed/{self._number}/{name}"
        try:
            if store.add(f"{key}/asked", 1) == 1:
                store.set(key, str(value))
            return int(store.get(key))
        except RuntimeError as error:
            msg = f"ranks cannot agree on `{name}`: {one_line(error)}; give `{name}`"
            raise ParameterError(msg) from error

    def compare(self, identity: Mapping[str, Any]) -> None:
        """Compare what ranks read, once, when it is due.

        Parameters
        ----------
        identity
            What this rank reads, as JSON values.

        Raises
        ------
        ParameterError
            Another rank reads something else.
        """
        self._has_compared = True
        store, rank, prefix = _store(), dist.get_rank(), f"cellfeed/{self._number}"
        mine, theirs = json.dumps(identity, sort_keys=True), dict[int, str]()
        # If the rank that has the store is gone, the next collective says so.
        with contextlib.suppress(RuntimeError):
            store.set(f"{prefix}/{rank}", mine)
            for other in range(dist.get_world_size()) if rank == 0 else (0,):
                key = f"{prefix}/{other}"
                if other != rank and store.check([key]):
                    theirs[other] = store.get(key).decode()
        for other, its in theirs.items():
            if its != mine:
                raise ParameterError(_difference(rank, identity, other, json.loads(its)))

    def begin(self, beginning: Beginning, *, is_trained: bool = False) -> None:
        """Publish where an iteration of this rank begins, or again once ranks trained in it.

        Warns
        -----
        UserWarning
            This rank iterated over a dataset before the last collective, and no other rank has.
        """
        if self.group is not self._group:
            self._group, self._begun, self._published = self.group, {}, set()
            self._is_watched = False
        if RanksCompared._group_of_all is not self._group:
            RanksCompared._group_of_all = self._group
            self._trained.clear()
            self._own.clear()
        self._warn_of_own(beginning.clock)
        interval = self._begun.setdefault(beginning.clock, _Interval())
        if beginning not in interval.begun:
            interval.begun = [*interval.begun, beginning][-_N_BEGINNINGS:]
        if is_trained:
            interval.trained = beginning
            interval.n_trained += 1
            self._publish_trained(beginning)
        while len(self._begun) > _N_BEGINNINGS:
            del self._begun[next(iter(self._begun))]
        self._publish()

    def warn_of_own_later(self, beginning: Beginning) -> None:
        """Let another dataset warn if no other rank iterates over this one: it is no mere look."""
        if self._number is not None and not self._is_watched:
            self._is_watched = True
            if [*self._begun] == [beginning.clock]:
                self._own[self._number] = beginning.clock

    def _warn_of_own(self, clock: Clock) -> None:
        own = self._own
        store, rank, n_ranks = _store(), dist.get_rank(), dist.get_world_size()
        ended = [
            number
            for number, before in own.items()
            if number != self._number and not _are_same({*dict(before)}, clock, before)
        ]
        for number in ended:
            del own[number]
            keys = [f"cellfeed/{number}/begun/{k}" for k in range(n_ranks) if k != rank]
            with contextlib.suppress(RuntimeError):  # see `compare`
                if not any(store.check([key]) for key in keys):
                    warnings.warn(
                        f"only rank {rank} iterated over a dataset, and got one of {n_ranks} "
                        "shares of its cells; iterate over it on all ranks, or give rank=0, "
                        "world_size=1 to one that a rank makes by itself",
                        UserWarning,
                        stacklevel=2,
                    )

    def require_same(self, beginning: Beginning) -> None:
        """Check that ranks trained in the same as this one, which went through a collective since.

        Raises
        ------
        ParameterError
            A rank began another epoch, or elsewhere in it.
        """
        self._publish()  # that this rank has come so far
        shared = self._shared_groups()
        since = self._met_since(beginning, shared)
        for other, (clock, intervals) in (self._others() or {}).items():
            its = self._beside(beginning, shared[other], intervals).trained
            is_final = _is_known(beginning, clock)
            if other in since and its and is_final and its.place != beginning.place:
                self._refuse(beginning, other, its)
        self._require_no_other_dataset(beginning, {k: shared[k] for k in since})

    def warn_of_others(self, beginning: Beginning) -> None:
        """Warn if a rank delivered as many epochs since the last collective, but not the same.

        An error would leave the others waiting; they find it when they begin the next one.
        """
        interval, shared = self._begun.get(beginning.clock, _Interval()), self._shared_groups()
        for other, (_, intervals) in (self._others() or {}).items():
            theirs = self._beside(beginning, shared[other], intervals)
            mine, its = interval.trained, theirs.trained
            are_as_far = interval.n_trained == theirs.n_trained
            if mine and its and are_as_far and mine.place != its.place:
                warnings.warn(_difference_of_epochs(mine, other, its), UserWarning, stacklevel=2)
                return

    def have_begun(self, beginning: Beginning) -> bool | None:
        """Whether all ranks began the same as this one, between the same two collectives.

        Of ranks that have begun collectives since then, only those count that were in one of them.
        None if it is unknown, since they may still come to it.

        Raises
        ------
        ParameterError
            A rank has begun nothing that this one did.
        """
        shared, others, own = self._shared_groups(), self._others(), self._begun
        since = self._met_since(beginning, shared)
        if others is None or beginning.clock not in own:  # or it was long ago
            return others is None and bool(since)
        asked = since or {*shared} - {dist.get_rank()}
        theirs = {
            k: self._beside(beginning, shared[k], others[k][1]).begun for k in asked if k in others
        }
        places = {k: [each.place for each in begun] for k, begun in theirs.items() if begun}
        missing = asked - {*places}
        if any(not _is_known(beginning, others[k][0] if k in others else ()) for k in missing):
            return None
        mine = [each.place for each in own[beginning.clock].begun]
        if since and not missing:
            for other, begun in places.items():
                if not any(each in mine for each in begun):
                    self._refuse(beginning, other, theirs[other][-1])
        return sum(beginning.place in begun for begun in places.values()) == len(asked)

    def _beside(self, beginning: Beginning, shared: set[str], intervals: _Intervals) -> _Interval:
        """Return what another rank began between the same two collectives that both were in.

        If one of them was in others meanwhile, it is unknown which of its iterations belong.

        Parameters
        ----------
        beginning, intervals
            Where an iteration of this rank began, and what the other has published.
        shared
            The names of the groups that both are in.
        """
        clock = beginning.clock
        found = [each for each in intervals if _are_same(shared, clock, each.begun[0].clock)]
        mine = [each for each in self._begun if _are_same(shared, clock, each)]
        if len(found) == 1 and len(mine) <= 1:
            return found[0]
        return _Interval([begun for each in found for begun in each.begun])

    def _met_since(self, beginning: Beginning, shared: dict[int, set[str]]) -> set[int]:
        """Return the ranks that were in a collective with this one since an iteration began."""
        moved = _moved(beginning.clock, self.clock or ())
        return {rank for rank, names in shared.items() if names & moved} - {dist.get_rank()}

    def _refuse(
        self, mine: Beginning, other: int, its: Beginning, *, is_other: bool = False
    ) -> NoReturn:
        """Raise an error with what two ranks began, in one line.

        If this process ended at once, a collective of the others would fail before they say so.
        """
        store, key = _store(), f"cellfeed/refused/{mine.clock[0][1]}"  # the group of all is first
        n_others = len(self._met_since(mine, self._shared_groups()))
        try:
            store.add(key, 1)
            for _ in range(_N_WAITS):
                if store.add(key, 0) > n_others:
                    break
                time.sleep(_WAIT_SECONDS)
        except RuntimeError:  # see `compare`
            pass
        if is_other:
            msg = (
                f"ranks train on different datasets, so that cells are missing: "
                f"{_what_began(mine, other, its)} of another dataset; make the same datasets in "
                "the same order on all ranks, and give rank=0, world_size=1 to one that a rank "
                "makes by itself"
            )
            raise ParameterError(msg)
        raise ParameterError(_difference_of_epochs(mine, other, its))

    def _require_no_other_dataset(self, beginning: Beginning, met: dict[int, set[str]]) -> None:
        """Check that ranks did not train in another order of another dataset meanwhile.

        Datasets have other numbers, and other seeds, after one that only some of the ranks made.
        """
        store, clock = _store(), beginning.clock
        mine = [
            (n, each.place)
            for n, each in self._trained
            if _are_same({*dict(clock)}, clock, each.clock)
        ]
        with contextlib.suppress(RuntimeError):  # see `compare`
            for other, names in met.items():
                key = f"cellfeed/trained/{other}"
                trained = json.loads(store.get(key)) if store.check([key]) else []
                found = [(n, Beginning.of(each)) for n, each in trained]
                its = {n: each for n, each in found if _are_same(names, clock, each.clock)}
                # If this rank trained there too, it began this one by itself, as is said elsewhere.
                is_mine = all((n, each.place) in mine for n, each in its.items())
                is_there = any(each.place == beginning.place for each in its.values())
                if not is_mine and self._number not in its and not is_there:
                    self._refuse(beginning, other, next(iter(its.values())), is_other=True)

    def _publish_trained(self, beginning: Beginning) -> None:
        self._trained.append((self._number or "", beginning))
        with contextlib.suppress(RuntimeError):  # see `compare`
            _store().set(f"cellfeed/trained/{dist.get_rank()}", json.dumps([*self._trained]))

    def _publish(self) -> None:
        intervals = [(each.begun, each.n_trained, each.trained) for each in self._begun.values()]
        content = json.dumps([self.clock, intervals])
        store, key = _store(), f"cellfeed/{self._number}/begun/{dist.get_rank()}"
        with contextlib.suppress(RuntimeError):  # see `compare`
            store.set(key, content)
            # A store does not answer `set`, so that others might look, after a collective, before
            # it is there; it answers this, after all that this rank has set.
            store.check([key])

    def _others(self) -> "dict[int, tuple[Clock, _Intervals]] | None":
        """Return the clocks of other ranks and where they began, by rank, as far as is known.

        None if the rank that has the store is gone.
        """
        store, rank, prefix = _store(), dist.get_rank(), f"cellfeed/{self._number}/begun"
        try:
            for other in set(range(dist.get_world_size())) - self._published - {rank}:
                if store.check([f"{prefix}/{other}"]):
                    self._published.add(other)
            others = sorted(self._published)
            contents = store.multi_get([f"{prefix}/{each}" for each in others]) if others else []
        except RuntimeError:
            return None
        found = {}
        for other, content in zip(others, contents, strict=True):
            clock, intervals = json.loads(content)
            found[other] = (
                tuple((name, n) for name, n in clock or ()),
                [
                    _Interval(
                        [Beginning.of(each) for each in begun],
                        n_trained,
                        trained and Beginning.of(trained),
                    )
                    for begun, n_trained, trained in intervals
                ],
            )
        return found

    def __getstate__(self) -> dict[str, Any]:
        number = self._number
        if number is not None and get_spawning_popen() is None:
            # A copy that one rank makes by itself does not change the numbers of later ones.
            clock = _n_collectives_of_all() if self._have_met else None
            n = self._copied[1] + 1 if self._copied[0] == clock else 1
            self._copied, number = (clock, n), f"{number}.{clock}.{n}"
        return self.__dict__ | {
            "_number": number,
            "_copied": (None, 0),
            "_begun": {},
            "_published": set(),
            "_is_watched": False,
            "_group": None,
        }


def _is_known(beginning: Beginning, clock: Clock) -> bool:
    """Whether what another rank began when this one did is known, from when it published last.

    Collectives of gloo wait for it, others may be behind.
    """
    return dist.get_backend() == "gloo" or bool(_moved(beginning.clock, clock))


def _moved(before: Clock, now: Clock) -> set[str]:
    """Return the groups in which there were collectives in between."""
    then = dict(before)
    return {name for name, n in now if n > then.get(name, n)}


def _are_same(shared: set[str], one: Clock, other: Clock) -> bool:
    """Whether two ranks had begun the same collectives of the groups that they share."""
    there = dict(other)
    return all(there.get(name, n) == n for name, n in one if name in shared)


def _what_began(mine: Beginning, other: int, its: Beginning) -> str:
    with_seed = mine.seed != its.seed
    return (
        f"rank {dist.get_rank()} began {mine.text(with_seed=with_seed)}, rank {other} began "
        f"{its.text(with_seed=with_seed)}"
    )


def _difference_of_epochs(mine: Beginning, other: int, its: Beginning) -> str:
    """Return the difference between what two ranks began, in one line."""
    began = _what_began(mine, other, its)
    if mine.seed != its.seed:
        return (
            f"ranks have different seeds, so that cells are missing: {began}; give the same `seed` "
            "on all ranks"
        )
    return (
        f"ranks are in different epochs, so that cells are missing: {began}; load the same "
        "state on all ranks, and call `set_epoch(epoch)` on all ranks before each epoch if "
        "some take more minibatches than others"
    )


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
        f"ranks read different data, or read them differently: {differing}; "
        "give all ranks the same files and parameters, and rank=0, world_size=1 to a dataset that "
        "one rank makes by itself"
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


def _n_collectives(group: Any) -> int | None:
    """Return how many collectives this rank has begun in a group; None if it does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # noqa: SLF001 - the only way
    except (AttributeError, RuntimeError):
        return None


def _n_collectives_of_all() -> int | None:
    return _n_collectives(dist.distributed_c10d._get_default_group())  # noqa: SLF001 - the only way


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no other way


def _is_in_group() -> bool:
    return HAS_TORCH and dist.is_available() and dist.is_initialized()
