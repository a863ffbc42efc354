"""Compare buffered and direct reads of the same files in turns, each epoch from cold.

    python -m bench.direct_io FOLDER [--blocks 16,64,512] [--rounds 5] [--batches 1000]

Prints cells/s, processor time per cell, and the share of the files in the page cache afterwards.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed_tuner._measuring._page_cache import drop_pages, resident_fraction

NAMES = {False: "buffered", True: "direct"}


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def epoch(dataset, files, n_batches):
    """Return seconds, processor seconds, cells, and the cached share of the files."""
    drop_pages(files)
    n_cells, cpu, start = 0, time.process_time(), time.perf_counter()
    iterator = iter(dataset)
    for k, minibatch in enumerate(iterator):
        n_cells += len(minibatch.rows)
        if k + 1 == n_batches:
            break
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    iterator.close()
    return seconds, cpu, n_cells, resident_fraction(files)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--blocks", default="16,64,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=1000)
    given = parser.parse_args()
    for block_size in map(int, given.blocks.split(",")):
        datasets = {
            direct: CellDataset(
                open_collection(given.folder, direct_io=direct),
                BlockShuffling(block_size),
                batch_size=64,
                fetch_factor=64,
                seed=0,
            )
            for direct in (False, True)
        }
        files = datasets[False].collection.files
        found = {direct: [] for direct in datasets}
        for number in range(given.rounds + 1):
            order = random.sample(list(datasets), 2)
            for direct in order:
                one = epoch(datasets[direct], files, given.batches)
                if number:  # the first reads the tables
                    found[direct].append(one)
        ratios = [
            (a[0] / a[2]) / (b[0] / b[2]) for a, b in zip(found[False], found[True], strict=True)
        ]
        for direct, rounds in found.items():
            rates = [n / seconds for seconds, _, n, _ in rounds]
            cpu = median(1e6 * cpu / n for _, cpu, n, _ in rounds)
            left = max(share for *_, share in rounds)
            say(
                f"block {block_size:4} {NAMES[direct]:8} {median(rates):8,.0f} "
                f"[{min(rates):,.0f}, {max(rates):,.0f}] cells/s, {cpu:.1f} us of processor time "
                f"per cell, {left:.1%} of the files in the page cache"
            )
        say(
            f"block {block_size:4} direct / buffered: {median(ratios):.2f} "
            f"[{min(ratios):.2f}, {max(ratios):.2f}]"
        )


if __name__ == "__main__":
    main()
