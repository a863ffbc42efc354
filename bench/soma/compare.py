"""Compare cellfeed with TileDB-SOMA-ML on one experiment: cells/s and processor time, in turns.

Takes the path of an experiment. Both deliver sparse minibatches of 256 cells from contiguous
blocks of 64, with one label, and read as many cells at a time: a whole epoch in its own process.
Compare ratios, not absolute figures.
"""

import argparse
import statistics
import subprocess
import sys

CELLFEED = """
import sys, time, os
import torch
from cellfeed import BlockShuffling, CellDataset, open_collection
def epochs(path, fetch, label, seed):
    collection = open_collection(path, obs=[label])
    return CellDataset(collection, BlockShuffling(64), batch_size=256, fetch_factor=fetch // 256,
                       seed=seed)
def cells(minibatch):
    return len(minibatch.rows)
"""
SOMA_ML = """
import sys, time, os
import tiledbsoma, tiledbsoma_ml
def epochs(path, fetch, label, seed):
    query = tiledbsoma.open(path).axis_query("RNA")
    return tiledbsoma_ml.ExperimentDataset(
        query, layer_name="data", obs_column_names=[label], batch_size=256, io_batch_size=fetch,
        shuffle_chunk_size=64, shuffle=True, seed=seed, return_sparse_X=True)
def cells(minibatch):
    return minibatch[0].shape[0]
"""
RUN = """
path, fetch, label, seed = sys.argv[1:]
dataset = epochs(path, int(fetch), label, int(seed))
start, used, n = time.perf_counter(), time.process_time(), 0
for minibatch in dataset:
    n += cells(minibatch)
print(n / (time.perf_counter() - start), n / (time.process_time() - used))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--label", default="plate")
    parser.add_argument("--fetch", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for fetch in options.fetch:
        ratios = []
        for seed in range(options.rounds):
            arguments = [options.experiment, fetch, options.label, seed]
            both = [measured(code, arguments) for code in (CELLFEED, SOMA_ML)]
            ratios.append([own / other for own, other in zip(*both, strict=True)])
            sys.stdout.write(f"fetch {fetch}: cells/s, cells per CPU second: {both}\n")
            sys.stdout.flush()
        wall, processor = (statistics.median(each) for each in zip(*ratios, strict=True))
        said = f"{wall:.1f} times TileDB-SOMA-ML, {processor:.1f} by processor time"
        sys.stdout.write(f"fetch {fetch}: {said}\n")


def measured(code, arguments):
    command = [sys.executable, "-W", "ignore", "-c", code + RUN, *map(str, arguments)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(each) for each in said.split()]


if __name__ == "__main__":
    main()
