"""Damaged and unequal Parquet files: one line that names the file, or the rows as they were."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    BlockShuffling,
    CellDataset,
    CellfeedError,
    ColumnError,
    FormatError,
    ParquetSource,
    PathError,
    open_collection,
)
from cellfeed._storages._parquet import ParquetLists

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.loader.storages.parquets import lists_of, obs_columns, write_groups  # noqa: E402

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


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged") / "cells.parquet"


@given(data=st.data())
def test_flipped_bytes(whole, damaged, data):
    """With checksums of pages, each is noticed, or is of what is not read."""
    content = bytearray(whole.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    damaged.write_bytes(content)
    try:
        X, rows = read(damaged)
    except CellfeedError as error:
        said = str(error)
        is_one_line = "cells.parquet" in said and "\n" not in said
        assert is_one_line, said
    else:
        pages_end = len(content) - pq.read_metadata(whole).serialized_size - 8
        if at < pages_end:
            assert np.array_equal(X, COUNTS)
            assert rows.tolist() == OBS["row"].tolist()


@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated(whole, damaged, share):
    content = whole.read_bytes()
    damaged.write_bytes(content[: int(share * len(content))])
    with pytest.raises(FormatError, match=r"cells\.parquet: its footer cannot be read by pyarrow"):
        read(damaged)


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


def test_a_column_of_a_gene_that_has_gaps(tmp_path):
    columns = {f"g{k}": COUNTS[:, k] for k in range(3)} | {"g3": [None, *COUNTS[1:, 3].tolist()]}
    path = tmp_path / "cells.parquet"
    pq.write_table(pa.table(columns), path)
    source = ParquetSource(path, gene_columns=list(columns))
    with pytest.raises(FormatError, match="row group 0: column 'g3': not every cell has a value"):
        open_collection(source)[:]
    with pytest.raises(ColumnError, match="has no column 'g9' of a gene"):
        ParquetSource(path, gene_columns=["g0", "g9"])


class TestUnequalFiles:
    def write(self, folder, *tables):
        folder.mkdir()
        for k, table in enumerate(tables):
            pq.write_table(table, folder / f"{k}.parquet", row_group_size=20)
        return folder

    def test_a_list_is_missing(self, tmp_path):
        folder = self.write(tmp_path / "cells", TABLE, TABLE.drop_columns(["genes"]))
        with pytest.raises(FormatError, match=r"1\.parquet: has no column 'genes', which .*0\.par"):
            read(folder)

    def test_a_list_is_of_another_type(self, tmp_path):
        lists = lists_of(sp.csr_matrix(COUNTS.astype(np.float64)))
        folder = self.write(tmp_path / "cells", TABLE, pa.table(lists | obs_columns(OBS)))
        with pytest.raises(
            FormatError, match=r"1\.parquet: column 'expressions' is of type .*doub"
        ):
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
        column: Any = collection.obs["drug"]
        assert column.decode(column.codes).tolist() == [*OBS["drug"], *OBS["drug"]]

    def test_a_file_without_rows(self, tmp_path):
        folder = self.write(tmp_path / "cells", TABLE.slice(0, 0), TABLE)
        assert np.array_equal(read(folder)[0], COUNTS)


class TestChangedFiles:
    @pytest.fixture
    def opened(self, whole, tmp_path):
        path = Path(shutil.copy(whole, tmp_path / "cells.parquet"))
        return path, open_collection(ParquetSource(path, n_vars=N_VARS))

    def test_replaced(self, opened):
        path, collection = opened
        assert np.array_equal(collection[:].X.toarray(), COUNTS)
        state = path.stat()
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
        with pytest.raises(FormatError, match=r"cells\.parquet: was replaced or written to"):
            collection[:]

    def test_the_working_folder_may_change(self, whole, tmp_path, monkeypatch):
        shutil.copy(whole, tmp_path / "cells.parquet")
        monkeypatch.chdir(tmp_path)
        collection = open_collection(ParquetSource("cells.parquet", n_vars=N_VARS))
        monkeypatch.chdir("/")
        assert np.array_equal(collection[:].X.toarray(), COUNTS)
        assert collection.where("row > 57").tolist() == [58, 59]

    def test_replaced_while_it_is_read(self, opened, monkeypatch):
        path, collection = opened
        decode = ParquetLists._decode

        def decode_and_replace(*arguments):
            found = decode(*arguments)
            os.utime(path, ns=(0, 0))
            return found

        monkeypatch.setattr(ParquetLists, "_decode", decode_and_replace)
        with pytest.raises(FormatError, match=r"cells\.parquet: was replaced or written to"):
            collection[:]

    def test_removed(self, opened):
        path, collection = opened
        path.unlink()
        with pytest.raises(PathError, match=r"cells\.parquet: was removed since it was opened"):
            collection[:]
