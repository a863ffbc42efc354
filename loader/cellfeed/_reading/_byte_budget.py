"""A limit for the bytes of coming fetches that are requested concurrently."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any, Self, TypeVar

__all__ = ["ByteBudget"]

_Begun = TypeVar("_Begun")


class ByteBudget:
    """Starts requests in order, each as soon as its bytes fit into the budget.

    A request always starts if nothing else is in flight, however large it is. No thread waits
    here, so none has to be woken when Python exits. This is a context manager; after it exits,
    nothing starts.

    Parameters
    ----------
    n_bytes
        Maximum number of bytes in flight.

    Examples
    --------
    >>> budget = ByteBudget(10)
    >>> first, second = budget.begin(8, str), budget.begin(8, str)
    >>> first.done(), second.done()
    (True, False)
    >>> budget.give_back(8)
    >>> second.done()
    True
    """

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._under_way = 0
        self._is_left = False
        self._waiting = deque[tuple[int, Callable[[], Any], Future[Any]]]()
        self._lock = Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._is_left = True
            for *_, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    def begin(self, n_bytes: int, begin: Callable[[], _Begun]) -> Future[_Begun]:
        """Call a function that returns immediately, now or when the budget allows it.

        Parameters
        ----------
        n_bytes
            Bytes in flight from then on, until they are given back.
        begin
            The function. The thread that gives back bytes calls it; functions are called in order.

        Returns
        -------
        A future with its result.
        """
        future = Future[_Begun]()
        with self._lock:
            if self._is_left:
                future.cancel()
            else:
                self._waiting.append((n_bytes, begin, future))
                self._begin_waiting()
        return future

    def give_back(self, n_bytes: int) -> None:
        """Return bytes to the budget that are no longer in flight."""
        with self._lock:
            self._under_way -= n_bytes
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._has_room(self._waiting[0][0]):
            n_bytes, begin, future = self._waiting.popleft()
            try:
                begun = begin()
            except Exception as error:  # noqa: BLE001 - it is raised where the result is due
                future.set_exception(error)
            else:
                self._under_way += n_bytes
                future.set_result(begun)

    def _has_room(self, n_bytes: int) -> bool:
        return not self._under_way or self._under_way + n_bytes <= self._n_bytes
