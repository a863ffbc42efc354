"""Hugging Face Accelerate: several processes, gradient accumulation, a checkpoint mid-epoch.

    accelerate launch --num_processes 2 examples/accelerate_training.py 'plates/*.h5ad' run
    torchrun --nproc-per-node 2 examples/accelerate_training.py 'plates/*.h5ad' run

`prepare` returns the loader unchanged, because it already divides the epoch among ranks.
`save_state` and `load_state` save and restore the loader together with the model, so that a run
that is stopped and resumed ends with the weights of one that is not; if it stops after an update,
since gradients that are being accumulated are not saved.
"""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from cellfeed import BlockShuffling, CellDataset, open_collection

LABEL, STOP_AFTER = "cell_line", 12


def train(plates: str, load: str | None = None, save: str | None = None) -> Any:
    """Train up to a checkpoint, or to the end; return how often each cell came, and the weights."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=4)
    set_seed(0)
    collection = open_collection(plates, obs=[LABEL])
    dataset = CellDataset(collection, BlockShuffling(16), batch_size=32, seed=0)
    model = torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    own = dataset.loader(pin_memory=accelerator.device.type == "cuda")
    model, optimizer, loader = accelerator.prepare(model, optimizer, own)
    if load is not None:
        accelerator.load_state(load)

    seen = torch.zeros(len(collection), dtype=torch.int64, device=accelerator.device)
    n_steps = n_updates = 0
    for delivered in loader:
        minibatch = delivered.to(accelerator.device, dense=True, non_blocking=True)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        seen[minibatch.rows] += 1
        n_steps += 1
        n_updates += accelerator.sync_gradients
        if n_steps == STOP_AFTER and save is not None:
            accelerator.save_state(save)
            break
    accelerator.print(
        f"{accelerator.num_processes} processes, {n_steps} steps and {n_updates} updates each"
    )
    weights = accelerator.unwrap_model(model).weight.detach()
    return accelerator.reduce(seen), weights


def main(plates: str, checkpoint: str) -> None:
    whole, expected = train(plates)
    before, _ = train(plates, save=checkpoint)
    after, weights = train(plates, load=checkpoint)
    seen = before + after
    Accelerator(cpu=not torch.cuda.is_available()).print(
        f"{int((before > 0).sum()):,} cells before the checkpoint, {int((after > 0).sum()):,} "
        f"after it: {int((seen > 0).sum()):,} of {len(seen):,}, {int((seen > 1).sum())} twice; "
        f"weights differ by {float((weights - expected).abs().max()):.0e} from those of "
        f"{int((whole > 0).sum()):,} cells in one run"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
