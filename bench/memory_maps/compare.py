"""Compare cellfeed with HuggingFace's and BioNeMo's own loading of uncompressed cells, in turns.

Run from the root of the repository, as ``python -m bench.memory_maps.compare PLATES SCRATCH``.
Takes a folder of .h5ad plates, and writes their cells once as a HuggingFace dataset and once as a
folder of BioNeMo SCDL. Each loader delivers minibatches of 64 cells for one epoch, or some seconds
of it, in its own process, one after the other and round after round: cold, with the files dropped
from the page cache before, or warm, read once before. Compare ratios, not absolute figures.
"""

import argparse
from functools import partial
from pathlib import Path
from textwrap import dedent

from bench._turns import RATES, answer_of, drop, in_turns, warm

LOADERS = {
    # Random single cells, as with a plain DataLoader.
    "HuggingFace, DataLoader": """
        dataset = datasets.load_from_disk(arrow).with_format("numpy")
        sampler = Random(len(dataset), 64)
        loader = DataLoader(dataset, batch_size=None, sampler=sampler, collate_fn=csr)
    """,
    # Blocks of 16 cells in fetches of 64 minibatches, as with scDataset.
    "HuggingFace, fetches": """
        dataset = datasets.load_from_disk(arrow).with_format("numpy")
        loader = CellDataset(dataset, BlockShuffling(16), batch_size=64, fetch_factor=64,
                             fetch_transform=csr)
    """,
    "cellfeed, Arrow, block 1": "loader = cells(arrow, 1)",
    "cellfeed, Arrow, block 16": "loader = cells(arrow, 16)",
    "SCDL, DataLoader": """
        dataset = SingleCellMemMapDataset(scdl)
        loader = DataLoader(dataset, batch_size=64, shuffle=True,
                            collate_fn=collate_sparse_matrix_batch)
    """,
    "cellfeed, SCDL, block 1": "loader = cells(scdl, 1)",
    "cellfeed, SCDL, block 16": "loader = cells(scdl, 16)",
    "cellfeed, h5ad, block 16": "loader = cells(plates, 16)",
}
RUN = """
import numpy as np, scipy.sparse as sp
import datasets
from torch.utils.data import DataLoader
from bionemo.scdl.io.single_cell_memmap_dataset import SingleCellMemMapDataset
from bionemo.scdl.util.torch_dataloader_utils import collate_sparse_matrix_batch
from cellfeed import BlockShuffling, CellDataset, HuggingFaceSource, open_collection

arrow, scdl, plates, n_vars, seconds, seed = sys.argv[1:]
n_vars = int(n_vars)

class Random:
    def __init__(self, n, size):
        self.rows = np.random.default_rng(int(seed)).permutation(n)[: n // size * size]
        self.rows = self.rows.reshape(-1, size)
    def __iter__(self):
        return iter(self.rows)
    def __len__(self):
        return len(self.rows)

def csr(rows):
    indptr = np.cumsum([0, *map(len, rows["genes"])])
    parts = np.concatenate(rows["expressions"]), np.concatenate(rows["genes"]), indptr
    return sp.csr_array(parts, shape=(len(indptr) - 1, n_vars))

def cells(where, block):
    given = HuggingFaceSource(where, n_vars=n_vars) if where == arrow else where
    return CellDataset(open_collection(given), BlockShuffling(block), batch_size=64,
                       fetch_factor=64, seed=int(seed))

{opened}
report((64 for _ in loader), float(seconds))
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plates", type=Path)
    parser.add_argument("scratch", type=Path, help="where the copies are, or are written")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args()
    arrow, scdl, n_vars = written(options.plates, options.scratch)
    turns = {
        name: partial(
            answer_of, code_of(opened), arrow, scdl, options.plates, n_vars, options.seconds
        )
        for name, opened in LOADERS.items()
    }
    folders = [arrow, scdl, options.plates]
    for cache, prepare in (("warm", warm), ("cold", drop)):
        in_turns(
            turns, options.rounds, against=list(turns)[:1], title=f"{cache}: ",
            before=partial(prepare, folders),
        )  # fmt: skip


def written(plates, scratch):
    """Return the folders of both copies, writing those that are missing."""
    import anndata as ad  # noqa: PLC0415 - nothing of this is needed twice
    import datasets  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    from bionemo.scdl.io.single_cell_memmap_dataset import (  # noqa: PLC0415
        SingleCellMemMapDataset,
    )

    paths = sorted(plates.glob("*.h5ad"))
    arrow, scdl = scratch / "arrow", scratch / "scdl"
    n_vars = ad.read_h5ad(paths[0], backed="r").n_vars
    if not arrow.exists():
        joined = ad.concat([ad.read_h5ad(path) for path in paths], index_unique="-")
        joined.write_h5ad(scratch / "joined.h5ad")
        borders = joined.X.indptr[1:-1]
        columns = {
            "genes": np.split(joined.X.indices, borders),
            "expressions": np.split(joined.X.data, borders),
        }
        where = str(scdl), str(scratch / "joined.h5ad")
        SingleCellMemMapDataset(*where, use_X_not_raw=True).save()
        datasets.Dataset.from_dict(columns).save_to_disk(arrow)
        (scratch / "joined.h5ad").unlink()
    return arrow, scdl, n_vars


def code_of(opened):
    return RATES + RUN.replace("{opened}", dedent(opened))


if __name__ == "__main__":
    main()
