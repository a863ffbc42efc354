"""What part of a fetch runs in one thread, and how many cores that part would keep busy.

Run from the root of the repository, as ``python -m bench.cores PLATE ...`` on Linux. Epochs with
different numbers of threads take turns, from a warm page cache; the system reports how long each
thread ran. Planning, dispatching to the decoders, and making minibatches run in one thread each
and share the GIL: their total is the serial part. The model divides everything else evenly among
the cores and assumes that no core idles for another reason; what each number of threads delivered
by the clock stands beside it.
"""

import argparse
import statistics
import threading
import time
from pathlib import Path

import torch
from bench._turns import say, spread

from cellfeed import BlockShuffling, CellDataset, open_collection

STAGES = ("planning", "dispatching", "minibatches", "decoding")
SERIAL = STAGES[:3]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates", nargs="+", type=Path)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fetch", type=int, default=64, help="minibatches of a fetch")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--cores", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    collection = open_collection(options.plates)
    datasets = {
        n: CellDataset(
            collection,
            BlockShuffling(options.block),
            options.batch,
            options.fetch,
            seed=0,
            dense=options.dense,
            num_threads=n,
        )
        for n in options.threads
    }
    for dataset in datasets.values():  # every chunk is verified once, and memory is allocated
        epoch(dataset)
    rounds = {n: [] for n in datasets}
    rates = {n: [] for n in datasets}
    for _ in range(options.rounds):
        for n, dataset in datasets.items():
            stages, rate = epoch(dataset)
            rounds[n].append(stages)
            rates[n].append(rate)
    say(f"{len(collection):,} cells; processor time per cell in us, median [range] of rounds")
    say(f"{'threads':>8}" + "".join(f"{stage:>24}" for stage in (*STAGES, "serial share")))
    for n, measured in rounds.items():
        figures = [spread([each[stage] for each in measured], ".2f") for stage in STAGES]
        shares = spread([serial(each) / sum(each.values()) for each in measured], ".2%")
        say(f"{n:>8}" + "".join(f"{each:>24}" for each in (*figures, shares)))
    model(rounds[min(rounds, key=lambda n: abs(n - 2))], options.cores, rates)


def epoch(dataset):
    """Return the processor time per cell of each stage in us, and the cells per second."""
    planning = dataset.statistics().planning
    minibatches, n_cells = iter(dataset), 0
    before, began = ran(), time.perf_counter()
    for minibatch in minibatches:
        n_cells += len(minibatch)
        if n_cells == len(dataset.collection):
            after, took = ran(), time.perf_counter() - began  # the threads end with the epoch
    planning = dataset.statistics().planning - planning
    seconds = {name: after[name] - before.get(name, 0) for name in after}
    own = seconds["MainThread"]
    ahead = sum(taken for name, taken in seconds.items() if name.startswith("cellfeed-prefetch"))
    decoding = sum(taken for name, taken in seconds.items()) - own - ahead
    taken = dict(zip(STAGES, (planning, ahead - planning, own, decoding), strict=True))
    return {stage: 1e6 * each / n_cells for stage, each in taken.items()}, n_cells / took


def ran():
    """Return how long threads of each name have run, in seconds."""
    times = {}
    for thread in threading.enumerate():
        try:
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
        except FileNotFoundError:  # it has just ended
            continue
        times[thread.name] = times.get(thread.name, 0) + int(told.split()[0]) / 1e9
    return times


def serial(stages):
    return sum(stages[stage] for stage in SERIAL)


def model(measured, cores, rates):
    """Print what cores would give if only the serial part limited them, and what threads gave."""
    one = statistics.median(serial(each) for each in measured)
    whole = statistics.median(sum(each.values()) for each in measured)
    say(f"\nmodel: {1e6 / one:,.0f} cells/s at most, from {whole / one:.0f} cores on")
    say(f"{'cores':>8}{'cells/s':>12}{'cores busy':>12}{'cells/s with as many threads':>34}")
    for n in sorted({*cores, *rates}):
        busy = min(n, whole / one)
        found = spread(rates[n]) if n in rates else ""
        say(f"{n:>8}{1e6 * busy / whole:>12,.0f}{busy:>12.1f}{found:>34}")


if __name__ == "__main__":
    main()
