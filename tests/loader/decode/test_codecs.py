"""Collections say how their values are compressed, whoever can decompress them."""

from typing import Any

import anndata as ad
import hdf5plugin
import numcodecs
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.sources.zarr_cells import quiet, write_cells

from cellfeed import open_collection

X = np.eye(50, 20, dtype=np.float32)

# Those of hdf5plugin are called "none" by h5py.
FILTERS: list[tuple[dict[str, Any], str]] = [
    ({}, "none"),
    ({"shuffle": True, "fletcher32": True}, "none"),
    ({"compression": "lzf"}, "lzf"),
    ({"compression": "gzip"}, "gzip 4"),
    ({"compression": "gzip", "compression_opts": 9, "shuffle": True}, "gzip 9"),
    (dict(hdf5plugin.Zstd(clevel=7)), "zstd 7"),
    (dict(hdf5plugin.Blosc(cname="lz4", clevel=3)), "blosc 3"),
    (dict(hdf5plugin.LZ4()), "lz4"),
    (dict(hdf5plugin.Bitshuffle()), "bitshuffle"),
]


@pytest.mark.parametrize(("options", "codec"), FILTERS, ids=[codec for _, codec in FILTERS])
def test_of_files(write_h5ad, replace, options, codec):
    sparse = sp.csr_matrix(X)
    for stored, name in ((X, "X"), (sparse, "X/data")):

        def edit(file, name=name):
            values = file[name][:]
            replace(file, name, values, chunks=tuple(min(n, 16) for n in values.shape), **options)

        assert open_collection(write_h5ad(stored, edit=edit)).codecs == (codec,)


SHARDS = {"chunks": (10, 20), "shards": (20, 20)}


@quiet
@pytest.mark.parametrize(
    ("zarr_format", "options", "codec"),
    [
        (2, {"compressors": numcodecs.Blosc()}, "blosc"),
        (3, {}, "zstd"),
        (3, SHARDS, "zstd, sharded"),
        (3, SHARDS | {"compressors": None}, "none, sharded"),
    ],
)
def test_of_stores(tmp_path, zarr_format, options, codec):
    path = write_cells(tmp_path / "a.zarr", X, zarr_format=zarr_format, X=options)
    assert open_collection(path).codecs == (codec,)
    options = {name: each[:1] if name in SHARDS else each for name, each in options.items()}
    arrays = dict.fromkeys(["indices", "data"], options)
    path = write_cells(tmp_path / "b.zarr", sp.csr_matrix(X), zarr_format=zarr_format, **arrays)
    assert open_collection(path).codecs == (codec,)


def test_of_layers_and_of_several_paths(tmp_path):
    for name, compression in (("a", None), ("b", "gzip")):
        adata = ad.AnnData(sp.csr_matrix(X), layers={"counts": X})
        adata.write_h5ad(tmp_path / f"{name}.h5ad", compression=compression)
    assert open_collection(tmp_path).codecs == ("none", "gzip 4")
    assert open_collection(tmp_path, elements=["layers/counts"]).codecs == ("none", "gzip 4")
