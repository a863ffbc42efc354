import multiprocessing
import os
import textwrap
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.loader.matrices import dense
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, open_collection


def write_rows(path, n_rows):
    """Write many rows, of which a few have an element."""
    pointer = np.arange(n_rows + 1) // 1000
    with h5py.File(path, "w") as file:
        file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
        for name, n in (("obs", n_rows), ("var", 3)):
            group = file.create_group(name)
            group.attrs.update({"encoding-type": "dataframe", "encoding-version": "0.2.0"})
            group.attrs["_index"] = "_index"
            group.attrs["column-order"] = np.empty(0, "S1")
            index = group.create_dataset("_index", (n,), "i4", chunks=(n,))
            index.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        X = file.create_group("X")
        X.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0"})
        X.attrs["shape"] = (n_rows, 3)
        X.create_dataset("data", data=np.ones(pointer[-1], "f4"), chunks=(100,))
        X.create_dataset("indices", data=np.ones(pointer[-1], "i4"), chunks=(100,))
        X.create_dataset("indptr", data=pointer, chunks=(100_000,), compression="gzip")
    then = time.time() - 1000  # what has just changed is not kept
    os.utime(path, (then, then))
    return path


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_by_kept_tables(tmp_path, monkeypatch, method):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path))
    path = write_rows(tmp_path / "a.h5ad", 200_000)
    open_collection(path).load_tables()
    kept = max((tmp_path / "tables").iterdir(), key=lambda file: file.stat().st_size)
    used = kept.stat().st_mtime_ns
    strategy = BlockShuffling(block_size=16)
    dataset = CellDataset(open_collection(path), strategy, batch_size=25_000, seed=0)
    context = multiprocessing.get_context(method)
    seen = list[int]()
    # A server that forks workers might have been started before the cache folder was set.
    n_workers = 2 if method == "fork" else 1
    for minibatch in dataset.loader(num_workers=n_workers, multiprocessing_context=context):
        rows = np.asarray(minibatch.rows)
        expected = np.zeros((rows.size, 3), np.float32)
        expected[(rows + 1) % 1000 == 0, 1] = 1
        assert (dense(minibatch.X) == expected).all()
        seen += rows.tolist()
    assert sorted(seen) == list(range(200_000))
    assert kept.stat().st_mtime_ns > used


TELL_MEMORY = """
    import re, sys
    from pathlib import Path
    import numpy as np
    from cellfeed import BlockShuffling, CellDataset, open_collection

    def anonymous_bytes():
        told = Path("/proc/self/smaps_rollup").read_text()
        return 1024 * int(re.search(r"Anonymous: *(\\d+)", told)[1])

    def read(path):
        collection = open_collection(path)
        collection.load_tables()
        rows = np.linspace(0, len(collection) - 1, 100).astype(np.int64)
        return collection, collection[rows].X.nnz

    small = read(sys.argv[1])
    before = anonymous_bytes()
    large = read(sys.argv[2])
    print(anonymous_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux tells of memory")
def test_memory_of_a_process_does_not_grow_with_cells(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    small, large = (write_rows(tmp_path / f"{n}.h5ad", n) for n in (200_000, 4 << 20))
    open_collection(large).load_tables()  # the first opening, in another process
    told = warm.output_of("-c", textwrap.dedent(TELL_MEMORY), small, large)
    assert int(told) < 8 << 20  # the row pointer takes 32 MiB
