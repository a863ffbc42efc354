"""Sets of cells with the same drug and cell line, as perturbation models need them.

python examples/perturbation_sets.py 'plates/*.h5ad'
"""

import sys

from cellfeed import CellDataset, GroupedSampling, open_collection

SET_SIZE, N_SETS = 4, 8


def main(plates: str) -> None:
    collection = open_collection(plates, obs=["drug", "cell_line"])
    strategy = GroupedSampling(("drug", "cell_line"), set_size=SET_SIZE)
    dataset = CellDataset(
        collection, strategy, batch_size=SET_SIZE * N_SETS, fetch_factor=16, dense=True, seed=0
    )
    n_sets = n_whole = 0
    for minibatch in dataset.loader():
        sets = minibatch.X.reshape(-1, SET_SIZE, collection.n_vars)  # sets x cells x genes
        drugs = minibatch.obs["drug"].reshape(-1, SET_SIZE)
        lines = minibatch.obs["cell_line"].reshape(-1, SET_SIZE)
        same = (drugs == drugs[:, :1]) & (lines == lines[:, :1])
        n_sets += len(sets)
        n_whole += int(same.all(1).sum())
    print(f"{n_sets} sets of {SET_SIZE} cells; {n_whole} have a single drug and cell line")


if __name__ == "__main__":
    main(sys.argv[1])
