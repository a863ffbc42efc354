"""`Collection.load`: the same minibatches and states, from memory that processes share."""

import json
import os
import pickle
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.collection.stored import collections_of, write_files
from tests.loader.dataset.torchrun import torchrun
from tests.warm import python as warm

from cellfeed import (
    BlockShuffling,
    CellDataset,
    DeliveryError,
    ParameterError,
    Streaming,
    _torch,
    open_collection,
)
from cellfeed.collection import _loaded
from cellfeed.sources import RaggedRows, Source, StoredElement
from cellfeed.transforms import Log1p, NormalizeTotal

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="the system has no such memory"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.* is read slowly"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory, replace):
    return write_files(tmp_path_factory.mktemp("files"), replace)


def parts_of(tensor):
    """The strided tensors of an element, as bytes, with all that tells dtypes and shapes apart."""
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_csr:
        strided = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif isinstance(tensor, torch.Tensor):
        strided = [tensor]
    else:
        strided = [tensor.offsets, tensor.values]
    return tensor.shape, [(each.dtype, each.shape, each.numpy().tobytes()) for each in strided]


def bits(minibatches):
    return [
        {name: parts_of(each) for name, each in (*m.items(), *m.obs.items(), ("rows", m.rows))}
        for m in minibatches
    ]


def strategies(n_cells, seed):
    rng = np.random.default_rng(seed)
    rows = np.flatnonzero(rng.random(n_cells) < 0.7)
    return st.sampled_from(
        [
            Streaming(),
            BlockShuffling(3),
            BlockShuffling(2, indices=rows) if rows.size else Streaming(),
            BlockShuffling(4, align="chunks"),
            BlockShuffling(2, indices=np.sort(rng.integers(0, n_cells, n_cells))),
        ]
    )


@pytest.mark.slow
@pytest.mark.parametrize("join", ["same", "inner", "outer", "genes"])
@settings(max_examples=max(1, settings().max_examples // 2))
@given(data=st.data())
def test_minibatches_and_states_are_those_of_files(files, join, data):
    collection = data.draw(collections_of(files, join))
    rows = data.draw(
        st.none()
        | st.lists(st.integers(0, len(collection) - 1), min_size=1)
        | st.just(slice(None, None, 2))
    )
    loaded = collection.load(rows)
    dtype = data.draw(st.sampled_from([None, "float32", "float64", "float16", "int32"]))
    options = {
        "strategy": data.draw(strategies(len(collection), data.draw(st.integers(0, 9)))),
        "batch_size": data.draw(st.integers(1, 9)),
        "fetch_factor": data.draw(st.integers(1, 3)),
        "dtype": dtype,
        "dense": data.draw(st.booleans()),
        "transform": data.draw(st.sampled_from([None, [NormalizeTotal(10.0), Log1p()]]))
        if dtype in (None, "float32", "float64")
        else None,
        "seed": 0,
    }
    datasets = [CellDataset(each, **options) for each in (collection, loaded)]
    n_begun = data.draw(st.integers(1, len(datasets[0])))
    of_files, of_memory = (bits(islice(each, n_begun)) for each in datasets)
    assert of_files == of_memory
    states = [each.state_dict() for each in datasets]
    assert states[0] == states[1]
    for each in datasets:
        each.load_state_dict(json.loads(json.dumps(states[0])))
    of_files, of_memory = map(bits, datasets)
    assert of_files == of_memory


def adata_of(values):
    return ad.AnnData(sp.csr_matrix(np.asarray(values)))


CASES: dict[str, Any] = {
    "uint8": np.array([[1, 0, 255]], np.float32),
    "uint16": np.array([[1, 65535]], np.int64),
    "int64": np.array([[1, 65536]], np.int64),
    "float32": np.array([[1, 0.5]], np.float32),
    "float64": np.array([[1, np.nan]]),
    "int32": np.array([[1, -1]], np.int32),
}


@pytest.mark.parametrize("dtype", CASES)
@pytest.mark.parametrize("before", [[3], [3, 300]])
def test_values_are_kept_as_narrow_as_they_all_are(monkeypatch, dtype, before):
    # Each array is begun with the first values, and widened when others come.
    monkeypatch.setattr(_loaded, "_FETCH_BYTES", 1)
    monkeypatch.setattr(_loaded, "_BLOCK", 2)
    values = CASES[dtype]
    n = values.shape[1]
    first = np.zeros((5, n), values.dtype)
    first[:, 0] = np.resize(before, 5)
    whole = np.concatenate([first, values])
    if max(before) > 255 and dtype == "uint8":
        dtype = "uint16"
    collection = open_collection(adata_of(whole))
    loaded = collection.load()
    n_values = np.count_nonzero(whole)
    pointers = 8 * (len(whole) + 1)
    assert loaded.loaded_bytes == n_values * (2 + np.dtype(dtype).itemsize) + pointers
    np.testing.assert_array_equal(loaded[:].X.toarray(), whole)
    assert loaded[:].X.dtype == whole.dtype


def test_a_negative_zero_stays_one():
    dense = np.array([[0.0, -0.0, 1.0]], np.float32)
    loaded = open_collection(ad.AnnData(dense)).load()
    assert loaded[:].X.tobytes() == dense.tobytes()


class Ragged(StoredElement):
    layout, var, dtype, shape = "ragged", None, np.dtype([("gene", "<i8"), ("value", "<f4")]), (4,)

    def read_rows(self, runs):
        rows = np.concatenate([np.arange(*run) for run in runs.tolist()])
        values = np.concatenate([np.full(row, row, self.dtype) for row in rows.tolist()])
        return RaggedRows(np.concatenate([[0], np.cumsum(rows)]), values)


class Images(StoredElement):
    layout, var, dtype, shape = "dense", None, np.dtype(np.int32), (4, 2, 3)

    def read_rows(self, runs):
        rows = np.concatenate([np.arange(*run) for run in runs.tolist()])
        return (rows[:, None, None] + np.arange(6).reshape(2, 3)).astype(self.dtype)


class RaggedAndImages(Source):
    def __init__(self):
        self.location = open_collection(ad.AnnData(np.eye(2))).locations[0]
        self.elements = {"spans": Ragged(), "obsm/images": Images()}

    def obs_names(self):
        return ()

    def read_obs(self, columns):
        raise NotImplementedError


@pytest.mark.parametrize("rows", [None, [1, 3]])
def test_rows_of_different_lengths_and_images(rows):
    collection = open_collection(RaggedAndImages(), elements=["spans", "obsm/images"])
    loaded = collection.load(rows)
    datasets = [CellDataset(each, BlockShuffling(1), 2, seed=0) for each in (collection, loaded)]
    assert bits(datasets[0]) == bits(datasets[1])


def test_one_element_of_loaded_ones(plates):
    collection = open_collection(plates)
    loaded = collection.load().of_element("X")
    datasets = [CellDataset(each, BlockShuffling(4), 8, seed=0) for each in (collection, loaded)]
    assert bits(datasets[0]) == bits(datasets[1])
    assert "loaded: " in repr(loaded)


def test_loaded_cells_need_no_files(plates, tmp_path):
    copies = [tmp_path / path.name for path in plates]
    for path, copy in zip(plates, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    expected = open_collection(plates)[:].X.toarray()
    loaded = open_collection(copies, obs=["plate"]).load()
    dataset = CellDataset(loaded, Streaming(), 8)
    for copy in copies:
        copy.unlink()
    found = torch.cat([minibatch.X.to_dense() for minibatch in dataset])
    np.testing.assert_array_equal(found.numpy(), expected)


def memory_files(process="self"):
    """The files in memory that a process has open, by their number."""
    found = set()
    for each in Path(f"/proc/{process}/fd").iterdir():
        try:
            if "cellfeed-loaded" in str(each.readlink()):
                found.add(each.stat().st_ino)
        except OSError:
            continue
    return found


def test_what_does_not_fit_is_refused_before_it_is_read(plates, monkeypatch):
    collection = open_collection(plates)
    before = memory_files()
    monkeypatch.setattr(_loaded, "usable_memory_bytes", lambda: 1_000)
    with pytest.raises(
        ParameterError, match=r"takes \d,\d\d\d bytes of memory, but 1,000 are available"
    ):
        collection.load()
    assert memory_files() == before


def test_what_grows_too_large_is_refused(monkeypatch):
    values = np.ones((4_000, 3), np.float32)
    values[1] = 0.5  # which is not in the sample
    monkeypatch.setattr(_loaded, "_FETCH_BYTES", 1_000)
    monkeypatch.setattr(_loaded, "usable_memory_bytes", lambda: 30_000)
    before = memory_files()
    with pytest.raises(ParameterError, match=r"memory, but 30,000 are available"):
        open_collection(ad.AnnData(values)).load()
    assert memory_files() == before


def test_copies_share_memory_until_the_last_is_gone(plates):
    before = memory_files()
    loaded = open_collection(plates).load()
    own = memory_files() - before
    pickled = pickle.dumps(loaded)
    copied = pickle.loads(pickled)
    assert memory_files() - before == own
    expected = bits(CellDataset(loaded, Streaming(), 8))
    del loaded
    assert bits(CellDataset(copied, Streaming(), 8)) == expected
    del copied
    assert memory_files() == before
    with pytest.raises(DeliveryError, match="loaded cells are gone"):
        pickle.loads(pickled)


@pytest.mark.process
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_share_memory(plates, method):
    collection = open_collection(plates, obs=["plate"])
    expected = bits(CellDataset(collection, BlockShuffling(4), 8, 2, seed=0))
    dataset = CellDataset(collection.load(), BlockShuffling(4), 8, 2, seed=0)
    own = memory_files()
    n = 1 if method == "spawn" else 2  # each of which imports for itself
    loader = dataset.loader(n, multiprocessing_context=method, persistent_workers=True)
    found = bits(loader)  # by all workers, which persist
    children = [int(each) for each in children_of(os.getpid())]
    assert sum(own <= memory_files(each) for each in children) >= n * (method != "forkserver")
    assert found == expected


def children_of(process):
    path = Path(f"/proc/{process}/task/{process}/children")
    return path.read_text().split() if path.exists() else []


@pytest.mark.process
def test_nothing_is_left_of_a_process_that_is_killed(plates):
    script = """
import pickle, sys
from cellfeed import open_collection
loaded = open_collection(sys.argv[1:]).load()
sys.stdout.buffer.write(pickle.dumps(loaded).hex().encode() + b"\\n")
sys.stdout.flush()
sys.stdin.read()
"""
    with warm.Popen(
        [sys.executable, "-c", script, *map(str, plates)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        pickled = bytes.fromhex(process.stdout.readline().decode())
        attached = pickle.loads(pickled)
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGKILL)
        process.wait()
    # No file names the memory, also not in /dev/shm, where other processes have files, too.
    assert "/memfd:cellfeed-loaded (deleted)" in maps
    assert not [each for each in Path("/dev/shm").iterdir() if "cellfeed" in each.name]
    expected = open_collection(plates)[:].X.toarray()
    np.testing.assert_array_equal(attached[:].X.toarray(), expected)
    with pytest.raises(DeliveryError, match="loaded cells are gone"):
        pickle.loads(pickled)


def test_ranks_of_an_old_pytorch_are_told(plates, monkeypatch):
    there = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True)
    there.group = SimpleNamespace(WORLD=object())
    monkeypatch.setattr(_torch, "dist", there)
    with pytest.raises(ParameterError, match=r"need PyTorch 2\.8 or newer to share loaded cells"):
        open_collection(plates).load()


@pytest.mark.process
def test_ranks_of_a_machine_hold_cells_once(plates, tmp_path):
    ranks = torchrun(
        tmp_path,
        2,
        f"paths = {[*map(str, plates)]!r}",
        """
        from pathlib import Path
        from cellfeed import open_collection
        from cellfeed.collection import _loaded

        def memory_files():
            links = {each: each.readlink() for each in Path("/proc/self/fd").iterdir()
                     if each.exists()}
            return sorted({each.stat().st_ino for each, link in links.items()
                           if "cellfeed-loaded" in str(link)})

        dist.init_process_group("gloo")
        collection = open_collection(paths)
        loaded = collection.load()
        found["memory"] = memory_files()
        dataset = CellDataset(loaded, BlockShuffling(4), 8, seed=0)
        found["rows"] = [m.rows.tolist() for m in dataset]
        found["sum"] = float(loaded[:].X.sum())
        dist.barrier()
        del loaded, dataset
        found["again"] = float(collection.load().of_element("X")[:].X.sum())
        own = collection.load(slice(rank, None, 2))
        found["share"] = own.loaded_bytes
        dist.barrier()
        _loaded.usable_memory_bytes = lambda: 1
        found["refused"] = refusal(collection.load, [0, 1])
        """,
    )
    expected = float(open_collection(plates)[:].X.sum())
    for rank in ranks:
        assert rank["memory"] == ranks[0]["memory"]
        assert rank["sum"] == rank["again"] == expected
        assert "are available" in rank["refused"]
    assert len(ranks[0]["memory"]) == 3
    assert ranks[0]["share"] != ranks[1]["share"]
