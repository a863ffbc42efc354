"""One loader trains the default SCVI for two epochs; the figures are those of the second.

Runs in an environment that has scvi-tools, annbatch and what cellfeed needs; see `compare.py`.
"""

import json
import logging
import resource
import sys
import time
import warnings
from pathlib import Path

import anndata as ad
import scvi
from bench.scvi.compare import ALONE
from lightning.pytorch import Callback, LightningDataModule
from scvi.dataloaders import CollectionAdapter
from scvi.model import SCVI
from torch.utils.data import DataLoader

from cellfeed.frameworks.scvi import ScviDataModule
from cellfeed.synthetic import write_tahoe_like

BATCH_SIZE = 128
KEYS = {"batch_key": "plate"}
LAYER = "counts"  # scvi-tools reads nothing else of an AnnCollection


class Epochs(Callback):
    """Keeps the figures of the last epoch: its time, that of its steps, and processor time."""

    def on_train_epoch_start(self, *_):
        self.began, self.used = time.perf_counter(), time.process_time()
        self.in_steps, self.n_steps = 0.0, 0

    def on_train_batch_start(self, *_):  # when the minibatch is there
        self.step_began = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.in_steps += time.perf_counter() - self.step_began
        self.n_steps += 1

    def on_train_epoch_end(self, *_):
        self.took = time.perf_counter() - self.began
        self.used = time.process_time() - self.used


class Same(LightningDataModule):
    def __init__(self, data):
        super().__init__()
        minibatch = next(iter(data.train_dataloader()))
        self.minibatches = [minibatch] * (data.n_obs // BATCH_SIZE)

    def train_dataloader(self):
        return DataLoader(self.minibatches, batch_size=None)


def model_and_data(entry, paths, store):
    """Return an SCVI, and the data module that it trains with; None if its own cells."""
    if entry == "annbatch":
        data = SCVI.setup_annbatch(
            str(store),
            **KEYS,
            batch_size=BATCH_SIZE,
            rebuild=False,
            shuffle=True,
            preload_to_gpu=False,
        )
        return SCVI(registry=data.registry), data
    if entry in ("in memory", "AnnCollection"):
        if entry == "in memory":
            cells = ad.concat([ad.read_h5ad(path) for path in paths], index_unique="-")
        else:
            backed = [ad.read_h5ad(path, backed="r") for path in paths]
            joined = {"join_vars": "inner", "join_obs": "inner"}
            cells = CollectionAdapter(ad.experimental.AnnCollection(backed, **joined))
        SCVI.setup_anndata(cells, layer=LAYER, **KEYS)
        return SCVI(cells), None
    data = ScviDataModule(paths, layer=LAYER, **KEYS, batch_size=BATCH_SIZE)
    return SCVI(registry=data.registry), Same(data) if entry == ALONE else data


def train(entry, folder, store):
    model, data = model_and_data(entry, sorted(Path(folder).glob("*.h5ad")), Path(store))
    epochs = Epochs()
    options = {"batch_size": BATCH_SIZE} if data is None else {"datamodule": data}
    model.train(
        2,
        callbacks=[epochs],
        train_size=1.0,  # of which data modules with parts of their own take no notice
        accelerator="cpu",
        enable_progress_bar=False,
        **options,
    )
    n_cells = epochs.n_steps * BATCH_SIZE
    return {
        "cells/s": n_cells / epochs.took,
        "% between steps": 100 * (1 - epochs.in_steps / epochs.took),
        "us of processor a cell": 1e6 * epochs.used / n_cells,
        "MiB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def write(folder, n_cells, n_genes):
    """Write plates with counts as a layer, too, of which AnnCollection has need."""
    for path in write_tahoe_like(folder, n_cells=int(n_cells), n_genes=int(n_genes)):
        plate = ad.read_h5ad(path)
        plate.layers[LAYER] = plate.X.copy()
        plate.write_h5ad(path, compression="gzip")
    return {"cells": int(n_cells)}


def build(folder, store):
    """Write the store of annbatch as scvi-tools does, and return what that takes."""
    paths = [str(path) for path in sorted(Path(folder).glob("*.h5ad"))]
    start, used = time.perf_counter(), time.process_time()
    SCVI.setup_annbatch(
        str(store),
        paths,
        **KEYS,
        layer=LAYER,
        batch_size=BATCH_SIZE,
        shuffle=True,
        preload_to_gpu=False,
    )
    return {
        "s": time.perf_counter() - start,
        "s of processor time": time.process_time() - used,
        "MiB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main(what, *arguments):
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    scvi.settings.verbosity, scvi.settings.seed = logging.ERROR, 0
    found = {"write": write, "build": build, "train": train}[what](*arguments)
    sys.stdout.write(f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
