"""Fetches of the next epoch that were read ahead, kept until that or another epoch begins."""

import os
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from cellfeed._dataset._iteration import Iteration
from cellfeed.sampling import EpochPlan, Share

__all__ = ["NextEpoch", "are_same"]


class ReadAhead(Protocol):
    """Fetches in progress, read by threads that stop when the generator is closed."""

    @property
    def groups(self) -> Generator[Any, None, None]: ...


F = TypeVar("F", bound=ReadAhead)


class NextEpoch(Generic[F]):
    """Keeps fetches of one epoch of one dataset that were read ahead.

    They are closed if other fetches are needed next, or if this is dropped; a thread closes them,
    since no Python code may run then. Pickled copies and forked processes have none.
    """

    def __init__(self) -> None:
        self._kept = deque["_Kept[F]"]()  # whose methods are atomic: any thread may begin an epoch

    def keep(self, fetches: F, share: Share, settings: tuple[object, ...]) -> None:
        """Keep fetches, and discard earlier ones.

        Parameters
        ----------
        fetches
            The fetches, which must not refer to this object, even indirectly.
        share
            The share that they begin with.
        settings
            The settings that they were read with.
        """
        self.let_go()
        waiting = Iteration(fetches.groups, begun=True)
        self._kept.append(_Kept(os.getpid(), fetches, share, settings, waiting))

    def take(self, share: Share, settings: tuple[object, ...]) -> F | None:
        """Return fetches that begin with a share, if there are any, and discard all others.

        Parameters
        ----------
        share, settings
            See `keep`; settings are compared by identity.
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
        """Discard the kept fetches, unless they are of this epoch, and wait for their end."""
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
    """Return whether shares are equal; strategies, which have arrays, are compared by identity."""
    return one.plan.strategy is other.plan.strategy and _sizes(one) == _sizes(other)


def _sizes(share: Share) -> tuple[object, ...]:
    names = [each.name for each in fields(EpochPlan) if each.compare and each.name != "strategy"]
    of_plan = [getattr(share.plan, name) for name in names]
    return share.worker, share.num_workers, share.n_delivered, *of_plan


def _are_identical(some: tuple[object, ...], others: tuple[object, ...]) -> bool:
    return len(some) == len(others) and all(map(lambda a, b: a is b, some, others))
