"""Hugging Face Accelerate: several processes, gradient accumulation, a checkpoint mid-epoch.

    accelerate launch --cpu --num_processes 2 examples/accelerate_training.py 'plates/*.h5ad' run
    torchrun --nproc-per-node 2 examples/accelerate_training.py 'plates/*.h5ad' run

`prepare` returns the loader unchanged, because it already divides the epoch among ranks.
`save_state` and `load_state` save and restore the loader together with the model.
"""

import sys

import torch
from accelerate import Accelerator

from cellfeed import BlockShuffling, CellDataset, open_collection

LABEL, STOP_AFTER = "cell_line", 10


def train(plates: str, checkpoint: str, *, goes_on: bool) -> torch.Tensor:
    """Train up to a checkpoint, or from there to the end; return how often each cell came."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(collection, BlockShuffling(16), batch_size=32, dense=True, seed=0)
    model = torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, dataset.loader())
    if goes_on:
        accelerator.load_state(checkpoint)

    seen = torch.zeros(len(collection), dtype=torch.int64)
    n_steps = n_updates = 0
    for delivered in loader:
        minibatch = delivered.to(accelerator.device)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen[minibatch.rows] += 1
        n_steps += 1
        n_updates += accelerator.sync_gradients
        if n_steps == STOP_AFTER and not goes_on:
            accelerator.save_state(checkpoint)
            break
    accelerator.print(
        f"{accelerator.num_processes} processes, {n_steps} steps and {n_updates} updates each"
    )
    return accelerator.reduce(seen)


if __name__ == "__main__":
    before = train(*sys.argv[1:], goes_on=False)
    after = train(*sys.argv[1:], goes_on=True)
    seen = before + after
    Accelerator(cpu=True).print(
        f"{int((before > 0).sum()):,} cells before the checkpoint, {int((after > 0).sum()):,} "
        f"after it: {int((seen > 0).sum()):,} of {len(seen):,}, {int((seen > 1).sum())} twice"
    )
