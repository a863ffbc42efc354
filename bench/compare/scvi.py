"""An epoch of the default SCVI: minibatches from files, from memory, and the same one each time.

``--python`` names an interpreter with cellfeed and what `scvi.txt` beside this file lists; by
default this one. Synthetic plates are written to ``--data`` once, and from them the zarr store that
scvi-tools' ``setup_annbatch`` makes. A first epoch compiles and fills the page cache; the second
one counts. Where the same minibatch comes again and again, there is the time of the model and its
trainer alone.

- between steps: until the next minibatch is there, dense; where the same one comes again and again,
  that is the trainer's own time.
- memory: the most that the process had, of which the first way has all but the cells.
"""

import functools
import logging
import sys
import time
import warnings
from pathlib import Path

from bench._harness import Case, files_of, peak_bytes, plates_of, say, turn, way

BATCH_SIZE = 128
KEYS = {"batch_key": "plate"}
LAYER = "counts"  # scvi-tools reads nothing else of an AnnCollection
ALONE, ANNBATCH = "the same minibatch", "annbatch"
ENTRIES = ALONE, "in memory", "cellfeed", ANNBATCH, "AnnCollection"
OF_STORE = {**KEYS, "batch_size": BATCH_SIZE, "shuffle": True, "preload_to_gpu": False}


def model_and_data(entry, paths, store):
    """Return an SCVI, and the data module that it trains with; None if its own cells."""
    import anndata as ad
    from lightning.pytorch import LightningDataModule
    from scvi.dataloaders import CollectionAdapter
    from scvi.model import SCVI
    from torch.utils.data import DataLoader

    from cellfeed.frameworks.scvi import ScviDataModule

    if entry == ANNBATCH:
        data = SCVI.setup_annbatch(str(store), rebuild=False, **OF_STORE)
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
    if entry == ALONE:
        minibatches = [next(iter(data.train_dataloader()))] * (data.n_obs // BATCH_SIZE)
        module = LightningDataModule()
        module.train_dataloader = functools.partial(DataLoader, minibatches, batch_size=None)
        return SCVI(registry=data.registry), module
    return SCVI(registry=data.registry), data


def train(seed, entry, paths, store):
    """Train for two epochs, and return the figures of the second."""
    import scvi
    from lightning.pytorch import Callback

    class Epochs(Callback):
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

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    scvi.settings.verbosity, scvi.settings.seed = logging.ERROR, 0
    model, data = model_and_data(entry, paths, store)
    epochs = Epochs()
    options = {"batch_size": BATCH_SIZE} if data is None else {"datamodule": data}
    # Data modules with parts of their own take no notice of `train_size`.
    model.train(2, callbacks=[epochs], train_size=1.0, accelerator="cpu",
                enable_progress_bar=False, **options)  # fmt: skip
    n_cells = epochs.n_steps * BATCH_SIZE
    return {
        "cells/s": n_cells / epochs.took,
        "% between steps": 100 * (1 - epochs.in_steps / epochs.took),
        "us of processor per cell": 1e6 * epochs.used / n_cells,
        "peak MB": peak_bytes() / 1e6,
    }


def add_layer(seed, paths):
    """Write counts as a layer, too, of which AnnCollection has need."""
    import anndata as ad

    for path in paths:
        plate = ad.read_h5ad(path)
        if LAYER not in plate.layers:
            plate.layers[LAYER] = plate.X.copy()
            plate.write_h5ad(path, compression="gzip")
    return {}


def build(seed, paths, store):
    """Write the store of annbatch as scvi-tools does, and return what that takes."""
    from scvi.model import SCVI

    start, used = time.perf_counter(), time.process_time()
    SCVI.setup_annbatch(str(store), list(map(str, paths)), layer=LAYER, **OF_STORE)
    return {
        "s": time.perf_counter() - start,
        "s of processor time": time.process_time() - used,
        "peak MB": peak_bytes() / 1e6,
        "MB on disk": sum(path.stat().st_size for path in files_of([Path(store)])) / 1e6,
    }


def cases(options):
    paths, store = plates_of(options, n_genes=options.genes), options.data / "annbatch.zarr"
    given = {"python": options.python or sys.executable, "paths": paths}
    turn(way(add_layer, **given))
    entries = [each for each in ENTRIES if each not in options.without.split(",")]
    if ANNBATCH in entries and not store.exists():
        say(f"{store.name} written: {turn(way(build, store=store, **given))}")
    yield Case({each: way(train, entry=each, store=store, **given) for each in entries})


OPTIONS = {"cells": 30_000, "genes": 2_000, "python": "", "without": "", "n_ratios": 1}
