"""Ray Train: several workers train together, stop within an epoch, and go on from a checkpoint.

    python examples/ray_train.py 'plates/*.h5ad' run --stop-after 10
    python examples/ray_train.py 'plates/*.h5ad' run

`prepare_data_loader` takes the loader as it is: it already divides the epoch among workers. With
`move_to_device=True`, Ray would take one minibatch ahead of the training loop, and the state would
be one minibatch further than the training. The state is saved beside the model's. The second run
finds the latest checkpoint of the first, and may have another number of workers.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import Checkpoint, RunConfig, ScalingConfig

from cellfeed import BlockShuffling, CellDataset, open_collection

LABEL, N_EPOCHS = "cell_line", 1


def train(config: dict[str, Any]) -> None:
    """Train as one of the workers."""
    torch.manual_seed(0)
    collection = open_collection(config["plates"], obs=[LABEL])
    dataset = CellDataset(collection, BlockShuffling(16), batch_size=32, fetch_factor=8, seed=0)
    loader = dataset.loader(pin_memory=torch.cuda.is_available())
    minibatches = ray.train.torch.prepare_data_loader(loader, move_to_device=False)
    linear = torch.nn.Linear(collection.n_vars, len(collection.obs[LABEL].categories))
    seen, step = torch.zeros(len(collection), dtype=torch.int64), 0  # how often each cell came
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "run.pt"))
        linear.load_state_dict(saved["model"])
        loader.load_state_dict(saved["loader"])
        seen += saved["seen"] if dist.get_rank() == 0 else 0
    model = ray.train.torch.prepare_model(linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    device = ray.train.torch.get_device()
    for _ in range(loader.state_dict()["epoch"], N_EPOCHS):
        for delivered in minibatches:
            minibatch = delivered.to(device, dense=True, non_blocking=True)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(minibatch.X), minibatch.obs[LABEL])
            loss.backward()
            optimizer.step()
            seen[delivered.rows] += 1
            step += 1
            if step == config["stop_after"]:
                break
    counts = seen.to(device)
    dist.all_reduce(counts)
    state = {"model": linear.state_dict(), "loader": loader.state_dict(), "seen": counts.cpu()}
    figures = {
        "workers": dist.get_world_size(),
        "steps": step,
        "seen": int((counts > 0).sum()),
        "twice": int((counts > 1).sum()),
    }
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            torch.save(state, Path(folder, "run.pt"))
        first = Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None
        ray.train.report(figures, checkpoint=first)


def main(plates: str, folder: Path, workers: int, stop_after: int | None) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"plates": str(Path(plates).absolute()), "stop_after": stop_after},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(name=folder.name, storage_path=str(folder.parent.absolute())),
    )
    result = trainer.fit()
    found = result.metrics
    print(
        f"{found['workers']} workers, {found['steps']} steps each: {found['seen']:,} cells seen so "
        f"far, {found['twice']} twice; saved in {result.checkpoint.path}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--stop-after", type=int)
    main(**vars(parser.parse_args()))
