"""scvi-tools' SCVI model on raw counts in many files, with a batch key and no concatenation.

    python examples/scvi_model.py 'plates/*.h5ad'

Counts are a layer of each file.
"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from scvi import REGISTRY_KEYS
from scvi.module import VAE
from scvi.train import TrainingPlan

from cellfeed import BlockShuffling, CellDataset, Streaming, open_collection

COUNTS, BATCH, N_EPOCHS = "layers/counts", "plate", 2


def inputs(minibatch: Any) -> dict[str, torch.Tensor]:
    """Return a minibatch under scvi-tools' names."""
    batch = minibatch.obs[BATCH][:, None]
    return {
        REGISTRY_KEYS.X_KEY: minibatch.X,
        REGISTRY_KEYS.BATCH_KEY: batch,
        REGISTRY_KEYS.LABELS_KEY: torch.zeros_like(batch),
    }


def main(plates: str) -> None:
    collection = open_collection(plates, obs=[BATCH], elements=[COUNTS])
    n_batches = len(collection.obs[BATCH].categories)
    options = {"batch_size": 64, "dense": True, "batch_transform": inputs, "seed": 0}
    train = CellDataset(collection, BlockShuffling(16), **options)

    model = VAE(collection.n_vars, n_batch=n_batches, n_hidden=32, n_latent=5)
    plan = TrainingPlan(model)
    plan.n_obs_training = len(collection)
    trainer = pl.Trainer(
        max_epochs=N_EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(plan, train.loader())
    loss = float(trainer.callback_metrics["elbo_train"])

    model.eval()
    with torch.no_grad():
        latent = torch.cat(
            [
                model.inference(**model._get_inference_input(each))["qz"].loc  # noqa: SLF001
                for each in CellDataset(collection, Streaming(), **options)
            ]
        )
    print(
        f"SCVI on {len(collection):,} cells x {collection.n_vars} genes of {n_batches} batches: "
        f"{trainer.global_step} steps, ELBO {loss:.0f}, latent space {tuple(latent.shape)}"
    )


if __name__ == "__main__":
    main(sys.argv[1])
