"""Arrays of three and more dimensions in h5ad and zarr pass the suite for sources."""

import itertools
from dataclasses import dataclass
from typing import Any, Literal

import anndata as ad
import h5py
import numpy as np
import pytest
import zarr
from anndata.io import write_elem
from hypothesis import strategies as st
from tests.loader.zarr_stores import written_at_once

from cellfeed.testing import SourceConformance, StoredCase

pytestmark = pytest.mark.filterwarnings(
    # What zarr says when these stores are written, also where workers are spawned.
    "ignore:.*does not have a Zarr V3 specification",
    "ignore:zarr v3 autosharding will be the default",
    "ignore:Consolidated metadata is currently not part",
    "ignore:Writing zarr v2 data will no longer be the default",
)


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


class TestImages(SourceConformance):
    layouts = ("dense",)
    dtypes = ("<f4", "|u1", ">i2", "|b1")
    elements = ("layers/images",)
    further_shapes = ((3,), (2, 2), (1,))
    max_examples = 20

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

    @pytest.fixture
    def write(self, tmp_path):
        numbers = itertools.count()

        def write(case):
            path = tmp_path / f"{next(numbers):05}.{case.storage.format[:4]}"
            if case.storage.format == "h5ad":
                with h5py.File(path, "w") as file:
                    write_case(file, case)
            else:
                zarr_format: Any = int(case.storage.format[-1])
                with written_at_once(path) as memory:
                    write_case(zarr.create_group(memory, zarr_format=zarr_format), case)
            return path

        return write


def write_case(root, case):
    storage, values = case.storage, case.dense
    with ad.settings.override(allow_write_nullable_strings=True):
        write_elem(root, "obs", case.obs)
        write_elem(root, "var", case.var)
    options: dict[str, Any] = {}
    if values.size:
        options["chunks"] = storage.chunks(values.shape)
        if storage.format != "h5ad":
            options["compressors"] = "auto" if storage.is_compressed else None
            if storage.is_sharded and storage.format == "zarr v3":
                options["shards"] = tuple(2 * n for n in options["chunks"])
        elif storage.is_compressed:
            options["compression"] = "gzip"
    if storage.format == "h5ad":
        if options.get("chunks"):
            options["maxshape"] = (None, *values.shape[1:])
        stored = root.create_dataset(case.element, data=values, **options)
    else:
        values = values.astype(values.dtype.newbyteorder("="))
        stored = root.create_array(case.element, data=values, **options)
    stored.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
