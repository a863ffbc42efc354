"""Iterations that may be dropped at any moment, by any thread and at the exit of the process.

An exception in a destructor is printed and ignored, and so is Ctrl-C if it arrives in one.
Therefore no Python code may run when an iteration is dropped, least of all code that waits.
"""

import atexit
import inspect
import os
import threading
import weakref
from collections.abc import Callable, Generator
from queue import SimpleQueue
from typing import Any, Generic, Self, TypeVar

from cellfeed._errors import DeliveryError

_Item = TypeVar("_Item")


class Iteration(Generic[_Item]):
    """Iterates over a generator, which a thread closes if the iteration is dropped.

    Parameters
    ----------
    make
        Function that makes the generator when the first item is requested; nothing else may refer
        to the generator.

    Examples
    --------
    >>> list(Iteration(lambda: (n * n for n in range(4))))
    [0, 1, 4, 9]
    """

    __slots__ = ("__weakref__", "_closing", "_items", "_make", "_process")

    def __init__(self, make: Callable[[], Generator[_Item, None, None]]) -> None:
        self._process = os.getpid()
        self._make: Callable[[], Generator[_Item, None, None]] | None = make
        self._items: Generator[_Item, None, None] | None = None
        self._closing: _Closing | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> _Item:
        if self._process != os.getpid():
            msg = (
                f"an iterator only works in the process that made it, {self._process}, but was "
                f"used in {os.getpid()}, a fork without its threads; make a new one there"
            )
            raise DeliveryError(msg)
        if self._make is not None:
            make, self._make = self._make, None
            self._items = make()
            wait_for_dropped()
            self._closing = _Closing(self, self._items)
            self._closing.start()
        if self._items is None:  # making it has failed
            raise StopIteration
        try:
            return next(self._items)
        finally:
            if self._has_ended:  # it has ended, or an error has ended it
                self._end()

    def close(self) -> None:
        """Discard remaining items, and wait until all work for them has ended."""
        self._make = None
        if self._process == os.getpid() and self._items is not None:
            self._items.close()
            self._end()
            wait_for_dropped()  # what it iterated over itself

    @property
    def _has_ended(self) -> bool:
        return self._items is None or inspect.getgeneratorstate(self._items) == inspect.GEN_CLOSED

    def _end(self) -> None:
        if self._closing is not None:
            self._closing.end()
            self._closing = None


class _Closing(threading.Thread):
    """Closes a generator as soon as its iteration is gone.

    Ctrl-C is raised only in the main thread, so nothing is lost if it arrives meanwhile. Dropped
    iterations are closed before the process exits: a thread that Python stops might hold a lock,
    such as that of h5py, for which the last destructors wait. An iteration that is still alive
    then is not closed; nor in a forked process, where closing it would disturb this one.
    """

    def __init__(self, iteration: Iteration[Any], items: Generator[Any, None, None]) -> None:
        super().__init__(name="cellfeed-closing", daemon=True)
        self._told = SimpleQueue[object]()
        # `SimpleQueue.put` is C code, as all is that runs where the iteration is dropped.
        self._iteration = weakref.ref(iteration, self._told.put)
        self._items = items

    @property
    def is_due(self) -> bool:
        """Whether the iteration is gone."""
        return self._iteration() is None

    def run(self) -> None:
        """Wait for the iteration to be dropped, and close the generator."""
        self._told.get()
        self._items.close()

    def end(self) -> None:
        """Wait for the thread to finish."""
        self._told.put(None)
        self.join()


@atexit.register
def wait_for_dropped() -> None:
    """Wait until dropped iterations are closed, since two at a time take twice the memory."""
    closings = [each for each in threading.enumerate() if isinstance(each, _Closing)]
    for closing in closings:
        if closing.is_due and closing is not threading.current_thread():
            closing.join()
