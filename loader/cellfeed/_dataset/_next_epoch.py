"""Where what was read of the next epoch waits until that begins, or another does."""

import os
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from cellfeed._dataset._iteration import Iteration
from cellfeed.sampling import EpochPlan, Share

__all__ = ["NextEpoch", "are_same"]


class ReadAhead(Protocol):
    """Fetches that are under way, by threads that end where the generator is closed."""

    @property
    def groups(self) -> Generator[Any, None, None]: ...


F = TypeVar("F", bound=ReadAhead)


class NextEpoch(Generic[F]):
    """Keeps fetches that were read ahead of their epoch: of one data set, and of one epoch.

    They are closed where they are not what is wanted next, and where this is dropped, by a thread,
    since no Python code may run there. Pickled copies and forked processes have none.
    """

    def __init__(self) -> None:
        self._kept = deque["_Kept[F]"]()  # whose methods are atomic: any thread may begin an epoch

    def keep(self, fetches: F, share: Share, settings: tuple[object, ...]) -> None:
        """Keep fetches, and give up those from before.

        Parameters
        ----------
        fetches
            They refer to nothing that refers to this.
        share
            What they begin with.
        settings
            What they were read with.
        """
        self.let_go()
        waiting = Iteration(fetches.groups, begun=True)
        self._kept.append(_Kept(os.getpid(), fetches, share, settings, waiting))

    def take(self, share: Share, settings: tuple[object, ...]) -> F | None:
        """Return fetches that begin with a share, if there are any, and give up all others.

        Parameters
        ----------
        share, settings
            See `keep`; settings are the same if they are the same objects.
        """
        found = self._pop()
        if found is None or found.process != os.getpid():
            return None
        if are_same(found.share, share) and _are_identical(found.settings, settings):
            found.waiting.release()
            return found.fetches
        found.waiting.close()
        return None

    def let_go(self, *, unless: int | None = None) -> None:
        """Give up what is kept, unless it is of this epoch, and wait until that has ended."""
        found = self._pop()
        if found is not None and found.share.plan.epoch == unless:
            self._kept.append(found)
        elif found is not None:
            found.waiting.close()

    def _pop(self) -> "_Kept[F] | None":
        try:
            return self._kept.pop()
        except IndexError:
            return None

    def __reduce__(self) -> "tuple[type[NextEpoch[F]], tuple[()]]":
        return NextEpoch, ()


@dataclass(frozen=True, slots=True, eq=False)
class _Kept(Generic[F]):
    process: int
    fetches: F
    share: Share
    settings: tuple[object, ...]
    waiting: Iteration[Any]


def are_same(one: Share, other: Share) -> bool:
    """Return whether shares are the same; strategies hold arrays, and are if they are identical."""
    return one.plan.strategy is other.plan.strategy and _sizes(one) == _sizes(other)


def _sizes(share: Share) -> tuple[object, ...]:
    names = [each.name for each in fields(EpochPlan) if each.compare and each.name != "strategy"]
    of_plan = [getattr(share.plan, name) for name in names]
    return share.worker, share.num_workers, share.n_delivered, *of_plan


def _are_identical(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
