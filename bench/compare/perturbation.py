"""Minibatches that STATE reads: from cellfeed, and from Arc Institute's cell-load.

Each has four sets of 64 cells that share a perturbation and a cell line; each cell comes with a
control of its own file. Every file is a cell line, as cell-load asks for, with its cells in the
order of perturbations. The values are those of 2,000 genes in ``obsm["X_hvg"]``, stored as anndata
does by default or with gzip, or those of all genes in ``X``. Two fetches of cellfeed, in which
memory is new, are not counted, nor is the first minibatch of cell-load.

``--python`` names an interpreter with cell-load, PyTorch and h5py; by default this one. cell-load
reads in worker processes, of which it needs at least one: as many as there are processors. Their
processor time is not in the table, so that only cells/s can be compared; cellfeed uses threads.
"""

import os
import sys
import tempfile

from bench._harness import RATE, Case, after, figures_of, plates_of, way

SET, N_SETS, N_GENES, N_CONDITIONS = 64, 4, 2_000, 10
CONTROL = "non-targeting"


def by_cellfeed(seed, folder, element):
    from cellfeed import CellDataset, GroupedSampling, MatchedControls, open_collection
    from cellfeed.frameworks.state import StateBatch

    columns = {"perturbation": "gene", "cell_type": "cell_line", "batch": "plate"}
    collection = open_collection(folder, obs=[*columns.values()], elements=[element])
    sets = GroupedSampling(("cell_line", "gene"), SET, leftover="pad")
    dataset = CellDataset(
        collection, MatchedControls(sets, "gene", CONTROL, ["cell_line"]), N_SETS * SET, 8,
        dense=True, seed=seed, batch_transform=StateBatch(collection, **columns),
    )  # fmt: skip
    sizes = (len(each["pert_name"]) for _ in range(99) for each in dataset)
    return after(2 * dataset.fetch_size, sizes)


def by_cell_load(seed, folder, element, seconds, consecutive):
    from cell_load.data_modules import PerturbationDataModule

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(f'[datasets]\nstudy = "{folder}"\n[training]\nstudy = "train"\n')
        config.flush()
        data = PerturbationDataModule(
            config.name, batch_size=N_SETS, cell_sentence_len=SET, random_seed=seed,
            num_workers=len(os.sched_getaffinity(0)), pert_col="gene", batch_col="plate",
            cell_type_key="cell_line", control_pert=CONTROL, should_yield_control_cells=False,
            embed_key=element.partition("obsm/")[2] or None, use_consecutive_loading=consecutive,
        )  # fmt: skip
        data.setup()
    loader = data.train_dataloader()
    sizes = (len(each["pert_name"]) for _ in range(99) for each in loader)
    found = figures_of(after(N_SETS * SET, sizes), seconds)
    sizes.close()  # and its workers, which would keep this process's output open
    return {RATE: found[RATE]}  # the processor time and memory of workers are not in it


def written(plates, folder, stored):
    """Write each plate as a cell line of some perturbations, and return the folder."""
    import anndata as ad
    import numpy as np

    if folder.exists():
        return folder
    folder.mkdir()
    names = [CONTROL, *(f"gene {k}" for k in range(1, N_CONDITIONS))]
    for path in plates:
        cells = ad.read_h5ad(path)
        most = np.sort(np.argsort(-np.asarray(cells.X.sum(axis=0)).ravel())[:N_GENES])
        obs = cells.obs[["plate"]].assign(cell_line=path.stem)
        obs["gene"] = np.resize(np.repeat(names, -(-len(cells) // N_CONDITIONS)), len(cells))
        embedded = {"X_hvg": np.log1p(cells.X[:, most].toarray())}
        study = ad.AnnData(cells.X, obs.astype("category"), cells.var, obsm=embedded)
        study.write_h5ad(folder / path.name, compression=None if stored == "default" else stored)
    return folder


def cases(options):
    plates, name = plates_of(options), options.data.name
    for stored in options.stored:
        folder = written(plates, options.data.with_name(f"{name}-state-{stored}"), stored)
        for element in options.elements:
            given = {"folder": folder, "element": element}
            ways = {"cellfeed": way(by_cellfeed, **given)}
            given |= {"seconds": options.seconds, "python": options.python}
            peers = {
                "cell-load": way(by_cell_load, **given, consecutive=False),
                "cell-load, consecutive": way(by_cell_load, **given, consecutive=True),
            }
            yield Case(ways | peers, f"{element}, {stored}", against=[*peers], files=[folder])


OPTIONS = {
    "cells": 28_000, "seconds": 4.0, "cache": ["warm"], "python": sys.executable, "n_ratios": 1,
    "stored": ["default", "gzip"], "elements": ["obsm/X_hvg", "X"],
}  # fmt: skip
