"""Epochs that end early: files that change meanwhile, errors, and loops that are left."""

import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from tests.loader.matrices import dense
from tests.loader.sources.test_faults import COUNTS, chunk_bytes, flip, writer_of_small_chunks
from tests.loader.threads import (
    no_iteration_of_other_tests,  # noqa: F401 - a fixture
    threads_of_iterations,
    wait_for_dropped,
)
from tests.warm import python as warm

from cellfeed import (
    CellDataset,
    CellfeedError,
    FormatError,
    PathError,
    ReadOptions,
    Streaming,
    open_collection,
)
from cellfeed.decode import ChunkReads


@pytest.fixture
def write(write_h5ad, replace):
    return writer_of_small_chunks(write_h5ad, replace)


def in_order(collection, **options) -> CellDataset:
    """Return minibatches of 5 cells in the order of the file, read 10 at a time."""
    is_fast = collection.describe()["is_fast"].all()
    with nullcontext() if is_fast else pytest.warns(UserWarning, match="is read slowly"):
        return CellDataset(
            collection,
            Streaming(),
            batch_size=5,
            fetch_factor=2,
            seed=0,
            read_options=ReadOptions(num_threads=2),
            **options,
        )


def rename_over(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


def write_in_place(path: Path) -> None:
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(content)


CHANGES: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "renamed over": (rename_over, FormatError, "was replaced or written to since it was opened"),
    "written in place": (write_in_place, FormatError, "was replaced or written to since"),
    "truncated": (lambda path: os.truncate(path, 500), FormatError, ""),
    "removed": (Path.unlink, PathError, "was removed since it was opened; put it back"),
}


def change_while_chunks_are_decoded(monkeypatch: Any, change: Callable[[], Any]) -> None:
    decode = ChunkReads._decode_ready

    def change_and_decode(*arguments: Any) -> int:
        change()
        return decode(*arguments)

    monkeypatch.setattr(ChunkReads, "_decode_ready", change_and_decode)


def read_in_child(collection, connection) -> None:
    try:
        collection[:]
    except CellfeedError as error:
        connection.send(str(error))


class TestFilesThatChange:
    @pytest.fixture(params=["gzip", "fletcher32"], ids=["chunks", "library"])
    def path(self, request, write):
        path = write(filter_=request.param)
        os.utime(path, ns=(0, 0))  # whoever writes it, changes this
        return path

    @pytest.mark.parametrize("change", CHANGES)
    @pytest.mark.parametrize("was_read", [False, True])
    def test_since_they_were_opened(self, path, change, was_read):
        function, error, words = CHANGES[change]
        collection = open_collection(path)
        copy = pickle.dumps(collection)
        if was_read:
            assert np.array_equal(dense(collection[:].X), COUNTS)
            assert collection.where("number > 57").tolist() == [58, 59]
        function(path)
        for read in (
            lambda: collection[:],
            lambda: collection[:],
            lambda: collection.where("number > 57"),
            lambda: collection.read_obs(["number"]),
            lambda: collection.obs_names([3]),
            lambda: pickle.loads(copy)[:],
        ):
            with pytest.raises(error, match=f"^{path}: {words}"):
                read()

    @pytest.mark.process
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_before_a_process_is_forked(self, path):
        collection = open_collection(path)
        collection[:]
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        rename_over(path)
        child = context.Process(target=read_in_child, args=(collection, sending))
        child.start()
        assert receiving.recv().startswith(f"{path}: was replaced or written to since it was open")
        child.join()

    @pytest.mark.parametrize("element", ["X", "X/data"])
    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_while_the_library_reads(self, write, element, change, monkeypatch):
        function, error, words = CHANGES[change]
        path = write(element, filter_="fletcher32")
        os.utime(path, ns=(0, 0))
        collection = open_collection(path)
        collection[:]
        read = h5py.Dataset.__getitem__

        def change_and_read(*arguments):
            found = read(*arguments)
            if path.exists():
                function(path)
            return found

        monkeypatch.setattr(h5py.Dataset, "__getitem__", change_and_read)
        with pytest.raises(error, match=f"^{path}: {words}"):
            collection[:]

    @pytest.mark.parametrize("filter_", ["gzip", "none"])
    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_while_chunks_are_decoded(self, write, filter_, change, monkeypatch):
        function, error, words = CHANGES[change]
        path = write(filter_=filter_)
        os.utime(path, ns=(0, 0))
        dataset = in_order(open_collection(path))
        change_while_chunks_are_decoded(monkeypatch, lambda: path.exists() and function(path))
        with pytest.raises(error, match=f"^{path}: {words}"):
            next(iter(dataset))

    def test_whose_new_chunks_cannot_be_decoded(self, write, monkeypatch):
        """This is no damage."""
        path = write()
        os.utime(path, ns=(0, 0))
        collection, content = open_collection(path), path.read_bytes()
        change_while_chunks_are_decoded(monkeypatch, lambda: path.write_bytes(content[::-1]))
        with pytest.raises(FormatError, match=f"^{path}: was replaced or written to"):
            collection[:]

    def test_that_may_not_be_read_any_more(self, path, monkeypatch):
        copy = pickle.dumps(open_collection(path))

        def refuse(*arguments):
            raise PermissionError

        monkeypatch.setattr(h5py, "File", refuse)
        said = f"^{path}: permission to read is denied; check its permissions"
        with pytest.raises(PathError, match=said):
            pickle.loads(copy)[:]


class TestLoops:
    """Where an error comes out, and what is left of a loop that ends in one way or another."""

    @pytest.fixture
    def path(self, write):
        return write("X")

    @pytest.mark.parametrize("dense", [False, True])
    @pytest.mark.parametrize("layout", ["X", "X/data"])
    def test_errors_come_where_the_rows_would_have_come(self, write, layout, dense):
        path = write(layout)
        first, stop = chunk_bytes(path, layout)[-1]
        flip(path, (first + stop) // 2)
        rows = []
        with pytest.raises(FormatError, match=f"^{path}: `{layout}`, "):  # noqa: PT012
            for minibatch in in_order(open_collection(path), dense=dense):
                rows += minibatch.rows.tolist()
        assert rows == list(range(50))
        assert threads_of_iterations() == []

    def test_an_epoch_after_an_error_starts_anew(self, path):
        first, stop = chunk_bytes(path, "X")[-1]
        for _ in range(2):
            flip(path, (first + stop) // 2)
            os.utime(path, ns=(0, 0))
            dataset = in_order(open_collection(path))
            with pytest.raises(FormatError):
                list(dataset)
            iterator = iter(dataset)
            assert next(iterator).rows.tolist() == [0, 1, 2, 3, 4]
            iterator.close()
            del dataset, iterator  # a file that was changed is not opened again while it is open
            flip(path, (first + stop) // 2)
        assert sum(map(len, in_order(open_collection(path)))) == 60
        assert threads_of_iterations() == []

    @pytest.mark.parametrize("n_seen", [0, 1, 2, 3, 11])
    def test_left_by_break(self, path, n_seen):
        iterator = iter(in_order(open_collection(path)))
        for _ in range(n_seen):
            next(iterator)
        assert (threads_of_iterations() != []) == (n_seen > 0)
        iterator.close()
        assert threads_of_iterations() == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_left_by_an_error_of_the_consumer(self, path, error):
        def loop():
            for minibatch in in_order(open_collection(path)):
                if minibatch.rows[0] >= 20:
                    raise error

        with pytest.raises(error):
            loop()
        wait_for_dropped()
        assert threads_of_iterations() == []

    def test_left_by_an_error_of_a_callback(self, path):
        def refuse(batch):
            raise LookupError

        with pytest.raises(LookupError):
            list(in_order(open_collection(path), batch_transform=refuse))
        assert threads_of_iterations() == []

    @pytest.mark.process
    @pytest.mark.smoke
    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_errors_of_workers_are_told_in_the_parent(self, path):
        first, stop = chunk_bytes(path, "X")[-1]
        flip(path, (first + stop) // 2)
        loader = in_order(open_collection(path)).loader(num_workers=2)
        with pytest.raises(FormatError, match=re.escape(f"{path}: `X`, rows 56 to 60")):
            list(loader)

    @pytest.mark.process
    def test_are_ended_by_ctrl_c(self, path):
        process = warm.FinalizedPopen(
            [sys.executable, "-c", _SCRIPT, path],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == -signal.SIGINT, errors
        assert "Segmentation" not in errors


_SCRIPT = """
import itertools, signal, sys
from cellfeed import BlockShuffling, CellDataset, open_collection

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it
dataset = CellDataset(open_collection(sys.argv[1]), BlockShuffling(4), 4, 2, seed=0)
for epoch in itertools.count():
    for _ in dataset:
        pass
    if not epoch:  # all is compiled; Python forgets an interrupt while numba evaluates strings
        print("begun", flush=True)
"""
