"""What a collection says of its files, and the warning where they are read slowly."""

import pickle
import warnings
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellfeed import CellDataset, Streaming, open_collection

COUNTS = np.random.default_rng(0).poisson(1.0, (40, 7)).astype(np.float32)
REASON = "through h5py: filter fletcher32 is not supported"
REMEDY = "write it again with anndata and compression='gzip'"


def slowly(*names, replace):
    """Store arrays with a checksum, which is not decoded here."""

    def edit(file):
        for name in names:
            values = file[name][:]
            replace(file, name, values, chunks=(7, *values.shape[1:]), fletcher32=True)

    return edit


@pytest.fixture
def make(write_h5ad, replace):
    """Write a file of a sparse matrix and a dense layer, in which some arrays are slow."""

    def write(*names) -> Path:
        layers = {"scaled": COUNTS.astype(np.float64)}
        edit = slowly(*names, replace=replace)
        X = sp.csr_matrix(COUNTS)
        path: Path = write_h5ad(X, layers=layers, compression="gzip", edit=edit)
        return path

    return write


def opened(paths):
    return open_collection(paths, elements=["X", "layers/scaled"])


def as_stored(path, element):
    """The oracle: a row of the table, by anndata and h5py."""
    with h5py.File(path) as file:
        stored = ad.io.sparse_dataset(file[element]) if element == "X" else file[element]
        values = file["X/data"] if element == "X" else file[element]
        per_chunk = values.chunks[0]
        if element == "X":
            per_chunk = min(len(COUNTS), per_chunk * len(COUNTS) / values.size)
        return {
            "location": str(path),
            "element": element,
            "n_cells": stored.shape[0],
            "layout": getattr(stored, "format", "dense"),
            "dtype": str(values.dtype),
            "codec": f"{values.compression} {values.compression_opts}"
            if values.compression
            else "none",
            "chunk_shape": values.chunks,
            "rows_per_chunk": float(per_chunk),
            "is_fast": not values.fletcher32,
            "reason": REASON if values.fletcher32 else None,
        }


def test_the_table_has_a_row_for_each_element_of_each_file(make):
    paths = [make(), make("X/data", "layers/scaled"), make("layers/scaled")]
    expected = [as_stored(path, element) for path in paths for element in ("X", "layers/scaled")]
    pd.testing.assert_frame_equal(opened(paths).describe(), pd.DataFrame(expected))


def test_one_that_is_in_one_piece_has_no_chunks(write_h5ad):
    table = open_collection(write_h5ad(COUNTS)).describe()
    assert table["chunk_shape"].tolist() == [None]
    assert table["is_fast"].all()


def test_the_table_is_the_same_after_a_pickle(make):
    collection = opened([make(), make("X/data")])
    copy = pickle.loads(pickle.dumps(collection))
    pd.testing.assert_frame_equal(copy.describe(), collection.describe())


def test_repr_names_what_is_slow(make):
    fast, slow, half = make(), make("X/data", "layers/scaled"), make("layers/scaled")
    for paths, said in (
        ([fast], ""),
        ([slow], ", read slowly: X, layers/scaled"),
        ([fast, slow], f", read slowly: X of {slow.name}, layers/scaled of {slow.name}"),
        ([fast, slow, half], f", read slowly: X of {slow.name}, layers/scaled of 2 files"),
        ([slow, half], f", read slowly: X of {slow.name}, layers/scaled"),
    ):
        assert repr(opened(paths)).endswith(f"layers/scaled (dense float64), obs=[]{said})")


class TestWarning:
    @pytest.mark.parametrize(
        ("n_slow", "others"),
        [
            (1, ""),
            (2, " (1 other is also read slowly: see `collection.describe()`)"),
            (4, " (3 others are also read slowly: see `collection.describe()`)"),
        ],
    )
    def test_there_is_one_however_many_files_are_slow(self, make, n_slow, others):
        paths = [make(), *(make("X/data") for _ in range(n_slow))]
        with pytest.warns(UserWarning) as warned:  # noqa: PT030 - the whole message follows
            CellDataset(opened(paths), Streaming(), 8)
        line = f"{paths[1]}: `X` is read slowly, {REASON}; {REMEDY}{others}"
        assert [str(each.message) for each in warned] == [line]
        assert warned[0].filename == __file__
        assert opened(paths).slow_reading() == line

    def test_it_is_given_once_for_a_collection_and_its_copies(self, make):
        collection = opened(make("X/data"))
        with pytest.warns(UserWarning, match="read slowly"):
            CellDataset(collection, Streaming(), 8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CellDataset(collection, Streaming(), 4)
            dataset = CellDataset(pickle.loads(pickle.dumps(collection)), Streaming(), 8)
            assert sum(map(len, dataset.loader(num_workers=2))) == 40

    def test_none_where_all_is_fast_or_read_by_a_function(self, make):
        CellDataset(opened(make()), Streaming(), 8)
        CellDataset(
            opened(make("X/data")), Streaming(), 8, fetch_callback=lambda cells, rows: cells[rows]
        )

    def test_a_dtype_may_be_what_makes_it_slow(self, make):
        collection = opened(path := make())
        with pytest.warns(UserWarning) as warned:  # noqa: PT030
            CellDataset(collection, Streaming(), 8, dtype={"layers/scaled": "float16"})
        (line,) = {str(each.message) for each in warned}
        assert line == (
            f"{path}: `layers/scaled` is read slowly, through h5py: cellfeed does not convert "
            "float64 to float16; read it as float64, or write it as float16"
        )
