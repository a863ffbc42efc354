"""An epoch of the default SCVI: minibatches from files, from memory, and the same one each time.

    python -m bench.scvi.compare FOLDER [CELLS] [ROUNDS]

Each entry trains in a process of its own, in turns, on the same cells: a first epoch, with which
all is compiled and in the page cache, and a second one, which counts. Where the same minibatch
comes again and again, there is the time of the model alone.
"""

import logging
import resource
import sys
import time
import warnings
from pathlib import Path
from statistics import median

import anndata as ad
import scvi
from anndata.experimental import AnnCollection
from bench._turns import answer_of, say, spread
from lightning.pytorch import Callback, LightningDataModule
from scvi.dataloaders import CollectionAdapter
from scvi.model import SCVI
from torch.utils.data import DataLoader

from cellfeed.frameworks.scvi import ScviDataModule
from cellfeed.synthetic import write_tahoe_like

N_GENES, BATCH_SIZE = 2_000, 128
KEYS = {"layer": "counts", "batch_key": "plate"}
ENTRIES = ("the same minibatch", "cellfeed", "in memory", "AnnCollection")
RUN = """
import json, sys
from bench.scvi.compare import train
print(json.dumps(train(*sys.argv[1:])))
"""


class Times(Callback):
    def __init__(self):
        self.epochs = []

    def on_train_epoch_start(self, *_):
        self.began, self.in_steps = time.perf_counter(), 0.0

    def on_train_batch_start(self, *_):
        self.step_began = time.perf_counter()

    def on_train_batch_end(self, *_):
        self.in_steps += time.perf_counter() - self.step_began

    def on_train_epoch_end(self, *_):
        self.epochs.append((time.perf_counter() - self.began, self.in_steps))


class Same(LightningDataModule):
    def __init__(self, data):
        super().__init__()
        self.minibatches = [next(iter(data.train_dataloader()))] * (data.n_obs // BATCH_SIZE)

    def train_dataloader(self):
        return DataLoader(self.minibatches, batch_size=None)


def write(folder, n_cells):
    """Write counts as a layer, too: scvi-tools reads nothing else of an AnnCollection."""
    for path in write_tahoe_like(folder, n_cells=n_cells, n_genes=N_GENES):
        plate = ad.read_h5ad(path)
        plate.layers["counts"] = plate.X.copy()
        plate.write_h5ad(path, compression="gzip")


def with_cells(entry, paths):
    """Return an AnnData, in memory or of files."""
    if entry == "in memory":
        return ad.concat([ad.read_h5ad(path) for path in paths], index_unique="-")
    backed = [ad.read_h5ad(path, backed="r") for path in paths]
    return CollectionAdapter(AnnCollection(backed, join_vars="inner", join_obs="inner"))


def train(entry, folder):
    """Train two epochs, and return figures of the second."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    scvi.settings.verbosity, scvi.settings.seed = logging.ERROR, 0
    paths = sorted(Path(folder).glob("*.h5ad"))
    if entry in ("in memory", "AnnCollection"):
        cells, data = with_cells(entry, paths), None
        SCVI.setup_anndata(cells, **KEYS)
        model, n_cells = SCVI(cells), cells.n_obs
        options = {"train_size": 1.0, "batch_size": BATCH_SIZE}
    else:
        data = ScviDataModule(paths, **KEYS, batch_size=BATCH_SIZE)
        model, n_cells = SCVI(registry=data.registry), data.n_obs
        options = {"datamodule": data if entry == "cellfeed" else Same(data)}
    times, own = Times(), {"accelerator": "cpu", "enable_progress_bar": False}
    model.train(2, callbacks=[times], **own, **options)
    seconds, in_steps = times.epochs[-1]
    waited = {"% waited": 100 * data.statistics().waiting_share} if entry == "cellfeed" else {}
    return {
        "cells/s": n_cells / seconds,
        "% in steps": 100 * in_steps / seconds,
        "MiB at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    } | waited


def main(folder, n_cells=30_000, rounds=3):
    if not Path(folder).exists():
        write(folder, int(n_cells))
    found = {entry: [] for entry in ENTRIES}
    for _ in range(int(rounds)):
        for entry in ENTRIES:
            found[entry].append(answer_of(RUN, entry, folder))
    for entry, runs in found.items():
        figures = [f"{spread([run[unit] for run in runs])} {unit}" for unit in runs[0]]
        pairs = zip(runs, found[ENTRIES[0]], strict=True)
        ratio = median(run["cells/s"] / alone["cells/s"] for run, alone in pairs)
        say(f"{entry}: {', '.join(figures)}; {ratio:.2f} times the cells/s of {ENTRIES[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
