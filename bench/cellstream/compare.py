"""Compare cellfeed with cellstream's own `gather_rows` on one archive: cells/s, in turns.

Takes an archive, or a folder of .h5ad files, which it converts first and times. Each turn reads
for a second with one or two threads: random cells, 64 or 1,024 at a time, as drawn or sorted, with
`gather_rows`; and minibatches of as many cells with `CellDataset`, from blocks of 1 and 16.
The page cache is warm; with ``--cold``, the archive's pages are dropped before each turn. Compare
ratios, not absolute figures.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import cellstream
import numpy as np
from cellstream.cell import concat_cell_archives, write_cell_archive

from cellfeed import BlockShuffling, CellDataset, open_collection


def gather(path, size, threads, *, is_sorted, seed):
    store = cellstream.open(path)
    random = np.random.default_rng(seed)
    while True:
        rows = random.integers(0, store.n_obs, size)
        yield (
            len(store.gather_rows(np.sort(rows) if is_sorted else rows, n_threads=threads).indptr)
            - 1
        )


def minibatches(path, size, threads, *, block_size, fetch, seed):
    dataset = CellDataset(
        open_collection(path),
        BlockShuffling(block_size),
        batch_size=size,
        fetch_factor=max(1, fetch // size),
        num_threads=threads,
        seed=seed,
    )
    while True:
        for minibatch in dataset:
            yield len(minibatch.rows)


def rates_of(turn, seconds, *, first, least):
    """Return cells/s, and cells per second of processor time, over at least this many cells."""
    n = 0
    while n < first:  # everything is open then, and memory is reused
        n += next(turn)
    start, used, n = time.perf_counter(), time.process_time(), 0
    while n < least or time.perf_counter() - start < seconds:
        n += next(turn)
    rates = n / (time.perf_counter() - start), n / (time.process_time() - used)
    turn.close()
    return rates


def contenders(path, size, threads, fetch, seed):
    common = path, size, threads
    return {
        "gather_rows": gather(*common, is_sorted=False, seed=seed),
        "gather_rows, sorted": gather(*common, is_sorted=True, seed=seed),
        "cellfeed, block 1": minibatches(*common, block_size=1, fetch=fetch, seed=seed),
        "cellfeed, block 16": minibatches(*common, block_size=16, fetch=fetch, seed=seed),
    }


def drop(path):
    with Path(path).open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def converted(folder):
    """Write an archive of all files of a folder beside it, and print how long that took."""
    out = folder.with_suffix(".csad")
    files, parts, start = sorted(folder.glob("*.h5ad")), [], time.perf_counter()
    for file in files:
        parts.append(out.with_name(f"{out.stem}-{file.stem}.csad"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            write_cell_archive(file, parts[-1], overwrite=True)
    concat_cell_archives(parts, out, overwrite=True)
    seconds = time.perf_counter() - start
    for part in parts:
        part.unlink()
    before, after = (sum(p.stat().st_size for p in paths) for paths in (files, [out]))
    sys.stdout.write(
        f"converted in {seconds:.1f} s: {before / 1e6:.0f} MB, then {after / 1e6:.0f}\n"
    )
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path, help="an archive, or a folder of .h5ad")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--fetch", type=int, default=4096, help="cells that cellfeed fetches")
    parser.add_argument("--cold", action="store_true")
    options = parser.parse_args()
    path = converted(options.path) if options.path.is_dir() else options.path
    for size, threads in itertools.product((64, 1024), (1, 2)):
        rates = {}
        for seed in range(options.rounds):
            for name, turn in contenders(path, size, threads, options.fetch, seed).items():
                # Cold, only cells that were not read before count.
                first = 0 if options.cold else 4 * options.fetch
                if options.cold:
                    drop(path)
                rates.setdefault(name, []).append(
                    rates_of(turn, options.seconds, first=first, least=4 * options.fetch)
                )
        report(f"{size} cells, {threads} threads", rates)


def report(what, rates):
    """Print medians, and ratios to the faster way to gather in the same round."""
    gathers = list(rates.values())[:2]
    best = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(*gathers, strict=True)]
    for name, each in rates.items():
        own = [statistics.median(rate) for rate in zip(*each, strict=True)]
        ratios = [
            [mine / other for mine, other in zip(*pair, strict=True)]
            for pair in zip(each, best, strict=True)
        ]
        wall, processor = (statistics.median(ratio) for ratio in zip(*ratios, strict=True))
        sys.stdout.write(
            f"{what}, {name}: {own[0]:,.0f}/s, {wall:.2f}; "
            f"{own[1]:,.0f} per second of processor time, {processor:.2f}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
