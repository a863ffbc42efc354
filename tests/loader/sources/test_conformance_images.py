"""Arrays of three and more dimensions in h5ad and zarr pass the suite for sources."""

from dataclasses import dataclass
from typing import Any, Literal

import anndata as ad
import h5py
import numpy as np
from anndata.io import write_elem
from hypothesis import strategies as st
from tests.loader.sources.suites import Suite
from tests.loader.sources.zarr_cells import quiet, write_cells

from cellfeed.testing import StoredCase

pytestmark = quiet


@dataclass(frozen=True)
class Storage:
    """How an array lies in a file; None for ``rows`` is one piece, where there are such."""

    format: Literal["h5ad", "zarr v2", "zarr v3"]
    rows: int | None
    has_whole_rows: bool
    is_compressed: bool
    is_sharded: bool

    def chunks(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        rows = 5 if self.rows is None else self.rows
        if self.rows is None and self.format == "h5ad" and not self.is_compressed:
            return None
        return rows, *(shape[1:] if self.has_whole_rows else (-(-n // 2) for n in shape[1:]))


class TestImages(Suite):
    layouts = ("dense",)
    dtypes = ("<f4", "|u1", ">i2", "|b1")
    elements = ("layers/images",)
    further_shapes = ((3,), (2, 2), (1,))
    max_examples = 12

    def storages(self, layout, dtype):
        return st.builds(
            Storage,
            st.sampled_from(["h5ad", "h5ad", "zarr v2", "zarr v3"]),
            st.none() | st.integers(1, 40),
            st.booleans(),
            st.booleans(),
            st.booleans(),
        )

    def is_decoded_here(self, case: StoredCase) -> bool | None:
        shape, is_native = case.shape, np.dtype(case.dtype).isnative
        if 0 in shape or (case.storage.format != "h5ad" and not is_native):
            return None  # zarr v3 has no such dtypes
        chunks = case.storage.chunks(shape)
        return is_native and (chunks is None or chunks[1:] == shape[1:])

    def stored(self, path, case):
        storage, values = case.storage, case.dense
        path = path.with_suffix(f".{storage.format[:4]}")
        options: dict[str, Any] = {"chunks": storage.chunks(values.shape)} if values.size else {}
        if storage.format == "h5ad":
            if storage.is_compressed and values.size:
                options["compression"] = "gzip"
            if options.get("chunks"):
                options["maxshape"] = (None, *values.shape[1:])
            nullable = ad.settings.override(allow_write_nullable_strings=True)
            with h5py.File(path, "w") as file, nullable:
                write_elem(file, "obs", case.obs)
                write_elem(file, "var", case.var)
                stored = file.create_dataset(case.element, data=values, **options)
                stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
            return path
        if values.size:
            options["compressors"] = "auto" if storage.is_compressed else None
            if storage.is_sharded and storage.format == "zarr v3":
                options["shards"] = tuple(2 * n for n in options["chunks"])
        values = values.astype(values.dtype.newbyteorder("="))
        tables = {"element": case.element, "obs": case.obs, "var": case.var}
        return write_cells(path, values, zarr_format=int(storage.format[-1]), X=options, **tables)
