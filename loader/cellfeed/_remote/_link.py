"""Cost of a round trip to a server, and the number of concurrent requests."""

from collections import deque
from statistics import median

__all__ = ["LARGEST_REQUEST", "Link", "Window", "begin_with_requests"]

LARGEST_REQUEST = 1 << 23  # a larger request would arrive late, and be kept, as a whole

_SMALLEST_GAP, _FIRST_GAP, _LARGEST_GAP = 1 << 12, 1 << 14, 1 << 18
_SECONDS_OF_PROCESSORS = 5e-4  # of a request, at both ends
_SECONDS_OF_A_PIECE = 0.2  # interval of throughput; one large answer must not dominate it
_N_PIECES = 16
_FIRST, _LEAST, _MOST = 8, 4, 256
_GROWTH = 2
_RISE, _GAIN = 1.4, 1.1  # of throughput: to double again, and to keep the limit
_ROUNDS_ON_A_PLATEAU = 8


class Link:
    """Latency and bandwidth of the connection to one server, from the last requests.

    The gap between two ranges is read and discarded if that takes no longer than another request:
    up to ``bandwidth * (latency / 256 + 0.5 ms)`` bytes. Concurrent requests, up to 256, hide
    latency; 0.5 ms is the processor time of a request, at both ends. Latency is the shortest time
    to a first byte, since longer times include waiting; bandwidth is the highest throughput of all
    requests together, in intervals of 0.2 s.
    """

    def __init__(self) -> None:
        self._latency = float("inf")
        self._throughputs = deque[float](maxlen=_N_PIECES)
        self._n_bytes, self._began = 0, 0.0
        self.worthwhile_gap = _FIRST_GAP

    def note(self, n_bytes: int, seconds_to_first: float, now: float) -> None:
        """Note a request that was answered."""
        self._latency = min(self._latency, seconds_to_first)
        self._n_bytes += n_bytes
        if now - self._began < _SECONDS_OF_A_PIECE:
            return
        if self._began:
            self._throughputs.append(self._n_bytes / (now - self._began))
            seconds = self._latency / _MOST + _SECONDS_OF_PROCESSORS
            gap = int(max(self._throughputs) * seconds)
            self.worthwhile_gap = min(max(gap, _SMALLEST_GAP), _LARGEST_GAP)
        self._n_bytes, self._began = 0, now


class Window:
    """The limit of concurrent requests: it grows as long as that raises throughput.

    Throughput is the number of concurrent requests divided by the duration of one, by Little's law.
    The duration is the median over requests that were sent at the present limit, once as many of
    them were answered as the limit allows. Requests that open a connection take longer, but are
    fewer than half. The limit doubles until doubling raises throughput by less than two fifths, and
    is reset if it raised it by less than a tenth; some rounds later doubling is tried again. The
    limit halves if the server asks for fewer requests.

    Attributes
    ----------
    first
        Initial limit of new instances in this process.
    """

    first = _FIRST

    def __init__(self) -> None:
        self.limit = self.first
        self._before = self.first  # the limit before the last growth
        self._best = 0.0
        self._n_held = 0
        self._seconds = list[float]()
        self._since = 0.0

    def note(self, began: float, now: float, *, is_full: bool) -> None:
        """Note a request that was answered, and whether others are queued."""
        if began < self._since:
            return
        if not is_full:  # a limit that does not bind cannot be judged
            self._begin_round(now)
            return
        self._seconds.append(now - began)
        if len(self._seconds) >= self.limit:
            self._end_round(self.limit / max(median(self._seconds), 1e-6))
            self._begin_round(now)

    def overloaded(self, now: float) -> None:
        """Note that the server asked for fewer requests."""
        self._begin_round(now)
        self.limit = self._before = max(_LEAST, self.limit // 2)
        self._best, self._n_held = 0.0, 0

    def _end_round(self, rate: float) -> None:
        self._n_held += 1
        if rate > self._best * _RISE or self._n_held > _ROUNDS_ON_A_PLATEAU:
            self._best, self._n_held, self._before = rate, 0, self.limit
            self.limit = min(self.limit * _GROWTH, _MOST)
        elif self._n_held == 1 and rate < self._best * _GAIN:
            self.limit = self._before  # the last growth brought nothing

    def _begin_round(self, now: float) -> None:
        self._since = now
        self._seconds.clear()


def begin_with_requests(n: int) -> None:
    """Set the initial number of concurrent requests to servers that this process has not used yet.

    Use it in short-lived processes, which would end before they have found how many requests a link
    sustains: pass the result of `requests_under_way` from an earlier process.

    Parameters
    ----------
    n
        Number of requests, clipped to [4, 256].
    """
    Window.first = max(_LEAST, min(n, _MOST))
