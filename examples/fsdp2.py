"""FSDP2: a model whose weights are divided among ranks, stopped within an epoch, and resumed.

    torchrun --nproc-per-node 2 examples/fsdp2.py 'plates/*.h5ad' run --stop-after 10
    torchrun --nproc-per-node 2 examples/fsdp2.py 'plates/*.h5ad' run
    torchrun --nproc-per-node 4 examples/fsdp2.py 'plates/*.h5ad' other --replicas 2

Each rank reads its own part of the epoch, also with hybrid sharding (``--replicas``): data differ
along all dimensions of the mesh along which `fully_shard` divides or copies a model. Where a model
has other dimensions, too, such as a tensor-parallel one, give a dataset ``rank`` and ``world_size``
of the dimension along which data differ.
The checkpoint is one of torch.distributed.checkpoint, and may be loaded by other numbers of ranks.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cellfeed import BlockShuffling, CellDataset, open_collection

LABEL, N_EPOCHS = "cell_line", 1


def main(plates: str, folder: Path, replicas: int, stop_after: int | None) -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    n_ranks, rank = dist.get_world_size(), dist.get_rank()
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    names = ("replicate", "shard")
    mesh = init_device_mesh(kind, (replicas, n_ranks // replicas), mesh_dim_names=names)
    torch.manual_seed(0)
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(collection, BlockShuffling(16), batch_size=32, fetch_factor=8, seed=0)
    loader = dataset.loader(pin_memory=kind == "cuda")
    n_classes = len(collection.obs[LABEL].categories)
    model = nn.Sequential(nn.Linear(collection.n_vars, 64), nn.ReLU(), nn.Linear(64, n_classes))
    for each in (model[0], model[2], model):
        fully_shard(each, mesh=mesh if replicas > 1 else mesh["shard"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen = torch.zeros(len(collection), dtype=torch.int64)  # how often each cell came
    if (folder / ".metadata").exists():
        saved = state_of(model, optimizer) | {"loader": loader, "seen": seen}
        dcp.load(saved, checkpoint_id=folder)  # which calls `load_state_dict` of the loader
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        seen *= rank == 0

    step = 0
    for _ in range(loader.state_dict()["epoch"], N_EPOCHS):
        for delivered in loader:
            minibatch = delivered.to(kind, dense=True, non_blocking=True)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
            loss.backward()
            optimizer.step()
            seen[delivered.rows] += 1
            step += 1
            if step == stop_after:
                break
    counts = seen.to(kind)
    dist.all_reduce(counts)
    state = state_of(model, optimizer) | {"loader": loader, "seen": counts.cpu()}
    dcp.save(state, checkpoint_id=folder)
    if rank == 0:
        print(
            f"{n_ranks} ranks, {step} steps each: {int((counts > 0).sum()):,} of "
            f"{len(collection):,} cells seen so far, {int((counts > 1).sum())} of them twice"
        )
    dist.destroy_process_group()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the parts of model and optimizer on this rank."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--stop-after", type=int)
    main(**vars(parser.parse_args()))
