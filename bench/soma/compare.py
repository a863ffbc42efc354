"""Compare cellfeed with TileDB-SOMA-ML on one experiment: cells/s and processor time, in turns.

Run from the root of the repository, as ``python -m bench.soma.compare EXPERIMENT``. Both deliver
sparse minibatches of 256 cells from contiguous blocks of 64, with one label, and read as many
cells at a time: a whole epoch in its own process. Compare ratios, not absolute figures.
"""

import argparse
from functools import partial

from bench._turns import RATES, answer_of, in_turns

CELLFEED = """
from cellfeed import BlockShuffling, CellDataset, open_collection
path, label, fetch, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dataset = CellDataset(open_collection(path, obs=[label]), BlockShuffling(64), batch_size=256,
                      fetch_factor=fetch // 256, seed=seed)
report(len(minibatch.rows) for minibatch in dataset)
"""
SOMA_ML = """
import tiledbsoma, tiledbsoma_ml
path, label, fetch, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dataset = tiledbsoma_ml.ExperimentDataset(
    tiledbsoma.open(path).axis_query("RNA"), layer_name="data", obs_column_names=[label],
    batch_size=256, io_batch_size=fetch, shuffle_chunk_size=64, shuffle=True, seed=seed,
    return_sparse_X=True)
report(minibatch[0].shape[0] for minibatch in dataset)
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiment")
    parser.add_argument("--label", default="plate")
    parser.add_argument("--fetch", type=int, nargs="+", default=[4096, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for fetch in options.fetch:
        turns = {
            name: partial(answer_of, RATES + code, options.experiment, options.label, fetch)
            for name, code in (("cellfeed", CELLFEED), ("TileDB-SOMA-ML", SOMA_ML))
        }
        in_turns(turns, options.rounds, against=["TileDB-SOMA-ML"], title=f"fetch {fetch}: ")


if __name__ == "__main__":
    main()
