"""Tune for several processes that train together and read at the same time.

    torchrun --nproc-per-node 2 examples/tune_ddp.py 'plates/*.h5ad' [seconds]

All ranks call `autotune`. The first one measures for all, and each gets the same result.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cellfeed import CellDataset, open_collection
from cellfeed_tuner import autotune

LABEL = "plate"


def main(plates: str, seconds: str = "15") -> None:
    collection = open_collection(plates, obs=[LABEL])
    result = autotune(
        collection,
        label=LABEL,
        batch_size=32,
        block_sizes=[4, 16],
        fetch_factors=[2, 8],
        workers=[0],
        budget=float(seconds),
        entropy_floor=0.5,
    )
    dist.init_process_group("gloo")
    dataset = CellDataset.from_autotune(collection, result, dense=True, drop_last=True, seed=0)
    model = DistributedDataParallel(
        torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    n_cells = torch.zeros(1, dtype=torch.int64)
    for minibatch in dataset.loader():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
        loss.backward()
        optimizer.step()
        n_cells += len(minibatch.rows)
    dist.all_reduce(n_cells)
    if dist.get_rank() == 0:
        print(result)
        print(f"{dist.get_world_size()} ranks trained on {int(n_cells):,} cells")
    del model  # first: where it is the last to hold the group, torch can wait for itself
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
