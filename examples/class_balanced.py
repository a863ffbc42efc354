"""Class-balanced sampling: every cell line equally often, however rare.

python examples/class_balanced.py 'plates/*.h5ad'
"""

import sys

import torch

from cellfeed import CellDataset, ClassBalancedSampling, open_collection

LABEL = "cell_line"


def main(plates: str) -> None:
    collection = open_collection(plates, obs=[LABEL])
    lines = collection.obs[LABEL]
    strategy = ClassBalancedSampling(LABEL, block_size=8, total_size=len(collection))
    dataset = CellDataset(collection, strategy, batch_size=64, fetch_factor=16, seed=0)
    stored = torch.bincount(torch.as_tensor(lines.codes).long())
    drawn = torch.zeros_like(stored)
    for minibatch in dataset.loader():
        drawn += torch.bincount(minibatch.obs[LABEL], minlength=len(stored))
    print(
        f"{len(stored)} cell lines: {stored.min()} to {stored.max()} cells each in storage, "
        f"{drawn.min()} to {drawn.max()} in an epoch"
    )


if __name__ == "__main__":
    main(sys.argv[1])
