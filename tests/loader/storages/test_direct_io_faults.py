"""What is damaged is told by direct I/O as by buffered reads; and cases of the suite pass."""

import errno
import os
from functools import partial

import numpy as np
import pytest
from tests.loader.storages import test_conformance, test_conformance_zarr, test_faults
from tests.loader.storages.test_direct_io import _direct_here  # noqa: F401 - a fixture

from cellfeed import CellDataset, FormatError, Streaming, open_collection
from cellfeed._storages._anndata._local_h5file import LocalH5File


@pytest.fixture(autouse=True)
def _opened_directly(monkeypatch):
    monkeypatch.setattr(test_faults, "open_collection", partial(open_collection, direct_io=True))


@pytest.fixture
def write(write_h5ad, replace):
    return test_faults.writer_of_small_chunks(write_h5ad, replace)


class TestChunks(test_faults.TestChunks):
    @pytest.mark.parametrize("filter_", ["gzip", "none"])
    def test_on_a_disk_that_fails(self, write, monkeypatch, filter_):
        path = write("X", filter_=filter_)
        collection = open_collection(path, direct_io=True)

        def fail(*arguments):
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(FormatError, match=rf"(?s)^{path}: `X`.* cannot be read.*; .*copy"):
            collection[:]


class TestHoles(test_faults.TestHoles):
    pass


@pytest.mark.parametrize("verify", ["first", "always", "never"])
@pytest.mark.parametrize("damage", ["flip", "truncation"])
def test_damage_is_told_alike(write, monkeypatch, verify, damage):
    path = write("X/data")
    monkeypatch.setattr(LocalH5File, "check_unchanged", lambda self: None)
    opened = [open_collection(path, direct_io=direct_io) for direct_io in (False, True)]
    for collection in opened:
        collection.load_tables()
    first, stop = test_faults.chunk_bytes(path, "X/data")[-1]
    if damage == "flip":
        test_faults.flip(path, (first + stop) // 2)
    else:
        os.truncate(path, (first + stop) // 2)
    buffered, direct = (what_comes(collection, verify) for collection in opened)
    assert direct == buffered
    if damage == "truncation":
        assert direct[-1].startswith(f"{path}: `X/data`, elements ")
        assert "are beyond the end of the file" in direct[-1]


def what_comes(collection, verify):
    """Return rows, and what went wrong in the end."""
    dataset = CellDataset(
        collection,
        Streaming(),
        batch_size=5,
        fetch_factor=2,
        dense=True,
        verify=verify,
        num_threads=2,
    )
    found = list[object]()
    try:
        found.extend(each.X.tolist() for each in dataset)
    except FormatError as error:
        found.append(str(error))
    return found


class TestH5ad(test_conformance.TestH5ad):
    max_examples = 15

    @pytest.fixture
    def write(self, tmp_path):
        return directly(tmp_path, ".h5ad", test_conformance.write_h5ad)


@pytest.mark.filterwarnings("ignore")
class TestZarr(test_conformance_zarr.TestZarr):
    max_examples = 6

    @pytest.fixture
    def write(self, tmp_path):
        return directly(tmp_path, ".zarr", test_conformance_zarr.write_store)


def directly(folder, suffix, store):
    """Return what stores a case, and opens it."""

    def write(case):
        path = folder / f"{np.random.default_rng().integers(1 << 60)}{suffix}"
        store(path, case)
        (source,) = open_collection(path, elements=[case.element], direct_io=True).sources
        return source

    return write
