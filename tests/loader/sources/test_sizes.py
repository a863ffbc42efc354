"""Tables whose metadata state more rows, categories or bytes than there are take no memory."""

import json
import resource
import shutil
import zlib
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import psutil
import pytest
import scipy.sparse as sp
from tests.commands import limited
from tests.loader.sources.zarr_cells import quiet

from cellfeed import FormatError, open_collection

pytestmark = [pytest.mark.slow, quiet]
_MORE = 3 << 27  # bytes of memory: some for threads, and for reading a small file

COLUMNS: dict[str, Any] = {
    "number": np.arange(50.0),
    "is_t": [True, False] * 25,
    "kind": pd.Categorical(["a", "b"] * 25),
    "day": pd.Categorical([3, 5] * 25),
    "text": [f"t{k}" for k in range(50)],  # anndata makes categories of text that repeats
    "count": pd.array([1, None] * 25, dtype="Int32"),
}
ARRAYS = [
    f"{table}/{name}"
    for table in ("obs", "var")
    for name in (
        "_index",
        "number",
        "is_t",
        "kind/codes",
        "kind/categories",
        "day/categories",
        "text",
        "count/values",
        "count/mask",
    )
]


def in_turns(sizes, layouts):
    """Return each array with each size; layouts take turns, so that each comes with each size."""
    return [
        (name, size, *layouts[(k + n) % len(layouts)])
        for k, name in enumerate(ARRAYS)
        for n, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The same cells as .h5ad, and as stores of both formats of zarr."""
    folder = tmp_path_factory.mktemp("sizes")
    obs = pd.DataFrame(COLUMNS, index=[f"c{k}" for k in range(50)])
    var = obs.set_axis([f"g{k}" for k in range(50)])
    cells = ad.AnnData(sp.random(50, 50, 0.3, "csr", np.float32), obs=obs, var=var)
    paths = {"h5ad": folder / "cells.h5ad", 2: folder / "cells2.zarr", 3: folder / "cells3.zarr"}
    cells.write_h5ad(paths["h5ad"])
    for zarr_format in (2, 3):
        with ad.settings.override(zarr_write_format=zarr_format):
            cells.write_zarr(paths[zarr_format])
    return paths


def read_all(path):
    collection = open_collection(path, obs=list(COLUMNS), obs_names=True)
    assert collection.var.shape == (50, len(COLUMNS))
    assert collection.obs_names([0, 49]).tolist() == ["c0", "c49"]
    return collection.read_obs(list(COLUMNS))


@pytest.mark.parametrize("kind", ["h5ad", 2, 3])
def test_what_is_right_is_read(written, kind):
    found = read_all(written[kind])
    assert np.array_equal(found["number"].values, COLUMNS["number"])
    for name in ("kind", "text"):
        column = found[name]
        assert column.categories[column.codes].tolist() == list(COLUMNS[name])


def array_in(store: Any, name: str) -> str:
    """Return the path of an array; texts are values with a mask if pandas has a dtype for them."""
    values = f"{name}/values"
    are_there = (store / values).is_dir() if isinstance(store, Path) else values in store
    return values if are_there else name


def refuses(path):
    taken = psutil.Process().memory_info().data
    with limited(resource.RLIMIT_DATA, taken + _MORE), pytest.raises(FormatError) as raised:
        read_all(path)
    message = str(raised.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert "memory" not in message


@pytest.mark.parametrize(
    ("name", "size", "is_chunked"), in_turns([1 << 20, 1 << 31, 1 << 55], [(True,), (False,)])
)
def test_of_hdf5(written, tmp_path, name, is_chunked, size):
    path = Path(shutil.copy(written["h5ad"], tmp_path))
    with h5py.File(path, "a") as file:
        name = array_in(file, name)
        stored, attributes = file[name], dict(file[name].attrs)
        dtype = stored.dtype
        del file[name]
        options = {"chunks": (1 << 16,), "compression": "gzip"} if is_chunked else {}
        file.create_dataset(name, (size,), dtype, **options).attrs.update(attributes)
    refuses(path)


@pytest.mark.parametrize("n_bytes", [1 << 26, (1 << 31) - 1])
@pytest.mark.parametrize("name", ["obs/_index", "obs/text", "obs/kind/categories", "var/_index"])
def test_of_text_of_fixed_length(written, tmp_path, name, n_bytes):
    path = Path(shutil.copy(written["h5ad"], tmp_path))
    with h5py.File(path, "a") as file:
        name = array_in(file, name)
        shape, attributes = file[name].shape, dict(file[name].attrs)
        del file[name]
        options = {"chunks": (1,), "compression": "gzip"}
        file.create_dataset(name, shape, f"S{n_bytes}", **options).attrs.update(attributes)
    refuses(path)


@pytest.mark.parametrize(
    ("name", "size", "zarr_format", "has_one_chunk"),
    in_turns([1 << 20, 1 << 31, 1 << 62], [(2, False), (3, True), (2, True), (3, False)]),
)
def test_of_zarr(written, tmp_path, name, zarr_format, has_one_chunk, size):
    path = tmp_path / "cells.zarr"
    shutil.copytree(written[zarr_format], path)
    metadata = path / array_in(path, name) / ("zarr.json" if zarr_format == 3 else ".zarray")
    stated = json.loads(metadata.read_text())
    stated["shape"] = [size]
    if has_one_chunk and zarr_format == 3:
        stated["chunk_grid"]["configuration"]["chunk_shape"] = [size]
    elif has_one_chunk:
        stated["chunks"] = [size]
    metadata.write_text(json.dumps(stated))
    refuses(path)


TEXTS = ["obs/_index", "obs/text", "obs/kind/categories", "var/_index"]


@pytest.mark.parametrize("bit", [20, 28, 31])
@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize("name", TEXTS)
def test_of_the_length_of_a_text_in_hdf5(written, tmp_path, name, compression, bit):
    path = Path(shutil.copy(written["h5ad"], tmp_path))
    with h5py.File(path, "a") as file:
        name = array_in(file, name)
        texts, attributes = file[name][:], dict(file[name].attrs)
        del file[name]
        options = {"chunks": (2,), "compression": "gzip"} if compression else {}
        stored = file.create_dataset(name, data=texts, dtype=h5py.string_dtype(), **options)
        stored.attrs.update(attributes)
        if compression:
            references = bytearray(zlib.decompress(stored.id.read_direct_chunk((0,))[1]))
            references[16 + bit // 8] ^= 1 << bit % 8
            stored.id.write_direct_chunk((0,), zlib.compress(bytes(references)))
        else:
            file.flush()
            offset = stored.id.get_offset() + 16 + bit // 8
    if not compression:
        with path.open("r+b") as opened:
            opened.seek(offset)
            byte = opened.read(1)[0]
            opened.seek(offset)
            opened.write(bytes([byte ^ 1 << bit % 8]))
    refuses(path)


@pytest.mark.parametrize("size", [1 << 31, 1 << 40])
@pytest.mark.parametrize("has_one_chunk", [False, True])
@pytest.mark.parametrize("name", ["obs/kind/categories", "var/_index"])
def test_of_zarr_on_a_web_server(written, tmp_path, url_of, name, has_one_chunk, size):
    path = tmp_path / "cells.zarr"
    shutil.copytree(written[3], path)
    name = array_in(path, name)
    for metadata, within in ((path / name / "zarr.json", None), (path / "zarr.json", name)):
        content = json.loads(metadata.read_text())
        stated = content["consolidated_metadata"]["metadata"][within] if within else content
        stated["shape"] = [size]
        if has_one_chunk:
            stated["chunk_grid"]["configuration"]["chunk_shape"] = [size]
        metadata.write_text(json.dumps(content))
    refuses(url_of(path))
