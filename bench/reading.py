"""Reading minibatches from a small collection that the page cache holds."""

from pathlib import Path

import anndata

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.synthetic import write_tahoe_like

N_CELLS, N_GENES, N_PLATES = 8_192, 1_000, 4
BATCH_SIZE, FETCH_FACTOR = 64, 16


class SmallCollection:
    """The same cells as CSR and as dense files, written once for all benchmarks."""

    def setup_cache(self):
        sparse, dense = Path("csr").resolve(), Path("dense").resolve()
        dense.mkdir()
        paths = write_tahoe_like(
            sparse, n_cells=N_CELLS, n_genes=N_GENES, n_plates=N_PLATES, n_drugs=8, seed=0
        )
        for path in paths:
            plate = anndata.read_h5ad(path)
            plate.X = plate.X.toarray()
            plate.write_h5ad(dense / path.name)
        return {"csr": sparse, "dense": dense}

    def setup(self, folders, layout, block_size):
        collection = open_collection(folders[layout], obs=["plate"])
        self.dataset = CellDataset(
            collection,
            BlockShuffling(block_size=block_size),
            batch_size=BATCH_SIZE,
            fetch_factor=FETCH_FACTOR,
            seed=0,
        )


class OneFetch(SmallCollection):
    """Open an epoch, read one fetch and take a minibatch from it."""

    params = (["csr", "dense"], [1, 16, 256])
    param_names = ("layout", "block_size")

    def time_first_minibatch(self, *_):
        self.dataset.set_epoch(0)
        next(iter(self.dataset))

    def peakmem_first_minibatch(self, *_):
        self.time_first_minibatch()


class Epoch(SmallCollection):
    """Deliver every minibatch of an epoch."""

    params = (["csr", "dense"], [16])
    param_names = ("layout", "block_size")

    def time_all_minibatches(self, *_):
        self.dataset.set_epoch(0)
        for _ in self.dataset:
            pass

    def peakmem_all_minibatches(self, *_):
        self.time_all_minibatches()
