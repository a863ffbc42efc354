"""What a round trip costs on the way to a server, and how many requests are under way at a time."""

from collections import deque
from statistics import median

__all__ = ["LARGEST_REQUEST", "Link", "Window", "begin_with_requests"]

LARGEST_REQUEST = 1 << 23  # more in one piece is late as a whole, and is kept as a whole

_SMALLEST_GAP, _FIRST_GAP, _LARGEST_GAP = 1 << 12, 1 << 14, 1 << 18
_SECONDS_OF_PROCESSORS = 5e-4  # of a request, at both ends
_SECONDS_OF_A_PIECE = 0.2  # over which throughput is taken, so that one large answer is not all
_N_PIECES = 16
_FIRST, _LEAST, _MOST = 8, 4, 256
_GROWTH = 2
_RISE, _GAIN = 1.4, 1.1  # of throughput: to double again, and to stay
_ROUNDS_ON_A_PLATEAU = 8


class Link:
    """Latency and bandwidth of the way to one server, from the last requests.

    A gap between two ranges is read in vain where that takes no longer than another request does:
    up to ``bandwidth * (latency / 256 + 0.5 ms)`` bytes. Other requests, of which 256 may be under
    way, hide latency; 0.5 ms are what processors do for a request, at both ends. Latency is the
    shortest time to a first byte, as other times have waiting in them; bandwidth is the highest
    throughput of all requests together, in pieces of 0.2 s.
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
    """How many requests may be under way: more as long as that raises throughput.

    Throughput is the number of requests under way over the time that one takes, by Little's law.
    The median time is that of requests which were sent at the present limit, and of which as many
    were answered as may be under way; what opened a connection takes longer, and is not half of
    them. The limit doubles until that brings less than two fifths more, and goes back to what it
    was where it brought less than a tenth; some rounds later it is tried again. It halves where
    the server asks for fewer.

    Attributes
    ----------
    first
        What new ones of this process begin with.
    """

    first = _FIRST

    def __init__(self) -> None:
        self.limit = self.first
        self._before = self.first  # what the last growth began from
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
        elif self._n_held == 1 and rate < self._best * _GAIN:
            self.limit = self._before  # what was added brought nothing

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
