"""Does a run with `adaptive=True` keep up with the best fixed setting, from a good and a bad start?

    python -m bench.adaptive FOLDER [--rounds 7] [--fetches 150]

Reads the .h5ad files of a folder from the page cache, with training steps that sleep and that use
a processor, and a matrix in memory whose bytes come late, from the begin or from the middle of the
run. Settings take turns; each turn is a new dataset. Prints cells per second after the first 20
fetches, and after 20 fetches from where bytes come late; and the ratio to the fixed setting that is
the best by its median, in the same round. Minibatches of all settings are compared bit for bit.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import scipy.sparse as sp
import torch
from bench._turns import say, spread
from tests.loader.storages.expecting import expecting

from cellfeed import BlockShuffling, CellDataset, Collection, open_collection
from cellfeed.machine import usable_cpu_count

BATCH_SIZE, FETCH_FACTOR = 64, 8
RECOVERY = 20  # fetches
GOOD: dict[str, Any] = {}  # the defaults
BAD: dict[str, Any] = {"num_threads": 1, "prefetch": 1}


def sleeps(seconds: float) -> Callable[[], object]:
    return lambda: time.sleep(seconds)


def computes(seconds: float) -> Callable[[], object]:
    """Return a step that uses one processor, for so long if it has it to itself."""
    values = torch.rand(256, 256)
    torch.set_num_threads(1)

    def times(n: int) -> float:
        begin = time.thread_time()
        for _ in range(n):
            values @ values
        return time.thread_time() - begin

    times(100)
    n = max(1, round(seconds * 1000 / times(1000)))
    return lambda: times(n)


@dataclass
class Case:
    """What is read, and trained on.

    Attributes
    ----------
    collection
        The rows.
    step
        Called with each minibatch.
    late
        Called in the middle of each turn, and before it with 0.
    settings
        Fixed ones.
    """

    collection: Collection
    step: Callable[[], object]
    settings: dict[str, dict[str, Any]]
    late: Callable[[float], object] = float
    latency: float = 0.0
    begins_late: bool = False

    def dataset(self, seed: int, **setting: Any) -> CellDataset:
        return CellDataset(
            self.collection, BlockShuffling(16), BATCH_SIZE, FETCH_FACTOR, seed=seed, **setting
        )

    def turn(self, n_fetches: int, seed: int, setting: dict[str, Any]) -> tuple[float, Any]:
        """Return cells per second after the recovery, and the settings that were chosen."""
        self.late(self.latency if self.begins_late else 0.0)
        middle = n_fetches // 2 if self.latency and not self.begins_late else 0
        dataset, n, ends = self.dataset(seed, **setting), 0, []
        while n < n_fetches * FETCH_FACTOR:
            iterator = iter(dataset)
            for minibatch in iterator:
                del minibatch
                self.step()
                n += 1
                if n % FETCH_FACTOR == 0:
                    ends.append(time.perf_counter())
                if n == middle * FETCH_FACTOR:
                    self.late(self.latency)
                if n == n_fetches * FETCH_FACTOR:
                    break
            iterator.close()
        first = middle + RECOVERY
        cells = (len(ends) - 1 - first) * FETCH_FACTOR * BATCH_SIZE
        return cells / (ends[-1] - ends[first]), dataset.history()

    def digest(self, **setting: Any) -> str:
        """Return a hash of minibatches and of the state after them."""
        self.late(self.latency / 10)
        found, dataset = hashlib.sha256(), self.dataset(0, **setting)
        for number, minibatch in enumerate(dataset):
            X = minibatch.X
            for each in (X.crow_indices(), X.col_indices(), X.values(), minibatch.rows):
                found.update(np.ascontiguousarray(each).tobytes())
            if number == 60 * FETCH_FACTOR:
                break
        found.update(str(dataset.state_dict()).encode())
        return found.hexdigest()


def late_matrix(n_rows: int = 40_000, n_columns: int = 500) -> tuple[Collection, Any]:
    """Return a matrix whose bytes come as late as is set after they were requested."""
    matrix = sp.random(n_rows, n_columns, 0.02, "csr", np.float32, random_state=0)
    collection, store = expecting(matrix, chunk_length=1 << 14)  # type: ignore[no-untyped-call]
    due, expect, read, latency = dict[int, float](), store.expect, store.read_ranges, [0.0]

    def expected(files: Any, offsets: Any, sizes: Any) -> Any:
        due[int(offsets[0])] = time.perf_counter() + latency[0]
        return expect(files, offsets, sizes)

    def came(files: Any, offsets: Any, sizes: Any) -> Any:
        time.sleep(max(0.0, due.pop(int(offsets[0]), 0.0) - time.perf_counter()))
        return read(files, offsets, sizes)

    store.expect, store.read_ranges = expected, came
    return collection, lambda seconds: latency.__setitem__(0, seconds)


def compare(name: str, case: Case, rounds: int, n_fetches: int) -> None:
    """Print what each setting gives, and its ratio to the best fixed one."""
    settings = dict(case.settings)
    settings["adaptive, good start"] = GOOD | {"adaptive": True}
    settings["adaptive, bad start"] = BAD | {"adaptive": True}
    rates: dict[str, list[float]] = {each: [] for each in settings}
    chosen: dict[str, Any] = {}
    for seed in range(rounds):
        order = list(settings)
        for each in order[seed % len(order) :] + order[: seed % len(order)]:
            rate, chosen[each] = case.turn(n_fetches, seed, settings[each])
            rates[each].append(rate)
    best = max(case.settings, key=lambda each: median(rates[each]))
    say(f"{name}; the best fixed setting is {best}")
    for each, found in rates.items():
        ratios = [one / other for one, other in zip(found, rates[best], strict=True)]
        line = f"  {each}: {spread(found)} cells/s, {spread(ratios, '.3f')} times the best"
        if "num_threads" in chosen[each]:
            of_last = [chosen[each][one] for one in ("num_threads", "prefetch")]
            changes = np.flatnonzero(np.diff(np.stack(of_last), axis=1).any(axis=0)) + 1
            line += "; last turn: " + ", ".join(
                f"{of_last[0][k]}/{of_last[1][k]} from {k}" for k in [0, *changes.tolist()]
            )
        say(line)
    digests = {case.digest(**each) for each in settings.values()}
    say(f"  minibatches and states of {len(settings)} settings: {len(digests)} digest(s)")


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--rounds", default=7, show_default=True)
@click.option("--fetches", default=150, show_default=True)
@click.option("--only", default="", help="Cases whose names contain this.")
def main(folder: Path, rounds: int, fetches: int, only: str) -> None:
    files = open_collection(sorted(folder.glob("*.h5ad")))
    threads = {f"{n} threads": {"num_threads": n} for n in {1, usable_cpu_count()}}
    depths = {f"prefetch {n}": {"prefetch": n} for n in (1, 4, 8, 16)}
    late, set_latency = late_matrix()
    # The time of a minibatch if nothing is trained.
    own = Case(files, lambda: None, {})
    alone = FETCH_FACTOR * BATCH_SIZE / own.turn(60, 0, {})[0] / FETCH_FACTOR
    say(f"a minibatch of the files takes {1000 * alone:.2f} ms")
    cases = {
        "step sleeps 0.1 of that": Case(files, sleeps(alone / 10), threads),
        "step sleeps twice that": Case(files, sleeps(alone * 2), threads),
        "step computes half of that": Case(files, computes(alone / 2), threads),
        "step computes twice that": Case(files, computes(alone * 2), threads),
        "bytes come late": Case(late, sleeps(0.0015), depths, set_latency, 0.15, begins_late=True),
        "bytes come late from the middle on": Case(late, sleeps(0.0015), depths, set_latency, 0.15),
    }
    for name, case in cases.items():
        if only in name:
            compare(name, case, rounds, fetches)


if __name__ == "__main__":
    main()
