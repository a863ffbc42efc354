"""What a round trip costs on the way to a server, and how many requests are under way at a time."""

from collections import deque
from statistics import median, quantiles

__all__ = ["Link", "Window"]

_N_SAMPLES = 64
_FEWEST_SAMPLES = 8
_SMALLEST_GAP, _LARGEST_GAP = 1 << 14, 1 << 18
_FIRST, _LEAST, _MOST = 8, 4, 256
_GROWTH = 2
_RISE = 1.1
_ROUNDS_ON_A_PLATEAU = 16


class Link:
    """Latency and bandwidth of requests to one server, from the last of them.

    A gap between two ranges is read in vain where that takes no longer than another request's
    round trip: up to ``latency * bandwidth`` bytes, bandwidth being that of one request. Latency
    is the lowest decile of times to the first byte, as other times have waiting in them;
    bandwidth is the median of bytes over the time of a whole request.
    """

    def __init__(self) -> None:
        self._latencies = deque[float](maxlen=_N_SAMPLES)
        self._bandwidths = deque[float](maxlen=_N_SAMPLES)
        self.worthwhile_gap = _SMALLEST_GAP

    def note(self, n_bytes: int, seconds_to_first: float, seconds: float) -> None:
        """Note a request that was answered."""
        self._latencies.append(seconds_to_first)
        self._bandwidths.append(n_bytes / max(seconds, 1e-6))
        if len(self._latencies) >= _FEWEST_SAMPLES:
            gap = quantiles(self._latencies, n=10)[0] * median(self._bandwidths)
            self.worthwhile_gap = int(min(max(gap, _SMALLEST_GAP), _LARGEST_GAP))


class Window:
    """How many requests may be under way: more as long as that raises throughput.

    Throughput is the number of requests under way over the time that one takes, by Little's law.
    The median time is that of requests which were sent at the present limit, and of which as many
    were answered as may be under way; what opened a connection takes longer, and is not half of
    them. The limit doubles until that brings less than a tenth more, and then goes back to what it
    was; some rounds later it is tried again. It halves where the server asks for fewer.
    """

    def __init__(self) -> None:
        self.limit = _FIRST
        self._before = _FIRST  # what the last growth began from
        self._best = 0.0
        self._n_held = 0
        self._seconds = list[float]()
        self._since = 0.0

    def note(self, began: float, now: float, *, is_full: bool) -> None:
        """Note a request that was answered, and whether others wait for their turn."""
        if began < self._since:
            return
        if not is_full:  # times say nothing of a limit that does not bind
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
        elif self._n_held == 1:
            self.limit = self._before  # what was added brought nothing

    def _begin_round(self, now: float) -> None:
        self._since = now
        self._seconds.clear()
