"""DistributedDataParallel: several processes train together, stop, and resume.

    torchrun --nproc-per-node 2 examples/ddp_resume.py 'plates/*.h5ad' run.pt --stop-after 20
    torchrun --nproc-per-node 3 examples/ddp_resume.py 'plates/*.h5ad' run.pt

The second run may have another number of processes: the rest of the epoch is divided among them.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cellfeed import BlockShuffling, CellDataset, open_collection

LABEL, N_EPOCHS = "cell_line", 1


def main(plates: str, checkpoint: Path, stop_after: int | None) -> None:
    dist.init_process_group("gloo")
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(
        collection, BlockShuffling(16), batch_size=32, fetch_factor=8, dense=True, seed=0
    )
    loader = dataset.loader()
    model = DistributedDataParallel(
        torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = torch.zeros(len(collection), dtype=torch.int64)  # how often each cell came
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        seen += saved["seen"] if dist.get_rank() == 0 else 0

    step = 0
    for _ in range(loader.state_dict()["epoch"], N_EPOCHS):
        for minibatch in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
            loss.backward()
            optimizer.step()
            seen[minibatch.rows] += 1
            step += 1
            if step == stop_after:
                break
    dist.all_reduce(seen)
    if dist.get_rank() == 0:
        state = {
            "model": model.module.state_dict(),
            "loader": loader.state_dict(),
            "seen": seen,
        }
        torch.save(state, checkpoint)
        print(
            f"{dist.get_world_size()} ranks, {step} steps each: "
            f"{int((seen > 0).sum()):,} of {len(collection):,} cells seen so far, "
            f"{int((seen > 1).sum())} of them twice to make ranks equal"
        )
    del model  # first: where it is the last to hold the group, torch can wait for itself
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stop-after", type=int)
    main(**vars(parser.parse_args()))
