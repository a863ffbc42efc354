"""What a round trip costs on the way to a server, and how many requests are under way at a time."""

from collections import deque
from statistics import median, quantiles

__all__ = ["Link", "Window", "begin_with_requests"]

_N_SAMPLES = 64
_FEWEST_SAMPLES = 8
_SMALLEST_GAP, _LARGEST_GAP = 1 << 14, 1 << 18
_FIRST, _LEAST, _MOST = 8, 4, 256
_GROWTH = 1.5
_RISE = 1.1
_ROUNDS_ON_A_PLATEAU = 32


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

    It grows by half after a round in which it was full and brought at least a tenth more than the
    best round before; on a plateau it tries again after some rounds. It halves where the server
    asks for fewer.

    Attributes
    ----------
    first
        What new ones of this process begin with.
    """

    first = _FIRST

    def __init__(self) -> None:
        self.limit = self.first
        self._best = 0.0
        self._before = self.first  # what the last growth began from
        self._n_held = 0
        self._was_full = True
        self._begin_round(0.0)

    def note(self, n_bytes: int, now: float, *, is_full: bool) -> None:
        """Note a request that was answered, and whether others wait for their turn."""
        self._n_bytes += n_bytes
        self._n_answered += 1
        self._was_full = self._was_full and is_full
        if self._n_answered < 2 * self.limit:
            return
        if self._was_full and now > self._began:
            self._end_round(self._n_bytes / (now - self._began))
        self._begin_round(now)

    def overloaded(self, now: float) -> None:
        """Note that the server asked for fewer requests."""
        self.limit = self._before = max(_LEAST, self.limit // 2)
        self._best, self._n_held = 0.0, 0
        self._begin_round(now)

    def _end_round(self, rate: float) -> None:
        if rate > self._best * _RISE:
            self._best, self._n_held, self._before = rate, 0, self.limit
            self.limit = min(int(self.limit * _GROWTH), _MOST)
            return
        self._n_held += 1
        if self._n_held == 1:
            self.limit = self._before  # what was added brought nothing
        elif self._n_held > _ROUNDS_ON_A_PLATEAU:
            self._best, self._n_held = rate, 0
            self.limit = min(int(self.limit * _GROWTH), _MOST)

    def _begin_round(self, now: float) -> None:
        self._began, self._n_bytes, self._n_answered, self._was_full = now, 0, 0, True


def begin_with_requests(n: int) -> None:
    """Begin with so many requests under way at servers that this process has asked for nothing yet.

    For short-lived processes, which would be over before they have found out how many a link bears:
    take what `requests_under_way` returned in another one.

    Parameters
    ----------
    n
        How many; within 4 and 256.
    """
    Window.first = max(_LEAST, min(n, _MOST))
