"""What tokens cost beside reading, and beside the same tokenizer in NumPy in worker processes.

Run from the root of the repository, as ``python -m bench.tokenizers.compare PLATES``. Takes a
folder of gzip .h5ad plates with counts that fit into memory. Each way runs in its own process,
round after round, with files in the page cache and code that is compiled before, in minibatches of
64 at block 16: cellfeed's tokens, in its threads; the same tokens that a ``batch_transform``
computes with NumPy, a cell at a time, in as many worker processes as there are processors; and
reading alone. Each gene has a token and a median, so none is left out. Compare ratios, not absolute
figures; "cost" is processor time per cell beside that of reading alone, and less is better.
"""

import argparse
import os
from functools import partial
from pathlib import Path
from statistics import median

from bench._turns import RATES, answer_of, say, spread, warm

LENGTH = 2048
COMMON = """

import numpy as np
from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.tokenizers import BinnedValues, MaskTokens, RankTokens

folder, seconds, seed, workers, length = sys.argv[1], float(sys.argv[2]), *map(int, sys.argv[3:])
collection = open_collection(folder)
random, names = np.random.default_rng(0), collection.var_names
TOKENS = 4 + random.permutation(names.size)
MEDIANS = random.lognormal(size=names.size)
vocabulary = {"<pad>": 0, "<cls>": 1, "<eos>": 2, "<mask>": 3}
vocabulary |= dict(zip(names, TOKENS.tolist()))
medians = dict(zip(names, MEDIANS.tolist()))

def by_rank(cells):
    X, tokens = cells.X, np.zeros((len(cells), length), np.int64)
    lengths = np.zeros(len(cells), np.int64)
    for k in range(len(cells)):
        here = slice(X.indptr[k], X.indptr[k + 1])
        genes, values = X.indices[here], X.data[here].astype(np.float64)
        scores = values / values.sum() * 10_000 / MEDIANS[genes]
        order = np.argsort(-scores, kind="stable")[: length - 2]
        lengths[k] = order.size + 2
        tokens[k, 0], tokens[k, order.size + 1] = 1, 2
        tokens[k, 1 : order.size + 1] = TOKENS[genes[order]]
    width = lengths.max(initial=0)
    return tokens[:, :width], np.arange(width) < lengths[:, None], lengths

def in_bins(cells):
    X, shape = cells.X, (len(cells), length)
    tokens, bins = np.zeros(shape, np.int64), np.full(shape, -2, np.float32)
    lengths = np.zeros(len(cells), np.int64)
    for k in range(len(cells)):
        here = slice(X.indptr[k], X.indptr[k + 1])
        genes, values = X.indices[here], X.data[here]
        edges = np.quantile(values, np.linspace(0, 1, 50))
        left, right = np.digitize(values, edges), np.digitize(values, edges, right=True)
        own = np.ceil(np.random.rand(values.size) * (right - left) + left)
        kept = np.sort(np.random.permutation(values.size)[: length - 1])
        lengths[k] = kept.size + 1
        tokens[k, 0], bins[k, 0] = 1, 0
        tokens[k, 1 : kept.size + 1] = TOKENS[genes[kept]]
        bins[k, 1 : kept.size + 1] = own[kept]
    width = lengths.max(initial=0)
    return tokens[:, :width], bins[:, :width], lengths

def sizes():
    for epoch in range(1000):
        for each in dataset.loader(num_workers=workers, persistent_workers=bool(workers)):
            if isinstance(each, tuple):
                counted[0] += int(each[-1].sum())
                yield len(each[0])
            else:
                counted[0] += int(each["lengths"].sum()) if "lengths" in each else 0
                yield len(each)

counted = [0]
options = dict(batch_size=64, fetch_factor=16, seed=seed)
"""
MEASURE = """
made = sizes()
for _ in range(8):
    next(made)
counted[0] = 0
start, before, n = time.perf_counter(), time.process_time(), 0
for size in made:
    n += size
    if time.perf_counter() - start > seconds:
        break
wall, cpu = time.perf_counter() - start, time.process_time() - before
rates = {"cells/s": n / wall, "tokens/s": counted[0] / wall}
print(json.dumps(rates | {"us per cell": 1e6 * cpu / n}))
"""
RANKS = "options['transform'] = RankTokens(vocabulary, medians, max_length=length)"
WAYS = {
    "reading alone": ("", 0),
    "RankTokens": (RANKS, 0),
    "RankTokens, masked": (RANKS.replace("= Rank", "= [Rank") + ", MaskTokens(0.15)]", 0),
    "BinnedValues": ("options['transform'] = BinnedValues(vocabulary, max_length=length)", 0),
    "ranks in NumPy": ("options |= dict(batch_transform=by_rank, as_torch=False)", 1),
    "bins in NumPy": ("options |= dict(batch_transform=in_bins, as_torch=False)", 1),
}
BY_WORKERS = "ranks in NumPy", "bins in NumPy"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4)
    options = parser.parse_args()
    n_processors = len(os.sched_getaffinity(0))
    found = {name: [] for name in WAYS}
    for seed in range(options.rounds):
        for name, (way, has_workers) in WAYS.items():
            warm(options.plates.glob("*.h5ad"))
            code = RATES + COMMON + way + "\ndataset = CellDataset(collection, "
            code += "BlockShuffling(16), **options)\n" + MEASURE
            workers = n_processors if has_workers else 0
            run = partial(answer_of, code, options.plates, options.seconds, seed, workers, LENGTH)
            found[name].append(run())
    alone = found["reading alone"]
    for name, runs in found.items():
        parts = [
            f"{spread([run[unit] for run in runs])} {unit}" for unit in ("cells/s", "tokens/s")
        ]
        rates = [run["cells/s"] / one["cells/s"] for run, one in zip(runs, alone, strict=True)]
        parts.append(f"{spread(rates, '.2f')} times reading alone")
        if name not in BY_WORKERS:  # processor time of this process alone
            costs = [run["us per cell"] / one["us per cell"] - 1
                     for run, one in zip(runs, alone, strict=True)]  # fmt: skip
            parts.append(f"{median([run['us per cell'] for run in runs]):,.0f} us per cell of "
                         f"processor time, cost {spread(costs, '.0%')}")  # fmt: skip
        say(f"{name}: {'; '.join(parts)}")


if __name__ == "__main__":
    main()
