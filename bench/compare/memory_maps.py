"""cellfeed, and HuggingFace's and BioNeMo's own loading of uncompressed cells.

The cells of ``--data`` are written once, as a HuggingFace dataset and as a folder of BioNeMo SCDL.
Each loader delivers minibatches of 64 cells for one epoch, or some seconds of it.
"""

import anndata as ad
import datasets
import numpy as np
import scipy.sparse as sp
from bench._harness import Case, plates_of, way
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from cellfeed import BlockShuffling, CellDataset, HuggingFaceSource, open_collection


def csr_of(rows, n_vars):
    indptr = np.cumsum([0, *map(len, rows["genes"])])
    parts = np.concatenate(rows["expressions"]), np.concatenate(rows["genes"]), indptr
    return sp.csr_array(parts, shape=(len(indptr) - 1, n_vars))


def huggingface(seed, path, n_vars):
    """Read random single cells, as with a plain DataLoader."""
    dataset = datasets.load_from_disk(path).with_format("numpy")
    sampler = BatchSampler(RandomSampler(dataset), 64, drop_last=True)
    loader = DataLoader(
        dataset, batch_size=None, sampler=sampler, collate_fn=lambda rows: csr_of(rows, n_vars)
    )
    return (minibatch.shape[0] for minibatch in loader)


def huggingface_fetches(seed, path, n_vars):
    """Read blocks of 16 cells in fetches of 64 minibatches, as with scDataset."""
    dataset = datasets.load_from_disk(path).with_format("numpy")
    loader = CellDataset(
        dataset, BlockShuffling(16), batch_size=64, fetch_factor=64, seed=seed,
        fetch_transform=lambda rows: csr_of(rows, n_vars),
    )  # fmt: skip
    return (64 for _ in loader)


def scdl(seed, path):
    dataset = SingleCellMemMapDataset(path)
    return (64 for _ in DataLoader(dataset, batch_size=64, shuffle=True,
                                   collate_fn=collate_sparse_matrix_batch))  # fmt: skip


def cellfeed(seed, path, block, n_vars=None):
    source = path if n_vars is None else HuggingFaceSource(path, n_vars=n_vars)
    strategy = BlockShuffling(block)
    return map(len, CellDataset(open_collection(source), strategy, 64, fetch_factor=64, seed=seed))


def cases(options):
    paths = plates_of(options)
    arrow, folder = options.data / "arrow", options.data / "scdl"
    n_vars = ad.read_h5ad(paths[0], backed="r").n_vars
    if not arrow.exists():
        write(paths, arrow, folder)
    genes = {"path": arrow, "n_vars": n_vars}
    ways = {
        "HuggingFace, DataLoader": way(huggingface, **genes),
        "HuggingFace, fetches": way(huggingface_fetches, **genes),
        "cellfeed, Arrow, block 1": way(cellfeed, block=1, **genes),
        "cellfeed, Arrow, block 16": way(cellfeed, block=16, **genes),
        "SCDL, DataLoader": way(scdl, path=folder),
        "cellfeed, SCDL, block 1": way(cellfeed, path=folder, block=1),
        "cellfeed, SCDL, block 16": way(cellfeed, path=folder, block=16),
        "cellfeed, h5ad, block 16": way(cellfeed, path=options.data, block=16),
    }
    yield Case(ways, files=[options.data])


def write(paths, arrow, folder):
    """Write both copies of the cells."""
    joined = ad.concat([ad.read_h5ad(path) for path in paths], index_unique="-")
    borders, file = joined.X.indptr[1:-1], arrow.with_name("joined")
    columns = {
        "genes": np.split(joined.X.indices, borders),
        "expressions": np.split(joined.X.data, borders),
    }
    joined.write_h5ad(file)
    SingleCellMemMapDataset(str(folder), str(file), use_X_not_raw=True).save()
    datasets.Dataset.from_dict(columns).save_to_disk(arrow)
    file.unlink()


OPTIONS = {"cells": 28_000, "seconds": 6.0, "cache": ["warm", "cold"]}
