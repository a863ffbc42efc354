"""Collections say how their values are compressed, whoever can decompress them."""

import warnings
from typing import Any

import anndata as ad
import hdf5plugin
import numpy as np
import pytest
import scipy.sparse as sp
import zarr

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


@pytest.mark.parametrize(("zarr_format", "codec"), [(2, "blosc"), (3, "zstd")])
@pytest.mark.parametrize("kind", [np.asarray, sp.csr_matrix])
def test_of_stores(tmp_path, kind, zarr_format, codec):
    with ad.settings.override(zarr_write_format=zarr_format), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that format 2 is an old one
        ad.AnnData(kind(X)).write_zarr(tmp_path / "a.zarr")
    array = zarr.open_array(tmp_path / "a.zarr", path="X" if kind is np.asarray else "X/data")
    expected = codec if array.shards is None else f"{codec}, sharded"  # from anndata 0.13
    assert open_collection(tmp_path / "a.zarr").codecs == (expected,)


@pytest.mark.parametrize(
    ("compressors", "codec"), [("auto", "zstd, sharded"), (None, "none, sharded")]
)
def test_of_shards(tmp_path, compressors, codec):
    options: dict[str, Any] = {"chunks": (10, 20), "shards": (20, 20), "compressors": compressors}
    with ad.settings.override(zarr_write_format=3), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that shards will be the default
        ad.AnnData(X).write_zarr(tmp_path / "a.zarr")
        group = zarr.open_group(tmp_path / "a.zarr")
        attributes = dict(group["X"].attrs)
        group.create_array("X", data=X, overwrite=True, attributes=attributes, **options)
        zarr.consolidate_metadata(tmp_path / "a.zarr")
    assert open_collection(tmp_path / "a.zarr").codecs == (codec,)


def test_of_layers_and_of_several_paths(tmp_path):
    for name, compression in (("a", None), ("b", "gzip")):
        adata = ad.AnnData(sp.csr_matrix(X), layers={"counts": X})
        adata.write_h5ad(tmp_path / f"{name}.h5ad", compression=compression)
    assert open_collection(tmp_path).codecs == ("none", "gzip 4")
    assert open_collection(tmp_path, elements=["layers/counts"]).codecs == ("none", "gzip 4")
