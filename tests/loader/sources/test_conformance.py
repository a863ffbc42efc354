"""Files with whatever HDF5 can do to a matrix pass the suite for sources."""

import importlib
import itertools
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import anndata as ad
import h5py
import hdf5plugin
import numpy as np
import pytest
from anndata.io import write_elem
from h5py import h5d, h5p
from hypothesis import strategies as st
from tests.loader.sources.suites import Suite

from cellfeed.testing import StoredCase

FILTERS: dict[str, Mapping[str, Any]] = {
    "none": {},
    "shuffle": {"shuffle": True},
    "gzip": {"compression": "gzip"},
    "gzip, shuffle": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffle": {"compression": "lzf", "shuffle": True},
    "zstd": hdf5plugin.Zstd(),
    "zstd, shuffle": {**hdf5plugin.Zstd(clevel=9), "shuffle": True},
    "blosc blosclz": hdf5plugin.Blosc(cname="blosclz", shuffle=hdf5plugin.Blosc.SHUFFLE),
    "blosc lz4": hdf5plugin.Blosc(cname="lz4", shuffle=hdf5plugin.Blosc.NOSHUFFLE),
    "blosc lz4hc": hdf5plugin.Blosc(cname="lz4hc", shuffle=hdf5plugin.Blosc.BITSHUFFLE),
    "blosc zlib": hdf5plugin.Blosc(cname="zlib", shuffle=hdf5plugin.Blosc.SHUFFLE),
    "blosc zstd": hdf5plugin.Blosc(cname="zstd", shuffle=hdf5plugin.Blosc.BITSHUFFLE),
}
# What only HDF5 itself decodes.
OTHER_FILTERS: dict[str, Mapping[str, Any]] = {
    "fletcher32": {"fletcher32": True},
    "gzip, fletcher32": {"compression": "gzip", "fletcher32": True},
    "blosc snappy": hdf5plugin.Blosc(cname="snappy"),
    "blosc2": hdf5plugin.Blosc2(),
    "lz4": hdf5plugin.LZ4(),
    "bitshuffle": hdf5plugin.Bitshuffle(),
    "bzip2": hdf5plugin.BZip2(),
}
INTEGERS_ONLY = {"scaleoffset": {"scaleoffset": 0}}
ALL_FILTERS = FILTERS | OTHER_FILTERS | INTEGERS_ONLY

# Which steps are left out in every second chunk, as HDF5 does where they bring nothing.
Left = Literal["none", "compression", "shuffle", "both"]


@dataclass(frozen=True, kw_only=True)
class Hdf5Storage:
    """How arrays lie in a file; ``chunks`` are those of X, or of the indices and the data."""

    layout: Literal["chunked", "contiguous", "compact"] = "chunked"
    filter: str = "gzip"
    chunks: tuple[int, int] = (7, 4)
    left_out: Left = "none"
    unlimited: tuple[bool, bool] = (False, False)
    early: bool = False
    libver: Literal["earliest", "latest"] = "earliest"
    userblock: int = 0
    fill: int = 0
    sparse: bool = False  # chunks that hold nothing but the fill value are not written


def storages(dtype: np.dtype[Any]) -> st.SearchStrategy[Hdf5Storage]:
    filters = [*FILTERS, *FILTERS, *OTHER_FILTERS]
    filters += list(INTEGERS_ONLY) if dtype.kind in "iu" else []
    return st.builds(
        Hdf5Storage,
        layout=st.sampled_from(["chunked"] * 8 + ["contiguous"] * 2 + ["compact"]),
        filter=st.sampled_from(filters),
        chunks=st.tuples(st.integers(1, 60), st.integers(1, 60)),
        left_out=st.sampled_from(["none", "none", "compression", "shuffle", "both"]),
        unlimited=st.tuples(st.booleans(), st.booleans()),
        early=st.booleans(),
        libver=st.sampled_from(["earliest", "latest"]),
        userblock=st.sampled_from([0] * 5 + [512]),
        fill=st.sampled_from([0, 0, 1]),
        sparse=st.booleans(),
    )


class TestH5ad(Suite):
    suffix = ".h5ad"
    dtypes = (*Suite.dtypes, "|b1", "<f2", ">f4", ">i2", ">u8")
    index_dtypes = ("<i4", "<i8", "|u1", "|i1", "<u2", "<u4", "<u8", ">i4")
    elements = ("X", "X", "layers/counts", "raw/X")
    max_examples = 60

    def storages(self, layout, dtype):
        return storages(dtype)

    def test_epochs(self, write):
        """Fewer cases, since what an epoch adds to rows is the same for all files."""
        self.max_examples = min(self.max_examples, 10)
        super().test_epochs(write)

    def is_decoded_here(self, case: StoredCase) -> bool:
        storage = case.storage
        numbers = [case.dtype] + [case.index_dtype] * (case.layout == "csr")
        return (
            all(np.dtype(name).isnative for name in numbers)
            and (case.layout == "dense" or case.dtype != "<f2")
            and case.row_lengths.sum() > 0
            and storage.layout != "compact"
            and not (storage.layout == "chunked" and storage.filter not in FILTERS)
            and not is_hard(case)
        )

    def stored(self, path, case):
        return write_h5ad(path, case)


def write_h5ad(path, case):
    """Write a case as anndata would, but for how the matrix lies in the file."""
    storage = case.storage
    options = {"userblock_size": storage.userblock} if storage.userblock else {}
    with (
        h5py.File(path, "w", libver=storage.libver, **options) as file,
        ad.settings.override(allow_write_nullable_strings=True),
    ):
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        write_elem(file, "obs", case.obs)
        write_elem(file, "var", case.var)
        if case.element == "raw/X":
            write_elem(file.require_group("raw"), "var", case.var)
        arrays = {case.element: case.dense}
        if case.layout == "csr":
            arrays = {f"{case.element}/{name}": getattr(case, name) for name in ("indices", "data")}
            file[f"{case.element}/indptr"] = case.indptr
            encoding = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0"}
            shape = {"shape": [case.n_rows, case.n_vars]}
        else:
            encoding, shape = {"encoding-type": "array", "encoding-version": "0.2.0"}, {}
        for k, (name, values) in enumerate(arrays.items()):
            rows = storage.chunks[k]
            chunks = (rows,) if values.ndim == 1 else storage.chunks
            create(file, name, values, chunks, storage)
        file[case.element].attrs.update(encoding | shape)
    with h5py.File(path) as file:  # the oracle is right
        for name, values in arrays.items():
            np.testing.assert_array_equal(file[name][...], values)
    return path


def create(file, name, values, chunks, storage):
    if storage.layout == "chunked" and values.size:
        create_chunked(file, name, values, chunks, storage)
        return
    created = h5p.create(h5p.DATASET_CREATE)
    if storage.layout == "compact" and values.size:
        created.set_layout(h5d.COMPACT)
    file.create_dataset(name, data=values, dcpl=created)


def create_chunked(file, name, values, chunks, storage):
    options = dict(ALL_FILTERS[storage.filter])
    free = free_dimensions(values.shape, chunks, storage)
    created = h5p.create(h5p.DATASET_CREATE)
    # HDF5 does not note what was left out in a chunk that has its place already.
    if storage.early and not storage.sparse and storage.left_out == "none":
        created.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    dataset = file.create_dataset(
        name,
        values.shape,
        values.dtype,
        chunks=chunks,
        maxshape=[None if f else n for f, n in zip(free, values.shape, strict=True)],
        fillvalue=None if values.dtype.kind == "b" else storage.fill,
        dcpl=created,
        **options,
    )
    fill = 0 if values.dtype.kind == "b" else storage.fill
    # What CSR stores is not zero, so that a chunk that is not there was lost.
    may_be_left_out = storage.sparse and (values.ndim > 1 or fill)
    for k, place in enumerate(places(values.shape, chunks)):
        part = values[place]
        if may_be_left_out and np.array_equal(part, np.full_like(part, fill)):
            continue
        if storage.left_out != "none" and storage.filter in SKIPPING and k % 2:
            whole = np.zeros(chunks, values.dtype)
            whole[tuple(slice(n) for n in part.shape)] = part
            corner = tuple(each.start for each in place)
            mask, stored = without_steps(whole, storage.filter, storage.left_out)
            dataset.id.write_direct_chunk(corner, stored, mask)
        else:
            dataset[place] = part


def free_dimensions(shape, chunks, storage):
    """Return which dimensions may grow: HDF5 wants those to that are smaller than a chunk."""
    return [c > n or u for n, c, u in zip(shape, chunks, storage.unlimited, strict=False)]


def places(shape, chunks):
    starts = [range(0, n, c) for n, c in zip(shape, chunks, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + c, n)) for a, c, n in zip(corner, chunks, shape, strict=True))


def is_hard(case):
    """Return whether a case has holes that are not zero, or chunks whose place HDF5 gets wrong."""
    storage = case.storage
    if storage.layout != "chunked":
        return False
    if case.layout == "csr":
        return any(
            has_holes(getattr(case, name), (rows,), storage)
            for name, rows in zip(("indices", "data"), storage.chunks, strict=True)
        )
    down, across = free_dimensions((case.n_rows, case.n_vars), storage.chunks, storage)
    return (across and not down) or has_holes(case.dense, storage.chunks, storage)


def has_holes(values, chunks, storage):
    """Return whether a chunk is not written that holds something else than zeros."""
    if not storage.sparse or not storage.fill or values.dtype == bool:
        return False
    return any((values[place] == storage.fill).all() for place in places(values.shape, chunks))


SKIPPING = {"gzip", "gzip, shuffle", "shuffle", "lzf", "zstd", "blosc lz4"}


def without_steps(values, filter_, left_out):
    """Return the mask and the bytes of a chunk of which some filters are left out."""
    content = values.tobytes()
    if filter_ == "gzip, shuffle" and left_out == "compression":
        apart = np.frombuffer(content, np.uint8).reshape(-1, values.itemsize).T
        return 2, apart.tobytes()
    if filter_.startswith("gzip") and left_out == "shuffle":
        return int(filter_ == "gzip, shuffle"), zlib.compress(content)
    return 3 if filter_ == "gzip, shuffle" else 1, content


def test_without_pytest_or_hypothesis_the_suite_tells_how_to_install_them(monkeypatch):
    monkeypatch.delitem(sys.modules, "cellfeed.testing")
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ImportError, match=r"two more packages: pip install pytest hypothesis$"):
        importlib.import_module("cellfeed.testing")
