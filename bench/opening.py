"""Open a file of many cells and chunks, the first time and again, up to the first rows."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import h5py
import numpy as np

from bench._profile import _Measured, parameters
from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed.synthetic import write_tahoe_like

CELLS = parameters(quick=[3_000_000], full=[300_000])
CHUNKS = parameters(quick=[100_000], full=[1_000_000])

# In its own process, which has opened another file before, so that only this file is new to it.
PRIVATE_BYTES = """
import re, sys
from pathlib import Path
from cellfeed import open_collection

def opened(path):
    collection = open_collection(path)
    collection.load_tables()
    return collection

def private_bytes():
    told = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(re.search(r"Anonymous: *(\\d+)", told)[1])

small = opened(sys.argv[1])
before = private_bytes()
large = opened(sys.argv[2])
print(private_bytes() - before)
"""
_CHUNK_ELEMENTS = 4
_SETTLED_SECONDS = 11  # tables of a file that changed in the last ten are not cached
_ROUNDED_TO = 4 << 20  # so that nothing else in the process interferes


def _write_many_chunks(path, *, n_cells, n_chunks):
    """Write a CSR matrix of three genes, with given numbers of chunks of values and of indices.

    There is almost no data in it, so that it takes little disk space.
    """
    n_elements = _CHUNK_ELEMENTS * n_chunks
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
            X.create_dataset(name, data=np.ones(n_elements, dtype), chunks=(_CHUNK_ELEMENTS,))


class _WithTables(_Measured):
    """Open with its own cache folder."""

    def use_a_folder(self):
        self.tables = tempfile.mkdtemp()
        self.environment = mock.patch.dict(os.environ, CELLFEED_CACHE_DIR=self.tables)
        self.environment.start()

    def teardown(self, *_):
        shutil.rmtree(self.tables, ignore_errors=True)
        self.environment.stop()

    def forget(self, opening):
        """Remove what the last opening cached, to open for the first time."""
        if opening == "first":
            shutil.rmtree(self.tables, ignore_errors=True)


class FirstMinibatch(_WithTables):
    """Open the files of a folder, and deliver the first minibatch."""

    params = (parameters(quick=["cold"], full=["warm"]), ["first", "again"])
    param_names = ("page_cache", "opening")

    def setup_cache(self):
        root = Path.cwd() / "plates"
        paths = write_tahoe_like(root, n_cells=4_096, n_plates=4, seed=0)
        time.sleep(_SETTLED_SECONDS)
        return paths

    def setup(self, paths, page_cache, _opening):
        self.use_a_folder()
        self.run(paths, page_cache, "first")

    def run(self, paths, page_cache, opening):
        self.forget(opening)
        for path in paths if page_cache == "cold" else ():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        collection = open_collection(paths, obs=["plate"])
        minibatches = iter(CellDataset(collection, BlockShuffling(16), 64, 16, seed=0))
        next(minibatches)
        minibatches.close()

    def track_lookups(self, paths, _page_cache, opening):
        """Elements that each file is asked for while it is opened and its tables are read."""
        self.forget(opening)
        look_up = h5py.Group.__getitem__
        with mock.patch.object(h5py.Group, "__getitem__", autospec=True) as looked_up:
            looked_up.side_effect = look_up
            open_collection(paths, obs=["plate"]).load_tables()
        return looked_up.call_count / len(paths)

    track_lookups.unit = "elements per file"


class Opening(_WithTables):
    """Open a collection, and read the tables that say where its rows lie."""

    params = (["first", "again"], CELLS, CHUNKS)
    param_names = ("opening", "n_cells", "n_chunks")

    def setup_cache(self):
        root = Path.cwd()
        _write_many_chunks(root / "small.h5ad", n_cells=1_000, n_chunks=100)
        for n_cells in CELLS:
            for n_chunks in CHUNKS:
                path = root / f"{n_cells}-{n_chunks}.h5ad"
                _write_many_chunks(path, n_cells=n_cells, n_chunks=n_chunks)
        time.sleep(_SETTLED_SECONDS)
        return root

    setup_cache.timeout = 600

    def setup(self, root, _opening, n_cells, n_chunks):
        self.small, self.path = root / "small.h5ad", root / f"{n_cells}-{n_chunks}.h5ad"
        self.use_a_folder()
        self.run(root, "first")

    def run(self, _root, opening, *_):
        self.forget(opening)
        open_collection(self.path).load_tables()

    def track_private_bytes(self, _root, opening, *_):
        """Private memory of a process that has opened the collection."""
        if not Path("/proc/self/smaps_rollup").exists():
            msg = "this system does not report the shared memory of a process"
            raise NotImplementedError(msg)
        self.forget(opening)
        command = [sys.executable, "-c", PRIVATE_BYTES, self.small, self.path]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return round(int(told) / _ROUNDED_TO) * _ROUNDED_TO

    track_private_bytes.unit = "bytes"
