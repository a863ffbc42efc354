"""Damaged and unequal Parquet files: one line that names the file, or the rows as they were."""

import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.sources.cells import labels_of

from cellfeed import (
    BlockShuffling,
    CellDataset,
    ColumnError,
    FormatError,
    ParquetSource,
    open_collection,
)
from cellfeed.testing import StorageDamageConformance

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.loader.storages.parquet.written import lists_of, obs_columns, write_groups  # noqa: E402

N_ROWS, N_VARS = 60, 9
COUNTS = np.random.default_rng(1).poisson(0.5, (N_ROWS, N_VARS)).astype(np.float32)
OBS = pd.DataFrame({"drug": [f"d{k // 7}" for k in range(N_ROWS)], "row": np.arange(N_ROWS)})
TABLE = pa.table(lists_of(sp.csr_matrix(COUNTS)) | obs_columns(OBS))


def read(path, **options):
    collection = open_collection(ParquetSource(path, n_vars=N_VARS, **options), obs=["drug", "row"])
    cells = collection[:]
    return cells.X.toarray(), cells.obs["row"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "cells.parquet"
    return write_groups(path, TABLE, [20, 7], write_page_checksum=True, compression="zstd")


class TestDamage(StorageDamageConformance):
    """With checksums of pages."""

    has_checksums = True

    @pytest.fixture
    def stored(self, whole, tmp_path):
        return Path(shutil.copy(whole, tmp_path))

    def value_ranges(self, path):
        return [(path, 4, path.stat().st_size - pq.read_metadata(path).serialized_size - 8)]


def column(name, change):
    """Return a table with one cell of a column changed."""
    values = TABLE[name].to_pylist()
    values[33] = change(values[33])
    at = TABLE.schema.get_field_index(name)
    return TABLE.set_column(at, name, pa.array(values, TABLE.schema.field(name).type))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (column("genes", lambda _: None), "column 'genes': not every cell has a list of numbers"),
        (column("genes", lambda v: [None, *v]), "column 'genes': not every cell has a list of num"),
        (column("expressions", lambda _: None), "column 'expressions': not every cell has a list"),
        (
            column("expressions", lambda v: [*v, 1.0]),
            "columns 'genes' and 'expressions': the lists",
        ),
        (column("genes", lambda v: [*v[:-1], 99]), "gene number 99 is not below `n_vars`, 9"),
        (column("genes", lambda v: [*v[:-1], -1]), "gene number -1 is not below `n_vars`, 9"),
    ],
)
def test_cells_that_are_not_whole(tmp_path, table, said):
    """Only those who read the row group are told."""
    path = write_groups(tmp_path / "cells.parquet", table, [20, 7])
    with pytest.raises(FormatError, match=rf"cells\.parquet: row group 2: {said}"):
        read(path)
    collection = open_collection(ParquetSource(path, n_vars=N_VARS))
    assert np.array_equal(collection[[3, 59]].X.toarray(), COUNTS[[3, 59]])
    dataset = CellDataset(collection, BlockShuffling(4), 8, 2, seed=0)
    with pytest.raises(FormatError, match=said):
        list(dataset)


class TestUnequalFiles:
    def write(self, folder, *tables):
        folder.mkdir()
        for k, table in enumerate(tables):
            pq.write_table(table, folder / f"{k}.parquet", row_group_size=20)
        return folder

    @pytest.mark.parametrize(
        ("other", "error", "said"),
        [
            (TABLE.drop_columns(["genes"]), ColumnError, "has no column 'genes', which other fil"),
            (
                TABLE.set_column(1, "expressions", TABLE["drug"].cast(pa.string())),
                FormatError,
                "column 'expressions' is of type string, not a list of numbers for each cell",
            ),
        ],
    )
    def test_a_list_is_missing_or_of_no_numbers(self, tmp_path, other, error, said):
        folder = self.write(tmp_path / "cells", TABLE, other)
        with pytest.raises(error, match=rf"1\.parquet: {said}"):
            read(folder)

    def test_an_obs_column_is_missing(self, tmp_path):
        folder = self.write(tmp_path / "cells", TABLE, TABLE.drop_columns(["drug"]))
        collection = open_collection(ParquetSource(folder, n_vars=N_VARS), obs=["row"])
        assert np.array_equal(collection[:].X.toarray(), np.vstack([COUNTS, COUNTS]))
        with pytest.raises(ColumnError, match=r"1\.parquet: has no column 'drug'"):
            read(folder)

    def test_columns_in_another_order_and_text_of_another_kind(self, tmp_path):
        other = TABLE.select(["row", "expressions", "drug", "genes"])
        codes = other["drug"].combine_chunks().dictionary_encode()
        folder = self.write(tmp_path / "cells", TABLE, other.set_column(2, "drug", codes))
        collection = open_collection(ParquetSource(folder, n_vars=N_VARS), obs=["drug"])
        assert np.array_equal(collection[:].X.toarray(), np.vstack([COUNTS, COUNTS]))
        assert labels_of(collection, "drug") == [*OBS["drug"], *OBS["drug"]]

    def test_a_file_without_rows(self, tmp_path):
        folder = self.write(tmp_path / "cells", TABLE.slice(0, 0), TABLE)
        assert np.array_equal(read(folder)[0], COUNTS)


def test_the_working_folder_may_change(whole, tmp_path, monkeypatch):
    shutil.copy(whole, tmp_path / "cells.parquet")
    monkeypatch.chdir(tmp_path)
    collection = open_collection(ParquetSource("cells.parquet", n_vars=N_VARS))
    monkeypatch.chdir("/")
    assert np.array_equal(collection[:].X.toarray(), COUNTS)
    assert collection.where("row > 57").tolist() == [58, 59]
