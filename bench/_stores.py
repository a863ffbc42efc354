"""The same cells in every storage, written once for all benchmarks and identical in each run."""

from pathlib import Path

import anndata
import zarr

from cellfeed import preshuffle
from cellfeed.synthetic import write_tahoe_like

N_CELLS, N_PLATES = 4_096, 2
N_DENSE_GENES = 2_000

STORAGES = (
    "CSR gzip",
    "CSR lzf",
    "CSR uncompressed",
    "CSR zarr, sharded",
    "dense gzip",
    "dense contiguous",
)


class Stored:
    """Base class of benchmarks that read the stores; asv writes them once for all subclasses."""

    def setup_cache(self):
        return write_stores(Path.cwd())

    setup_cache.timeout = 600


def write_stores(root: Path) -> dict[str, Path]:
    """Write the cells to each storage; the sharded store is shuffled."""
    gzip = root / "gzip"
    plates = write_tahoe_like(gzip, n_cells=N_CELLS, n_plates=N_PLATES, seed=0)
    stores = {"CSR gzip": gzip}
    for name, compression, is_dense in (
        ("CSR lzf", "lzf", False),
        ("CSR uncompressed", None, False),
        ("dense gzip", "gzip", True),
        ("dense contiguous", None, True),
    ):
        stores[name] = root / name
        stores[name].mkdir()
        for path in plates:
            plate = anndata.read_h5ad(path)
            if is_dense:
                plate = plate[:, :N_DENSE_GENES].copy()
                plate.X = plate.X.toarray()
            plate.write_h5ad(stores[name] / path.name, compression=compression)
    # One after the other, so that chunks always lie in the same order in their shards.
    with zarr.config.set(
        {"threading.max_workers": 1, "codec_pipeline.chunk_concurrent_maximum": 1}
    ):
        stores["CSR zarr, sharded"] = preshuffle(plates, root / "shuffled.zarr", seed=0).path
    return stores
