"""How often a request is retried, and after which pauses."""

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cellfeed._bytes import Location
from cellfeed._remote._failures import failure, is_overload, may_pass

__all__ = ["Attempts", "Retries"]

_OVERLOAD_FACTOR = 5


@dataclass(frozen=True, slots=True)
class Retries:
    """Attempts, and pauses between them: 0.1 s, 0.3 s, 0.9 s and so on unless the user sets others.

    An overloaded server gets pauses five times as long: a minute in total. obstore does not expose
    the headers of an error, so ``Retry-After`` is not known here.

    Parameters
    ----------
    n_attempts
        Maximum number of attempts, including the first.
    first_pause, longest_pause
        In seconds.
    factor
        Factor by which pauses grow.
    limit
        Seconds after the first attempt after which there is no further attempt.
    """

    n_attempts: int = 6
    first_pause: float = 0.1
    longest_pause: float = 60.0
    factor: float = 3.0
    limit: float = 180.0

    @classmethod
    def of(cls, location: Location) -> "Retries":
        """Return the settings in the storage options, in obstore's ``retry_config``."""
        given = location.options.values.get("retry_config") or {}
        pauses = given.get("backoff") or {}
        return cls(
            n_attempts=1 + int(given.get("max_retries", cls().n_attempts - 1)),
            first_pause=_seconds(pauses.get("init_backoff"), cls().first_pause),
            longest_pause=_seconds(pauses.get("max_backoff"), cls().longest_pause),
            factor=float(pauses.get("base", cls().factor)),
            limit=_seconds(given.get("retry_timeout"), cls().limit),
        )

    def pause_after(self, error: BaseException, n: int, seconds: float) -> float | None:
        """Return how long to wait before the next attempt, in seconds; None if there is none.

        Parameters
        ----------
        error
            The error of the n-th attempt.
        n
            Number of the attempt, from 1.
        seconds
            Seconds since the first attempt began.
        """
        if n >= self.n_attempts or seconds >= self.limit or not may_pass(error):
            return None
        pause = self.first_pause * self.factor ** (n - 1)
        return min(pause * (_OVERLOAD_FACTOR if is_overload(error) else 1), self.longest_pause)


class Attempts:
    """The attempts at one request.

    Parameters
    ----------
    location
        The object.
    first, stop
        The requested bytes, if it is a range; for messages.
    """

    def __init__(
        self, location: Location, first: int | None = None, stop: int | None = None
    ) -> None:
        self._where = location, first, stop
        self._retries = Retries.of(location)
        self._began = time.monotonic()
        self._n = 0

    def pause_after(self, error: BaseException) -> float:
        """Return how long to wait before the next attempt, in seconds, after a failed one.

        Raises
        ------
        CellfeedError
            There are no attempts left; names the object, and the bytes.
        """
        self._n += 1
        pause = self._retries.pause_after(error, self._n, time.monotonic() - self._began)
        if pause is None:
            raise failure(error, *self._where) from None
        return pause


def _seconds(given: Any, otherwise: float) -> float:
    return given.total_seconds() if isinstance(given, timedelta) else otherwise
