"""Any loader's throughput, by the clock that cellfeed's own is measured with."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._dropping import Dropping, closed_at_the_end, rounds_ahead
from cellfeed_tuner._measuring._measure import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Measurement,
    measure_alone,
)
from cellfeed_tuner._measuring._timing import Delivery, Round, Started

__all__ = ["SINGLE_MINIBATCHES", "LoaderRequest", "measure_loader"]

SINGLE_MINIBATCHES = Configuration(block_size=1, fetch_factor=1)
"""Of a loader that reads each minibatch by itself."""


def measure_loader(
    open_loader: Callable[[], Iterable[Any]],
    *,
    files: Sequence[Path],
    configuration: Configuration | None = None,
    batch_size: int = 64,
    take: Callable[[Any], object] | None = None,
    cache: CacheState = "cold",
    seconds: float = 5.0,
) -> Measurement:
    """Measure the throughput of a loader of any kind in a process of its own.

    What it delivers is not looked at: that it is whole minibatches, of the cells they ought to
    be, is the caller's to know.

    Parameters
    ----------
    open_loader
        Called in that process; gives what has ``len()`` and is iterated over epoch after epoch,
        such as a `torch.utils.data.DataLoader` or a `cellfeed.CellDataset`, both with
        ``drop_last=True``. It is pickled: a function of a module, or a `functools.partial` of
        one, but none that is defined in a notebook.
    files
        What it reads, for the page cache.
    configuration
        Its fetch factor says how many minibatches are read at once, and so are timed as one
        round. Single minibatches if None.
    batch_size
        Cells of a minibatch.
    take
        Called with each minibatch, where that is what makes the loader read it.
    cache, seconds
        As in `measure`. Pages that the loader has mapped into memory are dropped too.

    Raises
    ------
    ParameterError
        An epoch is shorter than a fetch, or than ``len()`` says.
    """
    request = LoaderRequest(
        open_loader=open_loader,
        files=tuple(files),
        configuration=configuration or SINGLE_MINIBATCHES,
        batch_size=batch_size,
        take=take,
        cache=cache,
        seconds=seconds,
    )
    return measure_alone(None, files, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest:
    """What a measuring process is to do; see `measure_loader`."""

    open_loader: Callable[[], Iterable[Any]]
    files: tuple[Path, ...]
    configuration: Configuration
    batch_size: int
    cache: CacheState
    seconds: float
    take: Callable[[Any], object] | None = None

    def run(self, subject: None, report: Callable[[object], None]) -> None:  # noqa: ARG002
        """Time fetches until there are enough."""
        loader = self.open_loader()
        deadline = time.perf_counter() + self.seconds
        for number, seconds in enumerate(self._round_seconds(loader)):
            if number == 0:
                report(Started(0.0, seconds, 0))
            report(Round(seconds, number > 0, seconds, None))
            late = time.perf_counter() > deadline and number >= LEAST_ROUNDS
            if late or number == MOST_ROUNDS:
                break
        report(Delivery(""))

    def _round_seconds(self, loader: Any) -> Iterator[float]:
        """Yield the time of one round after the other, epoch after epoch."""
        per_round = self.configuration.minibatches_per_round
        n_rounds = len(loader) // per_round
        if n_rounds == 0:
            msg = f"an epoch has {len(loader)} minibatches, which are less than one fetch"
            raise ParameterError(msg)
        make_cold = Dropping(self.files, self.cache, mapped=True)
        while True:
            make_cold.before_epoch()
            begin = time.perf_counter()
            minibatches = iter(loader)
            with closed_at_the_end(minibatches):
                for _ in range(n_rounds):
                    n_delivered = 0
                    for minibatch in islice(minibatches, per_round):
                        if self.take is not None:
                            self.take(minibatch)
                        n_delivered += 1
                    if n_delivered < per_round:
                        msg = f"the loader ended early: `len()` says {len(loader)} minibatches"
                        raise ParameterError(msg)
                    make_cold.after_round(rounds_ahead(loader, per_round))
                    end = time.perf_counter()
                    yield end - begin
                    begin = end
            del minibatches
