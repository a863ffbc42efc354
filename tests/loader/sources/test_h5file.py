"""HDF5 files are opened once, and not to read rows; few are open at a time."""

import gc
import multiprocessing
import os
import pickle
import pkgutil
import resource
import shutil
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import psutil
import pytest
import scipy.sparse as sp
from tests.commands import limited
from tests.loader.bytes.files import note_calls, settle
from tests.loader.matrices import dense

from cellfeed import (
    CategoricalColumn,
    CellDataset,
    FormatError,
    PathError,
    Streaming,
    open_collection,
)

COUNTS = np.random.default_rng(0).poisson(0.7, size=(40, 12)).astype(np.float32)
OBS = {
    "plate": pd.Categorical(["p 1", "", "é", None] * 10),
    "n": np.arange(40, dtype=np.uint16),
    "share": np.linspace(0, 1, 40),
    "is_t": [True, False] * 20,
    "note": ["a", "b"] * 20,
}


@pytest.fixture
def records(tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    settle(monkeypatch)
    return tmp_path / "cache" / "tables"


@pytest.fixture
def path(write_h5ad, records):
    return write_h5ad(sp.csr_matrix(COUNTS), OBS, layers={"raw": COUNTS}, compression="gzip")


@pytest.fixture
def counted(monkeypatch):
    """Numbers of files opened, members and attributes looked up, and arrays read, by h5py."""
    counts = Counter[str]()
    for owner, name, what in (
        (h5py.h5f, "open", "files"),
        (h5py.Group, "__getitem__", "members"),
        (h5py.AttributeManager, "__getitem__", "attributes"),
        (h5py.Dataset, "__getitem__", "arrays"),
    ):
        note_calls(monkeypatch, owner, name, partial(counts.update, [what]))
    return counts


def opened(path, obs=("plate", "n"), **options):
    collection = open_collection(path, obs=obs, **options)
    collection.load_tables()
    return collection


def send_number_of_openings(collection, counted, connection):
    counted.clear()
    assert np.array_equal(dense(collection[:].X), COUNTS)
    connection.send(counted["files"])


@pytest.mark.process
@pytest.mark.smoke
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_rows_are_read_without_hdf5_in_each_process(path, counted):
    collection = opened(path)
    for each in (collection, pickle.loads(pickle.dumps(collection))):
        counted.clear()
        for _ in range(2):
            assert np.array_equal(dense(each[:].X), COUNTS)
        assert counted["files"] == 0
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    arguments = (collection, counted, sending)
    process = context.Process(target=send_number_of_openings, args=arguments)
    process.start()
    assert receiving.recv() == 0
    process.join()
    assert process.exitcode == 0


def test_a_first_opening_looks_each_element_up_once_in_each_step(write_h5ad, records, counted):
    paths = [write_h5ad(sp.csr_matrix(COUNTS), OBS, nullable=False) for _ in range(4)]
    counted.clear()
    opened(paths)
    # obs and var and X, with an index each or three arrays (2 + 2 + 4); what is asked for again in
    # a later step: var and its index, obs twice and its index, arrays whose chunks are listed
    # (2 + 3 + 2); a column of codes and categories, and one of numbers (3 + 1).
    assert counted == {"files": 4, "members": 4 * 19, "attributes": 4 * 11, "arrays": 4 * 5}


def test_a_second_opening_opens_no_files(write_h5ad, records, counted):
    paths = [write_h5ad(sp.csr_matrix(COUNTS + k), OBS) for k in range(4)]
    opened(paths)
    assert len([*records.iterdir()]) == 5  # one for each file, and the names of genes
    counted.clear()
    collection = opened(paths)
    CellDataset(collection, Streaming(), batch_size=40)
    assert not counted
    assert np.array_equal(dense(collection[45:50].X), COUNTS[5:10] + 1)
    assert not counted


@pytest.mark.slow
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("options", [{}, {"fletcher32": True}])  # which h5py reads
@pytest.mark.parametrize("n_taken", [0, 200])  # by the user's program
def test_more_files_than_may_be_open(write_h5ad, tmp_path, records, is_recorded, options, n_taken):
    one = write_h5ad(sp.csr_matrix(COUNTS), OBS)
    with h5py.File(one, "a") as file:
        values, attributes = file["X/data"][:], dict(file["X/data"].attrs)
        del file["X/data"]
        file["X"].create_dataset("data", data=values, **options).attrs.update(attributes)
    paths = [Path(shutil.copy(one, tmp_path / f"{k:02}.h5ad")) for k in range(40)]
    for k, path in enumerate(paths):
        with h5py.File(path, "a") as file:
            file["X/data"][:] = values + k
    if is_recorded:
        opened(paths)
    gc.collect()
    with ExitStack() as taken:
        for _ in range(n_taken):
            taken.enter_context(Path(os.devnull).open())
        taken.enter_context(limited(resource.RLIMIT_NOFILE, psutil.Process().num_fds() + 20))
        collection = opened(paths)
        for _ in range(2):
            found = dense(collection[:].X)
    assert np.array_equal(found, np.concatenate([COUNTS + k * (COUNTS > 0) for k in range(40)]))


@pytest.mark.parametrize("elements", [["X"], ["layers/raw"], ["X", "layers/raw"]])
@pytest.mark.parametrize("obs", [[], ["plate"], list(OBS)])
def test_what_is_recorded_is_what_was_read(path, elements, obs):
    oracle = ad.read_h5ad(path)
    for _ in range(3):
        collection = opened(path, obs, elements=elements)
        assert collection.var_names.tolist() == oracle.var_names.tolist()
        for name in obs:
            column, expected = collection.obs[name], oracle.obs[name]
            if isinstance(column, CategoricalColumn):
                decoded = [None if pd.isna(each) else each for each in expected.tolist()]
                assert column.decode(column.codes).tolist() == decoded
            else:
                values = column.values  # noqa: PD011 - of a `NumericColumn`
                assert np.array_equal(values, expected)
                assert values.dtype == expected.dtype
        cells = pickle.loads(pickle.dumps(collection))[::-1]
        for name in elements:
            assert np.array_equal(dense(cells[name]), COUNTS[::-1])
        table = collection.describe()
        assert table["codec"].tolist() == ["gzip 4"] * len(elements)
        assert table["chunk_shape"].map(type).tolist() == [tuple] * len(elements)


def test_another_opening_adds_to_the_record(path, counted, records):
    opened(path, ["plate"])
    opened(path, ["n"])
    counted.clear()
    opened(path, ["n", "plate"])
    assert not counted
    assert len([*records.iterdir()]) == 1


def test_a_damaged_record_is_made_anew(path, counted, records):
    opened(path)
    (record,) = records.iterdir()
    whole = record.read_bytes()
    record.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert np.array_equal(dense(opened(path)[:].X), COUNTS)
    assert record.read_bytes() == whole


@pytest.mark.parametrize("is_read", [False, True])
def test_a_file_that_changes_after_it_was_opened_from_its_record_is_noticed(path, is_read):
    opened(path)
    collection = opened(path)
    if is_read:
        assert np.array_equal(dense(collection[[3]].X), COUNTS[[3]])
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(PathError, match=f"^{path}: (was removed since|no such file)"):
        collection[:]
    path.write_bytes(content)
    with pytest.raises(FormatError, match=f"^{path}: was replaced or written to since"):
        collection[:]
    assert np.array_equal(dense(open_collection(path)[:].X), COUNTS)


def test_a_file_that_is_missing_or_truncated_is_noticed_in_spite_of_its_record(path):
    opened(path)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(FormatError, match=f"^{path}: the file is truncated"):
        open_collection(path)
    path.unlink()
    with pytest.raises(PathError, match=f"^{path}: no such file"):
        open_collection(path)


@pytest.mark.parametrize("name", ["obs/plate", "X", "var/_index"])
def test_of_a_file_that_refers_to_others_nothing_is_recorded_then(path, name, tmp_path):
    other = tmp_path / "other.h5"
    with h5py.File(path, "r+") as file, h5py.File(other, "w") as linked:
        file.copy(name, linked, "there")
        del file[name]
        file[name] = h5py.ExternalLink(other, "/there")
    for _ in range(2):
        collection = opened(path)
        assert collection.sources[0].linked_files() == (other,)
        assert np.array_equal(dense(collection[:].X), COUNTS)
        del collection
    other.unlink()
    with pytest.raises(FormatError, match=f"^{path}: .* is a link to `/there`"):
        opened(path)


def test_records_of_other_attributes_have_another_format(write_h5ad):
    """Those of an earlier version would lack added ones: then `_FORMAT` of tables must change."""
    of_all = {"_array_names", "_chunked_arrays", "_element", "_obs", "_slow_read", "_stored_dtype"}
    of_all |= {"chunk_shape", "dtype", "rows_per_chunk", "shape", "stored_as", "var"}
    of_each = {
        "csr": {"_n_elements", "_row_pointer", "_unchecked_pointer"},
        "dense": {"_n_columns"},
    }
    assert pkgutil.resolve_name("cellfeed.bytes._tables:_FORMAT") == 1
    for X in (COUNTS, sp.csr_matrix(COUNTS)):
        element: Any = open_collection(write_h5ad(X)).sources[0].elements["X"]
        assert set(element.described()) == of_all | of_each[element.layout]
