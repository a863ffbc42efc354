"""A classifier of cell lines in Lightning: a data module with train, validation and test.

    python examples/lightning_module.py 'plates/*.h5ad' [DEVICES]

Each rank reads its own part. The data module saves and restores the position of its loader, also
where a scheduler asks for `estimated_stepping_batches`, for which Lightning drops it otherwise.
"""

import sys
from typing import Any

import pytorch_lightning as pl
import torch

from cellfeed import BlockShuffling, CellDataset, Streaming, open_collection, random_split
from cellfeed.frameworks.lightning import CellDataModule
from cellfeed.transforms import Log1p, NormalizeTotal

LABEL = "cell_line"


class Classifier(pl.LightningModule):
    def __init__(self, n_genes: int, n_classes: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(n_genes, n_classes)

    def scores(self, minibatch: Any) -> torch.Tensor:
        scores: torch.Tensor = minibatch.X @ self.linear.weight.T + self.linear.bias
        return scores

    def training_step(self, minibatch: Any, _: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.scores(minibatch), minibatch.obs[LABEL])

    def validation_step(self, minibatch: Any, _: int) -> None:
        accuracy = (self.scores(minibatch).argmax(1) == minibatch.obs[LABEL]).float().mean()
        self.log("accuracy", accuracy, batch_size=len(minibatch), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(plates: str, devices: int = 1) -> None:
    collection = open_collection(plates, obs=[LABEL])
    train, val, test = random_split(collection, [0.8, 0.1, 0.1], seed=0, stratify=LABEL)

    def dataset(strategy: Any) -> CellDataset:
        transform = [NormalizeTotal(1e4), Log1p()]
        return CellDataset(collection, strategy, 64, fetch_factor=16, transform=transform, seed=0)

    data = CellDataModule(
        train=dataset(BlockShuffling(16, indices=train)),
        val=dataset(Streaming(indices=val)),
        test=dataset(Streaming(indices=test)),
    )
    model = Classifier(collection.n_vars, len(collection.obs[LABEL].categories))
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="auto",
        devices=devices,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    (found,) = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, {devices} device(s), accuracy {found['accuracy']:.0%}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
