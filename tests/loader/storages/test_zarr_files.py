"""Files of zarr stores: how many stay open, until when, and in which process."""

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tests.loader.matrices import dense
from tests.loader.storages.test_zarr import Storage, pytestmark, write_store

from cellfeed import open_collection
from cellfeed._decode import _files

__all__ = ["pytestmark"]


@pytest.fixture
def write(tmp_path):
    return lambda storage: write_store(tmp_path / "cells.zarr", storage)


def open_files(path: Path) -> list[Path]:
    """Return which files of a store this process has open."""
    return [
        each for file in psutil.Process().open_files() if path in (each := Path(file.path)).parents
    ]


class TestFiles:
    def test_more_shards_than_may_stay_open(self, write, monkeypatch):
        opened_before = _files._OpenFile.count()
        monkeypatch.setattr(_files, "_most_open", lambda: opened_before + 2)
        storage = Storage(n_rows=40, shard=1)
        path = write(storage)
        collection = open_collection(path)
        for _ in range(2):
            assert np.array_equal(dense(collection[:].X), storage.matrix())
        assert len(open_files(path)) == 2

    def test_are_closed_where_ctrl_c_cannot_be_lost(self, write, python_calls_of_dropping):
        path = write(Storage(shard=2))
        held = [open_collection(path)]
        held[0][:]
        assert len(open_files(path)) > 0
        assert python_calls_of_dropping(held) == []
        assert open_files(path) == []

    def test_are_closed_with_the_collection(self, write):
        path = write(Storage(shard=2))
        collection = open_collection(path)
        collection[:]
        assert len(open_files(path)) > 0
        del collection
        assert open_files(path) == []


def send_rows(collection: Any, connection: Any) -> None:
    connection.send(dense(collection[:].X))


class TestProcesses:
    @pytest.mark.parametrize(
        ("method", "codec"), [("fork", "blosc"), ("fork", "with checksum"), ("forkserver", "blosc")]
    )
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_another_process_reads_while_this_one_does(self, write, method, codec):
        storage = Storage(shard=2, codec=codec)
        collection = open_collection(write(storage))
        collection[:]
        context = multiprocessing.get_context(method)
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=send_rows, args=(collection, sending))
        process.start()
        assert receiving.poll(60)
        assert np.array_equal(receiving.recv(), storage.matrix())
        process.join()
        assert process.exitcode == 0
        assert np.array_equal(dense(collection[:].X), storage.matrix())

    @pytest.mark.parametrize("shard", [None, 2])
    def test_a_pickle_reads_again(self, write, shard):
        storage = Storage(shard=shard)
        collection = open_collection(write(storage))
        collection[:]
        copy = pickle.loads(pickle.dumps(collection))
        assert np.array_equal(dense(copy[:].X), storage.matrix())
