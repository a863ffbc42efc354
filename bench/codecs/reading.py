"""Compare shuffled stores with a cellstream archive of the same cells: cells/s, in turns.

Run from the root of the repository, as ``python -m bench.codecs.reading ARCHIVE STORE ...``.
Each turn reads for a second with two threads, from a warm page cache: minibatches with
`CellDataset`, from blocks and from single cells, and as many random cells with cellstream's
`gather_rows`, sorted, which is its fastest. Compare ratios to `gather_rows` of the same round.
"""

import argparse
import statistics
import sys
from pathlib import Path

from bench.cellstream.compare import gather, minibatches, rates_of


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("stores", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--size", type=int, default=1024, help="cells at a time")
    parser.add_argument("--fetch", type=int, default=8192, help="cells that cellfeed fetches")
    parser.add_argument("--blocks", type=int, nargs="+", default=[512, 1])
    options = parser.parse_args()
    rates = {}
    for seed in range(options.rounds):
        turns = {
            "gather_rows": gather(
                options.archive, options.size, options.threads, is_sorted=True, seed=seed
            )
        }
        for store in options.stores:
            for block in options.blocks:
                turns[f"{store.name}, block {block}"] = minibatches(
                    store,
                    options.size,
                    options.threads,
                    block_size=block,
                    fetch=options.fetch,
                    seed=seed,
                )
        for name, turn in turns.items():
            rate = rates_of(turn, options.seconds, first=2 * options.fetch, least=options.fetch)
            rates.setdefault(name, []).append(rate)
    report(rates)


def report(rates):
    """Print medians, and smallest and largest ratios to `gather_rows` in the same round."""
    wall, used = (
        {name: [rate[k] for rate in each] for name, each in rates.items()} for k in (0, 1)
    )
    for name in rates:
        parts = [name]
        for unit, figures in (("cells/s", wall), ("cells per second of processor time", used)):
            first = figures["gather_rows"]
            ratios = [mine / other for mine, other in zip(figures[name], first, strict=True)]
            parts.append(
                f"{statistics.median(figures[name]):,.0f} {unit}, {statistics.median(ratios):.2f} "
                f"[{min(ratios):.2f}, {max(ratios):.2f}]"
            )
        sys.stdout.write("; ".join(parts) + "\n")


if __name__ == "__main__":
    main()
