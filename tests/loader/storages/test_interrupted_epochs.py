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
from tests.loader.storages.test_faults import COUNTS, chunk_bytes, flip, writer_of_small_chunks
from tests.loader.threads import (
    no_iteration_of_other_tests,  # noqa: F401 - a fixture
    threads_of_iterations,
    wait_for_dropped,
)
from tests.warm import python as warm

from cellfeed import CellDataset, CellfeedError, FormatError, PathError, Streaming, open_collection
from cellfeed._decode import ChunkReads
from cellfeed._storages._anndata._matrix import StoredMatrix


@pytest.fixture
def write(write_h5ad, replace):
    return writer_of_small_chunks(write_h5ad, replace)


def in_order(collection, **options) -> CellDataset:
    """Return minibatches of 5 cells in the order of the file, read 10 at a time."""
    is_fast = collection.describe()["is_fast"].all()
    with nullcontext() if is_fast else pytest.warns(UserWarning, match="is read slowly"):
        return CellDataset(
            collection, Streaming(), batch_size=5, fetch_factor=2, seed=0, num_threads=2, **options
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
    decode = ChunkReads._work_off

    def change_and_decode(*arguments: Any) -> int:
        change()
        return decode(*arguments)

    monkeypatch.setattr(ChunkReads, "_work_off", change_and_decode)


def read_in_child(collection, connection) -> None:
    try:
        collection[:]
    except CellfeedError as error:
        connection.send((type(error).__name__, str(error)))
    else:
        connection.send(None)


class TestFilesThatChange:
    @pytest.fixture(params=["gzip", "fletcher32"], ids=["chunks", "library"])
    def path(self, request, write):
        path = write(filter_=request.param)
        os.utime(path, ns=(0, 0))  # whoever writes it, changes this
        return path

    @pytest.mark.parametrize("change", CHANGES)
    def test_between_two_fetches(self, path, change):
        function, error, words = CHANGES[change]
        collection = open_collection(path)
        collection[:]
        function(path)
        for _ in range(2):
            with pytest.raises(error, match=f"^{path}: {words}"):
                collection[:]

    @pytest.mark.parametrize("change", CHANGES)
    def test_before_the_first_fetch(self, path, change):
        function, error, words = CHANGES[change]
        collection = open_collection(path)
        function(path)
        with pytest.raises(error, match=f"^{path}: {words}"):
            collection[:]

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_before_a_process_is_forked(self, path, change):
        function, error, _ = CHANGES[change]
        collection = open_collection(path)
        collection[:]
        context = multiprocessing.get_context("fork")
        receiving, sending = context.Pipe(duplex=False)
        function(path)
        child = context.Process(target=read_in_child, args=(collection, sending))
        child.start()
        name, message = receiving.recv()
        child.join()
        assert name == error.__name__
        assert message.startswith(f"{path}: ")

    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_before_a_copy_opens_it(self, path, change):
        function, error, _ = CHANGES[change]
        copy = pickle.loads(pickle.dumps(open_collection(path)))
        function(path)
        with pytest.raises(error, match=f"^{path}: "):
            copy[:]

    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_during_an_epoch(self, path, change):
        function, error, words = CHANGES[change]
        dataset = in_order(open_collection(path))
        seen = []
        with pytest.raises(error, match=f"^{path}: {words}"):  # noqa: PT012 - it comes anywhere
            for minibatch in dataset:
                rows = np.asarray(minibatch.rows)
                assert np.array_equal(dense(minibatch.X), COUNTS[rows])
                seen += rows.tolist()
                if len(seen) == 5:
                    function(path)
        assert seen == list(range(len(seen)))
        assert 5 <= len(seen) <= 40  # two fetches are planned ahead
        assert threads_of_iterations() == []

    @pytest.mark.parametrize("element", ["X", "X/data"])
    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_while_the_library_reads(self, write, element, change, monkeypatch):
        function, error, words = CHANGES[change]
        path = write(element, filter_="fletcher32")
        os.utime(path, ns=(0, 0))
        collection = open_collection(path)
        read = StoredMatrix._read_slices

        def change_and_read(*arguments):
            found = read(*arguments)
            if path.exists():
                function(path)
            return found

        monkeypatch.setattr(StoredMatrix, "_read_slices", change_and_read)
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

    @pytest.mark.parametrize("change", ["renamed over", "written in place", "removed"])
    def test_annotations_are_not_read(self, path, change):
        function, error, words = CHANGES[change]
        collection = open_collection(path)
        assert collection.where("number > 57").tolist() == [58, 59]
        function(path)
        for read in (
            lambda: collection.where("number > 57"),
            lambda: collection.read_obs(["number"]),
            lambda: collection.obs_names([3]),
        ):
            with pytest.raises(error, match=f"^{path}: {words}"):
                read()

    def test_that_may_not_be_read_any_more(self, path, monkeypatch):
        copy = pickle.dumps(open_collection(path))

        def refuse(*arguments):
            raise PermissionError

        monkeypatch.setattr(h5py, "File", refuse)
        with pytest.raises(
            PathError, match=f"^{path}: permission to read is denied; check its permissions"
        ):
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

    @pytest.mark.parametrize("n_seen", [1, 2, 3, 11])
    def test_left_by_break(self, path, n_seen):
        iterator = iter(in_order(open_collection(path)))
        for _ in range(n_seen):
            next(iterator)
        assert threads_of_iterations() != []
        iterator.close()
        assert threads_of_iterations() == []

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("dense", [False, True])
    def test_left_by_an_error_of_the_consumer(self, path, error, dense):
        def loop():
            for minibatch in in_order(open_collection(path), dense=dense):
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

    def test_run_to_the_end(self, path):
        list(in_order(open_collection(path)))
        assert threads_of_iterations() == []

    def test_never_begun(self, path):
        iterator = iter(in_order(open_collection(path)))
        assert threads_of_iterations() == []
        del iterator

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    def test_errors_of_workers_are_told_in_the_parent(self, path):
        first, stop = chunk_bytes(path, "X")[-1]
        flip(path, (first + stop) // 2)
        loader = in_order(open_collection(path)).loader(num_workers=2)
        with pytest.raises(FormatError, match=re.escape(f"{path}: `X`, rows 56 to 60")):
            list(loader)

    @pytest.mark.parametrize(
        ("end", "code"),
        [
            ("", 0),  # the iterator is still there when Python ends
            ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
            ("wait_for_interrupt()", -signal.SIGINT),
        ],
    )
    def test_do_not_keep_python_from_ending(self, path, tmp_path, end, code):
        script = tmp_path / "script.py"
        script.write_text(_SCRIPT.format(path=str(path), end=end))
        process = warm.FinalizedPopen(
            [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        if end.startswith("wait"):
            process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
        assert process.returncode == code, errors
        assert "Segmentation" not in errors


_SCRIPT = """
import itertools, os, signal, sys
from cellfeed import BlockShuffling, CellDataset, open_collection

signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts in the background ignores it

def wait_for_interrupt():
    for _ in itertools.count():
        for _ in dataset:
            pass

dataset = CellDataset(
    open_collection({path!r}), BlockShuffling(block_size=4), batch_size=4, fetch_factor=2, seed=0
)
for _ in dataset:  # compiles all; Python forgets an interrupt while numba evaluates strings
    pass
iterator = iter(dataset)
next(iterator)
print("begun", flush=True)
{end}
"""
