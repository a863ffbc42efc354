"""Settings that follow a run: how many threads decode, and how many fetches are requested ahead.

A `Controller` gets the times of each fetch as numbers and reads no clock, so the same times give
the same settings. It keeps the setting with which fetches take the least time, waiting and training
together. Another setting is tried for a few fetches, if something speaks for it:

- The training loop waits: all threads, and more fetches ahead if bytes are what is waited for.
- Training uses processors: half the threads.

It is kept if fetches are faster by more than 2 % and more than their spread explains; where this
stays undecided, more threads and fetches ahead are kept, and fewer only if they seem faster. After
each trial, the next one comes later, twice as late as the one before, until fetches take another
time than usual. So what is tried in vain costs little, and where nothing changes, settings do not.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, hypot, sqrt
from typing import Self

# All chosen. Fetches requested ahead, at most: twice as many as are by default from servers.
MOST_PREFETCH = 16
# Shares of the time of a fetch: the least gain for which a setting is changed, the waiting from
# which on the loop is helped, and a loss so clear that the first fetch ends a trial.
_LEAST_GAIN, _MUCH_WAITING, _CLEAR_LOSS = 0.02, 0.05, 0.2
# Share of the reading threads' time from which on waiting for bytes is helped; and of the time of a
# fetch, in which the loop's thread uses a processor, from which on training may need more of them,
# and in which half of the threads may decode without being waited for.
_MUCH_READING, _MUCH_COMPUTING, _MOST_BUSY = 0.3, 0.3, 0.8
# Fetches: fewest that are compared, most of a trial, most that are remembered; the first ones of a
# setting, and the latest, which are compared with them; and those until a trial is repeated, at
# first and at most.
_FEWEST, _MOST, _REMEMBERED, _USUAL, _LATEST = 3, 12, 16, 8, 4
_FIRST_REST, _LONGEST_REST = 32, 2048
_LOST_RESTS = 4  # of a clear loss, which costs more
# Times of fetches have changed if they differ by this share and so many standard errors; a trial
# is decided by fewer, as it may be repeated.
_CHANGED, _ERRORS_OF_CHANGE, _ERRORS_OF_TRIAL = 0.2, 3.0, 2.0
_INSTANT = 1e-9  # seconds
_OF_LOOP = ("waiting", "training")
_MAD_TO_DEVIATION, _MEDIAN_TO_MEAN = 1.4826, 1.2533  # of normal errors


@dataclass(frozen=True, slots=True)
class Setting:
    """What may change between fetches; minibatches and their order do not.

    Parameters
    ----------
    num_threads
        Threads of each process that read and decode.
    prefetch
        Fetches that are planned and requested beyond the one being decoded.
    """

    num_threads: int
    prefetch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchTimes:
    """Times of a fetch, in seconds.

    Parameters
    ----------
    waiting, training
        Of the training loop, one after the other.
    processor
        Processor time of the thread of the training loop.
    planning, reading, decoding
        Planning, waiting for bytes, and all that follows, summed over threads and processes.
    """

    waiting: float
    training: float
    processor: float
    planning: float
    reading: float
    decoding: float


@dataclass(frozen=True, slots=True)
class _Usual:
    """What a fetch takes: the mean of waiting, which comes in bursts, and the median of training.

    A pause of the loop, such as for validation, is training that few fetches have.
    """

    waiting: float
    training: float
    deviation: float
    n: int

    @classmethod
    def of(cls, fetches: Sequence[FetchTimes]) -> Self:
        # Without NumPy, which takes longer for so few numbers.
        n = len(fetches)
        waiting, training = ([getattr(each, name) for each in fetches] for name in _OF_LOOP)
        middle = _median(training)
        spread = _MAD_TO_DEVIATION * _median([abs(each - middle) for each in training])
        apart = hypot(_deviation(waiting), _MEDIAN_TO_MEAN * spread)
        # Where training takes longer, waiting may be shorter for it.
        whole = _deviation([one + other for one, other in zip(waiting, training, strict=True)])
        return cls(sum(waiting) / n, middle, min(apart, whole), n)

    @property
    def period(self) -> float:
        return max(self.waiting + self.training, _INSTANT)

    def error(self, other: Self) -> float:
        """Return the standard error of the difference of two periods."""
        return max(self.deviation, other.deviation) * sqrt(1 / self.n + 1 / other.n)


def _median(values: Sequence[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return (ordered[half] + ordered[-half - 1]) / 2


def _deviation(values: Sequence[float]) -> float:
    n = len(values)
    mean = sum(values) / n
    return sqrt(sum((each - mean) ** 2 for each in values) / max(1, n - 1))


class Controller:
    """Chooses the setting of the next fetches from the times of those before.

    Parameters
    ----------
    start
        The setting to begin with.
    most
        Most threads and most fetches ahead.
    num_workers
        Worker processes, each of which has the setting; 0 if the process itself reads.

    Examples
    --------
    The loop waits for one thread, so all four are tried:

    >>> controller = Controller(Setting(1, 1), Setting(4, 16))
    >>> slow = FetchTimes(
    ...     waiting=3.0, training=1.0, processor=0.0, planning=0.0, reading=0.0, decoding=4.0
    ... )
    >>> [controller.after(slow).num_threads for _ in range(4)]
    [1, 1, 1, 4]
    """

    def __init__(self, start: Setting, most: Setting, num_workers: int = 0) -> None:
        self.setting, self.start, self.most, self.num_workers = start, start, most, num_workers
        self._n_readers = max(1, num_workers)
        self._n_due = min(max(_FEWEST, num_workers), _REMEMBERED)
        self._window = deque[FetchTimes](maxlen=_REMEMBERED)
        self._before: tuple[Setting, deque[FetchTimes]] | None = None  # of a trial
        self._usual: _Usual | None = None
        self._number, self._n_mixed = 0, 1
        self._tried = dict[Setting, int]()  # until which fetch
        self._rest = _FIRST_REST

    def begin_epoch(self) -> None:
        """Ignore the next fetch, before which nothing is read ahead."""
        self._n_mixed = max(self._n_mixed, self._n_readers)

    def after(self, fetch: FetchTimes) -> Setting:
        """Return the setting of the fetches that begin after this one."""
        self._number += 1
        if self._n_mixed:
            self._n_mixed -= 1
            return self.setting
        self._window.append(fetch)
        if self._before is None:
            self._watch()
        else:
            self._judge(*self._before)
        return self.setting

    def _watch(self) -> None:
        """Begin a trial, if something speaks for another setting and it was not tried lately."""
        fetches = list(self._window)
        if self._usual is None and len(fetches) >= _USUAL:
            self._usual = _Usual.of(fetches)
        if self._usual is not None:
            apart = abs(_Usual.of(fetches[-_LATEST:]).period - self._usual.period)
            error = self._usual.deviation * sqrt(1 / _LATEST + 1 / _USUAL)
            if apart > _CHANGED * self._usual.period + _ERRORS_OF_CHANGE * error:
                self._tried, self._rest, self._usual = {}, _FIRST_REST, None
                self._window = deque(fetches[-_LATEST:], _REMEMBERED)
        if len(self._window) < self._n_due:
            return
        for other in (*self._more(), *self._fewer()):
            if self._tried.get(other, 0) <= self._number:
                self._before = self.setting, self._window
                self._change(other, deque(maxlen=_REMEMBERED))
                return

    def _more(self) -> list[Setting]:
        """Return settings with more of what the latest fetches waited for, the best first."""
        now, most, usual = self.setting, self.most, _Usual.of(self._window)
        if usual.waiting <= _MUCH_WAITING * usual.period:
            return []
        n, prefetch = len(self._window), now.prefetch
        reading, decoding = (
            sum(getattr(each, name) for each in self._window) / (n * self._n_readers)
            for name in ("reading", "decoding")
        )
        planning = sum(each.planning for each in self._window) / (n * self._n_readers)
        if reading > _MUCH_READING * (reading + decoding) or planning > usual.period / 2:
            # Twice as many as arrive while one is used: some of the latest may have been faster.
            used = max(usual.training, decoding / most.num_threads, _INSTANT)
            enough = ceil(usual.period * (prefetch + 1) / used)
            prefetch = min(most.prefetch, max(prefetch, 2 * enough))
        steps = (most.num_threads, min(2 * now.num_threads, most.num_threads))
        found = dict.fromkeys(Setting(num_threads, prefetch) for num_threads in steps)
        return [each for each in found if each != now]

    def _fewer(self) -> list[Setting]:
        """Return the setting with half the threads, if training may need their processors."""
        now, usual, n = self.setting, _Usual.of(self._window), len(self._window)
        if now.num_threads == 1:
            return []
        fewer = now.num_threads // 2
        used = sum(each.processor for each in self._window) / n
        busy = sum(each.reading + each.decoding for each in self._window) / n
        busy /= fewer * self._n_readers * usual.period
        if used < _MUCH_COMPUTING * usual.period or (busy > _MOST_BUSY and n < _REMEMBERED):
            return []
        return [Setting(fewer, now.prefetch)]

    def _judge(self, setting: Setting, window: deque[FetchTimes]) -> None:
        """End the trial as soon as it is decided."""
        before, found, n = _Usual.of(window), _Usual.of(self._window), len(self._window)
        gain = 1 - found.period / before.period
        doubt = _ERRORS_OF_TRIAL * found.error(before) / before.period
        n_due, is_lost = self._n_due, False
        if self.setting.num_threads < setting.num_threads:
            is_lost = gain < -_CLEAR_LOSS - doubt
        elif n == n_due and (more := self._more()):  # it is not enough yet
            self._change(more[0], deque(maxlen=_REMEMBERED))
            return
        if self.setting.prefetch != setting.prefetch:  # what is requested together arrives together
            n_due = min(max(n_due, self.setting.prefetch + 1), _REMEMBERED)
        if n < n_due and not is_lost:
            return
        is_undecided = abs(gain - _LEAST_GAIN) < doubt
        if is_undecided and n < max(n_due, _MOST):
            return
        # If it stays undecided, the loop keeps what it waited for.
        has_more = self.setting.num_threads >= setting.num_threads
        is_kept = gain > _LEAST_GAIN or (is_undecided and has_more)
        self._before, self._usual = None, None
        other = setting if is_kept else self.setting
        self._tried[other] = self._number + self._rest * (_LOST_RESTS if is_lost else 1)
        self._rest = min(2 * self._rest, _LONGEST_REST)
        if not is_kept:
            self._change(setting, window)

    def _change(self, setting: Setting, window: deque[FetchTimes]) -> None:
        """Change the setting, and ignore fetches that were begun with the one before."""
        # The one that is read while another is delivered, and those that are requested.
        n_begun = 1 + (self.setting.prefetch if setting.prefetch != self.setting.prefetch else 0)
        n_queued = self.num_workers and self.num_workers + 1  # minibatches, about a fetch of each
        self.setting, self._window = setting, window
        self._n_mixed = n_begun * self._n_readers + n_queued
