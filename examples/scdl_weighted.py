"""Training from a BioNeMo SCDL folder: weights that balance labels, stopped and resumed.

python examples/scdl_weighted.py folder/of/scdl
"""

import sys

import numpy as np

from cellfeed import BlockWeightedSampling, CellDataset, open_collection

LABEL = "cell_line"


def main(folder: str) -> None:
    collection = open_collection(folder, obs=[LABEL])
    labels = collection.obs[LABEL].codes
    weights = (1 / np.bincount(labels))[labels]

    def dataset() -> CellDataset:
        strategy = BlockWeightedSampling(16, weights=weights)
        return CellDataset(collection, strategy, batch_size=64, fetch_factor=16, seed=0)

    first, drawn = dataset(), np.zeros(len(collection.obs[LABEL].categories), np.int64)
    stopped_after = len(first) // 2
    for number, minibatch in enumerate(first, start=1):
        np.add.at(drawn, minibatch.obs[LABEL].numpy(), 1)
        if number == stopped_after:
            break
    resumed = dataset()
    resumed.load_state_dict(first.state_dict())
    n_more = 0
    for minibatch in resumed:
        np.add.at(drawn, minibatch.obs[LABEL].numpy(), 1)
        n_more += 1
    print(f"{collection}\n{stopped_after} minibatches, and {n_more} after resuming")
    counts = np.bincount(labels)
    print(
        f"labels with {counts.min()} to {counts.max()} cells were drawn "
        f"{drawn.min()} to {drawn.max()} times"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
