"""How much faster would training be if loading took no time? Measured in the user's own loop.

In turns, the loop gets minibatches of its loader, and minibatches that were kept from before. The
difference is what loading costs, with everything that a bare measurement of a loader misses: copies
to a device, processors that loading takes from training, a queue that hides the rest.

A turn with the loader begins where a fetch has just arrived, and lasts whole fetches. What the
loader read ahead during the turn without it is left out.
"""

import contextlib
import copy
import itertools
import random
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

import numpy as np

from cellfeed import ParameterError, StateError
from cellfeed_tuner._constants import UTILIZATION
from cellfeed_tuner._interval import Estimate, pooled_estimate, times

# Least time of a turn. Chosen: long beside a switch, short beside a minute.
_TURN_SECONDS = 1.0
# When the interval is narrow enough. Chosen: loading that takes 5 % of the time is seen.
_ENOUGH, _FEWEST_ROUNDS, _MOST_ROUNDS = 0.05, 3, 12
# Chosen: minibatches that are kept, and the first after a switch, which are not timed.
_N_KEPT, _N_FIRST = 8, 3
_FETCHES_OF_A_ROUND = 5  # one to warm up, one that is timed, what was read ahead, and some more
_MOST_QUIET_SECONDS = 5.0  # to let the loader read ahead, before minibatches come from memory
_SECONDS_OF_LINE = 5.0  # between lines of progress, at least


class _Measured(BaseException):
    """Leaves the training loop when enough was measured."""


class Headroom:
    """What training would gain if loading took no time; see `headroom`.

    In its block, iterating over it yields minibatches to train on.

    Attributes
    ----------
    n_steps
        Training steps in all.
    """

    def __init__(self, loader: Any, restore: Sequence[Any], seconds: float) -> None:
        self.n_steps = 0
        self._loader, self._restored, self._seconds = loader, restore, seconds
        self._rounds: list[tuple[float, float]] = []
        self._kept: list[Any] = []
        self._begun = self._printed = 0.0
        self._undo: contextlib.ExitStack | None = None

    @property
    def n_rounds(self) -> int:
        """Number of pairs of turns."""
        return len(self._rounds)

    @property
    def seconds_with_loading(self) -> float:
        """Mean time of a minibatch with its loader, in seconds."""
        return float(np.mean([one for one, _ in self._measured()]))

    @property
    def seconds_without(self) -> float:
        """Mean time of a minibatch that is ready, in seconds.

        Where no difference is measurable, it may be longer than with loading.
        """
        return float(np.mean([other for _, other in self._measured()]))

    @property
    def utilization(self) -> Estimate:
        """Share of its time that training computes, with its 95 % interval."""
        shares = [other / one for one, other in self._measured()]
        found = pooled_estimate(float(np.mean(shares)), len(shares), [shares])
        return Estimate(*(min(1.0, each) for each in (found.value, found.low, found.high)))

    @property
    def speedup(self) -> Estimate:
        """How many times as fast training would be at most."""
        used = self.utilization
        return Estimate(1 / used.value, 1 / used.high, 1 / used.low)

    def __str__(self) -> str:
        used = self.utilization
        loading = [f"{1 - each:.0%}" for each in (used.value, used.high, used.low)]
        with_loading, without = 1e3 * self.seconds_with_loading, 1e3 * self.seconds_without
        took, rounds = f"{with_loading:,.1f} ms a minibatch", f"({self.n_rounds} rounds)"
        if used.high < 1 and without < with_loading:
            took += f", {without:,.1f} ms if loading took no time {rounds}"
            gain = (
                f"loading takes {loading[0]} [{loading[1]}, {loading[2]}] of this training: "
                f"without it, training would be {times(self.speedup)} as fast"
            )
        else:
            took += f"; no difference was measurable to minibatches that are ready {rounds}"
            gain = f"loading takes at most {loading[2]} of this training"
        known = (
            "measure again with more `seconds`, or on a quieter machine, to know which is slower"
        )
        if used.low >= UTILIZATION:
            known = "the loader is not the bottleneck"
        elif used.high < UTILIZATION:
            known = "the loader is a bottleneck; `autotune` finds its best settings"
        used_share = f"utilization {used.value:.0%} [{used.low:.0%}, {used.high:.0%}]"
        required = f"of which MLPerf Storage requires {UTILIZATION:.0%}"
        lines = [took, gain, f"{used_share}, {required}: {known}"]
        if not self._restored:
            lines.append(
                f"the {self.n_steps:,} training steps changed the weights; give "
                "restore=[model, optimizer] to have them put back"
            )
        return "\n".join(lines)

    def __enter__(self) -> Self:
        self._undo = contextlib.ExitStack()
        self._undo.callback(saved_random_numbers())
        for each in self._restored:
            self._undo.callback(_restore, each, _in_main_memory(each.state_dict()))
        loader = self._loader
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            with contextlib.suppress(StateError):  # without one, its next epoch begins anew
                self._undo.callback(_restore, loader, _in_main_memory(loader.state_dict()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, _: object) -> bool:
        self._kept = []
        if self._undo is not None:
            self._undo.close()
        self._undo = None
        if kind is None and not self._rounds:
            msg = (
                f"training ended after {self.n_steps:,} minibatches, before anything was measured; "
                "let it go on for more epochs: the block is left as soon as enough is measured"
            )
            raise ParameterError(msg)
        return isinstance(error, _Measured)

    def _measured(self) -> list[tuple[float, float]]:
        if not self._rounds:
            msg = "nothing is measured yet; leave the block of `headroom` first"
            raise ParameterError(msg)
        return self._rounds

    def __iter__(self) -> Generator[Any, None, None]:
        """Yield minibatches of the loader, and kept ones, in turns, until enough is measured."""
        if self._undo is None:
            msg = "iterate within the block: `with headroom(loader) as measured:`"
            raise ParameterError(msg)
        source = _Source(self._loader)
        self._begun = self._begun or time.perf_counter()
        try:
            self._print_progress()
            # Until what happens once has happened, and a fetch was delivered.
            yield from self._trained(source, _N_FIRST)
            kept: list[Any] = []
            expected = yield from self._timed(source, max(_N_FIRST, source.n_of_fetch), kept)
            self._kept = self._kept or kept
            while True:
                is_possible = _agreed(expected * source.n_of_fetch < self._left())
                self._require(source.n_of_fetch, is_possible=is_possible)
                source.skip_what_was_read_ahead()
                yield from self._trained(source, 1)  # a fetch has come
                expected = yield from self._timed_turn(source, source.n_of_fetch)
                time.sleep(min(_MOST_QUIET_SECONDS, expected * source.n_of_fetch))
                ready = itertools.cycle(self._kept)
                yield from self._trained(ready, _N_FIRST)
                self._rounds.append((expected, (yield from self._timed_turn(ready, _N_FIRST))))
                self._print_progress()
                if _agreed(self._is_enough()):
                    raise _Measured
        finally:
            source.close()

    def _timed_turn(self, source: Iterator[Any], n_at_once: int) -> Generator[Any, None, float]:
        """Return the mean time of a minibatch in a turn of whole fetches.

        After each part it is asked again how long the turn is, since the machine may have become
        slower.
        """
        n, seconds, n_more = 0, 0.0, 1
        while n_more > 0:
            own = n_more * n_at_once
            seconds += own * (yield from self._timed(source, own))
            n += n_more
            n_more = _agreed(min(n, round((_TURN_SECONDS - seconds) * n / max(seconds, 1e-9))))
        return seconds / (n * n_at_once)

    def _trained(
        self, source: Iterator[Any], n: int, kept: list[Any] | None = None
    ) -> Generator[Any, None, None]:
        for _ in range(n):
            minibatch = next(source)
            if kept is not None and len(kept) < _N_KEPT:
                kept.append(minibatch)
            if not _are_several():  # several must take the same number of steps
                if self._left() < 0 and self._rounds:
                    raise _Measured
                self._require(getattr(source, "n_of_fetch", 1), is_possible=self._left() >= 0)
            self.n_steps += 1
            yield minibatch

    def _timed(
        self, source: Iterator[Any], n: int, kept: list[Any] | None = None
    ) -> Generator[Any, None, float]:
        """Return the mean time from one minibatch to the next, each with its training step."""
        synchronize()
        begun = time.perf_counter()
        yield from self._trained(source, n, kept)
        synchronize()
        return (time.perf_counter() - begun) / n

    def _print_progress(self) -> None:
        """Print how far it is on stderr, seldom, and only on the first rank."""
        now = time.perf_counter()
        if self._printed and now - self._printed < _SECONDS_OF_LINE:
            return
        if _are_several() and sys.modules["torch"].distributed.get_rank():
            return
        self._printed = now
        sys.stderr.write(
            f"headroom: {now - self._begun:.0f} of at most about {self._seconds:g} s, "
            f"{self.n_rounds} rounds\n"
        )

    def _left(self) -> float:
        return self._seconds - (time.perf_counter() - self._begun)

    def _is_enough(self) -> bool:
        passed, n = time.perf_counter() - self._begun, len(self._rounds)
        if n >= _MOST_ROUNDS or passed * (n + 1) / n > self._seconds:
            return True
        used = self.utilization
        return n >= _FEWEST_ROUNDS and used.high - used.low < 2 * _ENOUGH * used.value

    def _require(self, n_of_fetch: int, *, is_possible: bool) -> None:
        if is_possible:
            return
        passed = time.perf_counter() - self._begun
        needed = _FETCHES_OF_A_ROUND * n_of_fetch * passed / max(1, self.n_steps)
        msg = (
            f"{self._seconds:g} s are too short for one round: a fetch has {n_of_fetch:,} "
            f"minibatches, and {self.n_steps:,} took {passed:.0f} s; give more time, such as "
            f"seconds={max(needed, 2 * self._seconds):.0f}, or use a smaller fetch factor"
        )
        raise ParameterError(msg)


def headroom(loader: Any, *, restore: Sequence[Any] = (), seconds: float = 45.0) -> Headroom:
    """Measure what training would gain if loading took no time, in your training loop.

    Iterate over what the block gives instead of ``loader``: it yields its minibatches and, in
    turns, the last ones again, which need no loading. When enough is measured, the block is left,
    wherever its code is. Then the loader is where it was before, as are the random number
    generators of Python, NumPy and PyTorch, and all of ``restore``: no minibatch is lost, and no
    training step is kept.

    Parameters
    ----------
    loader
        What the training loop iterates over: a loader of cellfeed, a `CellDataset` without worker
        processes, any `torch.utils.data.DataLoader`, or another iterable. Its position is restored
        if it has ``state_dict`` and ``load_state_dict``; without them, its next epoch begins anew.
    restore
        Objects with ``state_dict`` and ``load_state_dict`` that training changes, such as model,
        optimizer and scheduler. Their states are kept in main memory meanwhile.
    seconds
        About how long it may take. It ends earlier if the interval is narrow. Progress is printed
        on stderr, by the first rank.

    Returns
    -------
    A context manager to iterate over, which has the results when its block was left.

    Raises
    ------
    ParameterError
        ``loader`` cannot be iterated over again, an object of ``restore`` has no state, training
        ended too early, or the time was too short for one round.

    Notes
    -----
    Copies to a device belong to training. A turn with the loader spans whole fetches; its queue is
    brought into the state of continuous training first, by leaving out what was read ahead. All
    ranks of `torch.distributed` must measure, and take the same numbers of steps. Utilization is
    that of MLPerf Storage: the time of computing by the time in all.

    Examples
    --------
    >>> from torch import nn, optim, utils, zeros
    >>> model = nn.Linear(8, 8)
    >>> optimizer = optim.SGD(model.parameters(), lr=0.1)
    >>> loader = utils.data.DataLoader(zeros(1000, 8), batch_size=50)
    >>> with headroom(loader, restore=[model, optimizer]) as measured:  # doctest: +SKIP
    ...     for epoch in range(10_000):
    ...         for minibatch in measured:
    ...             model(minibatch).sum().backward()
    ...             optimizer.step()
    >>> print(measured)  # doctest: +SKIP
    """
    if not hasattr(loader, "__iter__"):
        raise ParameterError(_not_a_loader(loader))
    if not seconds > 0:
        msg = f"`seconds > 0` must hold, but got {seconds=}"
        raise ParameterError(msg)
    for each in restore:
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            msg = (
                f"`restore` has a {type(each).__name__} without `state_dict` and "
                "`load_state_dict`; give models, optimizers and schedulers"
            )
            raise ParameterError(msg)
    return Headroom(loader, restore, seconds)


def _not_a_loader(value: Any) -> str:
    return (
        "`loader` must be an object that can be iterated over again and again, such as "
        f"`dataset.loader()`, but got {type(value).__name__}"
    )


class _Source:
    """Minibatches of a loader, epoch after epoch, and where its fetches begin.

    Parameters
    ----------
    loader
        The loader. Of others than cellfeed's, a fetch is a minibatch of each worker.
    """

    def __init__(self, loader: Any) -> None:
        dataset = getattr(loader, "dataset", loader)
        num_workers = getattr(loader, "num_workers", 0) or 0
        self.n_of_fetch: int = max(1, num_workers) * int(
            getattr(dataset, "fetch_factor", None) or 1
        )
        # The rest of its fetch is left out as well.
        options = getattr(dataset, "read_options", None)
        ahead = (int(getattr(options, "prefetch", None) or 1) - 1) * self.n_of_fetch
        if num_workers:
            queued = num_workers * (getattr(loader, "prefetch_factor", None) or 1)
            ahead = int(getattr(loader, "n_sent_ahead", queued))
        self._n_ahead, self._n_taken = ahead, 0
        self._loader, self._minibatches = loader, iter(loader)
        if self._minibatches is loader:
            raise ParameterError(_not_a_loader(loader))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        is_empty = not self._n_taken
        try:
            minibatch = next(self._minibatches)
        except StopIteration:
            if is_empty:
                msg = "`loader` has no minibatches"
                raise ParameterError(msg) from None
            self._minibatches, self._n_taken = iter(self._loader), 0
            return next(self)
        self._n_taken += 1
        return minibatch

    def skip_what_was_read_ahead(self) -> None:
        """Leave out what the loader may have read ahead, until a fetch begins."""
        for _ in range(self._n_ahead):
            next(self)
        while self._n_taken % self.n_of_fetch:
            next(self)

    def close(self) -> None:
        """End the epoch."""
        close = getattr(self._minibatches, "close", None)
        self._minibatches = iter(())
        if close is not None:
            close()


def _restore(one: Any, state: Any) -> None:
    one.load_state_dict(state)
    if hasattr(one, "zero_grad"):
        one.zero_grad()


def _in_main_memory(state: Any) -> Any:
    """Return a copy of a state, whose tensors take no memory of a device."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        copied = copy.copy(state)  # an OrderedDict with attributes stays one
        for name, value in state.items():
            copied[name] = _in_main_memory(value)
        return copied
    if type(state) in (list, tuple):
        return type(state)(_in_main_memory(each) for each in state)
    return copy.deepcopy(state)


def saved_random_numbers() -> Callable[[], None]:
    """Return what restores the random states of Python, NumPy and PyTorch, on its devices too."""
    torch = sys.modules.get("torch")
    of_python, of_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's
    of_torch = None if torch is None else torch.get_rng_state()
    is_on_gpu = torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized()
    of_gpus = torch.cuda.get_rng_state_all() if torch is not None and is_on_gpu else None

    def put_back() -> None:
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        if torch is not None and of_torch is not None:
            torch.set_rng_state(of_torch)
        if torch is not None and of_gpus is not None:
            torch.cuda.set_rng_state_all(of_gpus)

    return put_back


def synchronize() -> None:
    """Wait for what a device still computes."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _agreed(value: Any) -> Any:
    """Return the value of the first rank, so that all take the same number of steps."""
    if not _are_several():
        return value
    torch, values = sys.modules["torch"], [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def _are_several() -> bool:
    """Return whether this process is one of several ranks."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available():
        return False
    return bool(torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1)
