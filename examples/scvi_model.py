"""scvi-tools' SCVI on raw counts in many files, with a batch key and no concatenation.

    python examples/scvi_model.py 'plates/*.h5ad' MODEL_FOLDER

Counts are a layer of each file. The model is saved and loaded without the data, and finds the
latent representation of all cells and the genes that differ between two cell lines.
"""

import sys

import numpy as np
from scvi.model import SCVI

from cellfeed import open_collection, random_split
from cellfeed.frameworks.scvi import ScviDataModule

COUNTS, BATCH, LABEL, N_EPOCHS = "counts", "plate", "cell_line", 2


def main(plates: str, folder: str) -> None:
    collection = open_collection(plates, obs=[BATCH, LABEL], elements=[f"layers/{COUNTS}"])
    data = ScviDataModule(
        collection,
        layer=COUNTS,
        batch_key=BATCH,
        batch_size=64,
        split=random_split(collection, [0.9, 0.1], seed=0),
    )
    model = SCVI(registry=data.registry, n_hidden=32, n_latent=5)
    model.train(
        N_EPOCHS,
        datamodule=data,
        check_val_every_n_epoch=1,
        accelerator="auto",
        enable_progress_bar=False,
        logger=None,
    )
    (losses,) = model.history["elbo_validation"].T.to_numpy()
    print(
        f"ELBO {losses[0]:.0f}, then {losses[-1]:.0f} on {data.n_val:,} cells; {data.statistics()}"
    )

    model.save(folder, overwrite=True)
    model = SCVI.load(folder, adata=False)
    latent = model.get_latent_representation(dataloader=data.inference_dataloader())
    n_batches = model.summary_stats.n_batch
    print(f"latent space {latent.shape} of {collection.n_vars} genes in {n_batches} batches")

    labels = collection.obs[LABEL].codes
    one, other = np.argsort(-np.bincount(labels[labels >= 0]))[:2]
    cells = data.anndata(np.flatnonzero((labels == one) | (labels == other)), obs=[LABEL])
    first, second = collection.obs[LABEL].categories[[one, other]]
    table = model.differential_expression(
        cells, groupby=LABEL, group1=first, group2=second, silent=True
    )
    print(f"{first} and {second} differ most in {table.index[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
