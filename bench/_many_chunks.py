"""CSR files with many rows and chunks but almost no data, so that they take little disk space."""

import os
import time
from pathlib import Path

import h5py
import numpy as np

CHUNK_ELEMENTS = 4
_LONG_AGO = 3600  # seconds; tables of a file that has just changed are not cached


def write_many_chunks(path: Path, *, n_cells: int, n_chunks: int) -> Path:
    """Write a CSR matrix of three genes, with given numbers of chunks of values and of indices."""
    n_elements = CHUNK_ELEMENTS * n_chunks
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for name, n_rows in (("obs", n_cells), ("var", 3)):
            table = file.create_group(name)
            table.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0"})
            table.attrs.update({"_index": "_index", "column-order": np.empty(0, "S1")})
            # The names of arrays that are zero where nothing is written.
            index = table.create_dataset("_index", (n_rows,), "i4", chunks=(n_rows,))
            index.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        X.attrs["shape"] = (n_cells, 3)
        pointer = np.linspace(0, n_elements, n_cells + 1).astype(np.int64)
        chunk = (min(100_000, pointer.size),)
        X.create_dataset("indptr", data=pointer, chunks=chunk, compression="gzip")
        for name, dtype in (("indices", "i4"), ("data", "f4")):
            X.create_dataset(name, data=np.ones(n_elements, dtype), chunks=(CHUNK_ELEMENTS,))
    then = time.time() - _LONG_AGO
    os.utime(path, (then, then))
    return path
