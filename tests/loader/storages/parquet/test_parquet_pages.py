"""Pages of lists that cellfeed decodes itself: the rows that were written, or one line of error.

`only_here` fails if pyarrow is asked for rows.
"""

import contextlib
import os
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.sources.suites import Suite

from cellfeed import (
    BlockShuffling,
    CellDataset,
    CellfeedError,
    FormatError,
    ParquetSource,
    open_collection,
)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from tests.loader.storages.parquet.written import (  # noqa: E402
    OTHER_ENCODINGS,
    lists_of,
    obs_columns,
    write_files,
    write_groups,
)

from cellfeed.rows import CsrRows, FoundRows  # noqa: E402
from cellfeed.storages.parquet import _files  # noqa: E402
from cellfeed.storages.parquet import _source as _parquet  # noqa: E402
from cellfeed.storages.parquet._files import ParquetFiles  # noqa: E402
from cellfeed.storages.parquet._lists import Lists  # noqa: E402
from cellfeed.storages.parquet._source import ParquetLists  # noqa: E402

N_GENES = 300


@contextlib.contextmanager
def only_here():
    """Fail if pyarrow is asked for rows."""
    asked = AssertionError("pyarrow was asked for rows")
    with mock.patch.object(ParquetFiles, "batches", side_effect=asked):
        yield


@st.composite
def tables(draw):
    """Return a table with lists, and the lists as arrays."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    n_rows, longest = draw(st.integers(1, 60)), draw(st.sampled_from([1, 3, 40, 250]))
    lengths = random.integers(0, longest + 1, n_rows)
    if draw(st.booleans()):
        lengths[random.random(n_rows) < 0.5] = 0
    n_distinct = draw(st.sampled_from([1, 2, 17, N_GENES]))
    kinds = ["int32", "int64", "uint16", "uint32"]
    genes = random.integers(0, n_distinct, lengths.sum()).astype(draw(st.sampled_from(kinds)))
    kinds = ["float32", "float64", "int16", "uint8", "int64", "uint32"]
    dtype = np.dtype(draw(st.sampled_from(kinds)))
    values = random.integers(0, draw(st.sampled_from([1, 3, 200])) + 1, lengths.sum())
    values = values.astype(dtype) / 2 if dtype.kind == "f" else values.astype(dtype)
    values = values.astype(dtype)
    is_large = draw(st.booleans())
    of, offset = (pa.LargeListArray, pa.int64()) if is_large else (pa.ListArray, pa.int32())
    make = pa.large_list if is_large else pa.list_
    offsets = pa.array(np.append(0, np.cumsum(lengths)), offset)
    columns, fields = {"row": pa.array(np.arange(n_rows))}, [pa.field("row", pa.int64())]
    for name, flat in (("genes", pa.array(genes)), ("expressions", pa.array(values))):
        item = pa.field(
            draw(st.sampled_from(["item", "element"])), flat.type, nullable=draw(st.booleans())
        )
        columns[name] = of.from_arrays(offsets, flat, type=make(item))
        fields.append(pa.field(name, make(item), nullable=draw(st.booleans())))
    fields = draw(st.permutations(fields))
    table = pa.Table.from_arrays([columns[each.name] for each in fields], schema=pa.schema(fields))
    return table, lengths, genes.astype(np.int32), values


OPTIONS = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4"]),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
    },
    optional={
        "use_dictionary": st.booleans(),
        "dictionary_pagesize_limit": st.sampled_from([8, 100, 1000]),
        "data_page_size": st.sampled_from([1, 64, 1000]),
        "write_batch_size": st.sampled_from([1, 7, 100]),
        "write_page_index": st.just(value=True),
        "write_page_checksum": st.just(value=True),
        "write_statistics": st.just(value=False),
        "use_compliant_nested_type": st.just(value=False),
        "version": st.sampled_from(["1.0", "2.4", "2.6"]),
    },
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("pages") / "cells.parquet"


@given(
    case=tables(),
    options=OPTIONS,
    groups=st.lists(st.integers(1, 60), min_size=1, max_size=3),
    data=st.data(),
)
def test_rows_are_those_that_were_written(path, case, options, groups, data):
    table, lengths, genes, values = case
    write_groups(path, table, groups, **options)
    source = ParquetSource(path, n_vars=N_GENES, n_markers=0)
    element = source.elements["X"]
    n = lengths.size
    bounds = sorted(data.draw(st.sets(st.integers(0, n), max_size=8)))
    runs = np.array(bounds[: len(bounds) // 2 * 2], np.int64).reshape(-1, 2)
    starts = np.cumsum(lengths) - lengths
    for wanted in (runs, np.array([[0, n]])):
        with only_here():
            found: Any = element.read_rows(wanted)
        rows = np.concatenate([np.arange(*run) for run in wanted] or [np.arange(0)])
        own = np.concatenate([np.arange(s, s + k) for s, k in zip(starts[rows], lengths[rows],
                              strict=True)] or [np.arange(0)])  # fmt: skip
        assert np.diff(found.indptr).tolist() == lengths[rows].tolist()
        assert found.indices.tolist() == genes[own].tolist()
        assert found.data.dtype == values.dtype
        assert np.array_equal(found.data, values[own])


def write(path, genes, values, **options):
    table = pa.table({"genes": genes, "expressions": values, "row": np.arange(len(genes))})
    return write_groups(path, table, [len(genes)], **options)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_other_rows_may_have_gaps(path, version):
    """Those that are read are not affected; those with gaps are refused, by name."""
    genes = [[1, 2], None, [], [3, None], [4], [5, 6], []]
    values = [[1.0, 2.0], None, [], [3.0, 4.0], [5.0], [6.0, 7.0], []]
    write(path, genes, values, data_page_version=version)
    collection = open_collection(ParquetSource(path, n_vars=9))
    with only_here():
        assert collection[[0, 2, 4, 5, 6]].X.sum(axis=1).tolist() == [3, 0, 5, 13, 0]
    for row in (1, 3):
        with pytest.raises(CellfeedError, match="row group 0: column 'genes': not every cell has"):
            collection[[row]]


@pytest.mark.parametrize(
    ("options", "is_read_here"),
    [
        ({}, True),
        ({"use_dictionary": False}, True),
        ({"column_encoding": {"genes.list.element": "DELTA_BINARY_PACKED"}}, False),
        ({"column_encoding": {"expressions.list.element": "BYTE_STREAM_SPLIT"}}, False),
        ({"compression": "brotli"}, False),
    ],
)
def test_what_is_encoded_in_another_way(path, options, is_read_here):
    if "column_encoding" in options:
        options = options | {"use_dictionary": False}
    random = np.random.default_rng(0)
    genes = [np.sort(random.choice(N_GENES, 20, replace=False)) for _ in range(50)]
    values = [random.random(20, dtype=np.float32) for _ in genes]
    write(path, genes, values, **options)
    collection = open_collection(ParquetSource(path, n_vars=N_GENES))
    with only_here() if is_read_here else contextlib.nullcontext():
        if is_read_here:
            X = collection[:].X
        else:
            with mock.patch.object(ParquetFiles, "column_bytes", side_effect=AssertionError):
                X = collection[:].X
    assert X.indices.tolist() == np.concatenate(genes).tolist()
    assert X.data.tolist() == np.concatenate(values).tolist()


def test_lists_that_cross_pages_and_large_groups(path):
    """A row may begin in one page and end some pages later; its values must be found in all."""
    random = np.random.default_rng(1)
    lengths = random.integers(0, 6000, 40)
    genes = [np.arange(k) for k in lengths]
    values = [random.integers(1, 9, k).astype(np.float32) for k in lengths]
    for version in ("1.0", "2.0"):
        options = {"data_page_size": 1000, "data_page_version": version, "write_batch_size": 64}
        write(path, genes, values, **options)
        collection = open_collection(ParquetSource(path, n_vars=6000))
        with only_here():
            for rows in ([0], [39], [3, 17, 18, 30], range(40)):
                X = collection[[*rows]].X
                assert np.array_equal(np.diff(X.indptr), lengths[[*rows]])
                assert np.array_equal(X.data, np.concatenate([values[row] for row in rows]))


def test_blocks_decode_each_cell_once(path):
    """Only the values of wanted rows are taken from pages, wherever fetches end."""
    random = np.random.default_rng(2)
    lengths = random.integers(1, 40, 400)
    genes = [np.arange(k) for k in lengths]
    table = pa.table({"genes": genes, "expressions": [g.astype(np.float32) for g in genes]})
    write_groups(path, table, [64], data_page_size=500)
    collection = open_collection(ParquetSource(path, n_vars=40))
    dataset = CellDataset(collection, BlockShuffling(64, align="chunks"), 16, 5, seed=0)
    taken, real = [], Lists.write

    def write(self, addresses, skipped):
        taken.append(self.lengths.sum() - skipped.sum())
        return real(self, addresses, skipped)

    copied = mock.patch.object(ParquetLists, "_in_memory", side_effect=AssertionError)
    with only_here(), copied, mock.patch.object(Lists, "write", write):
        n = sum(minibatch.X.values().numel() for minibatch in dataset)
    assert n == lengths.sum()
    assert sum(taken) == 2 * n


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("n_markers", [0, 3, 70])
def test_markers_in_several_pages_whatever_becomes_of_the_values(path, n_markers, dtype):
    """A list is begun anew, shortened or left out, and its values are cast."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(4)
    lengths = random.integers(0, 130, 60)
    genes = [np.sort(random.choice(N_GENES, k, replace=False)) for k in lengths]
    values = [random.integers(1, 9, k).astype(np.float32) for k in lengths]
    write(path, genes, values, data_page_size=100, write_batch_size=16)
    collection = open_collection(ParquetSource(path, n_vars=N_GENES, n_markers=n_markers))
    dataset = CellDataset(collection, BlockShuffling(3), 8, 4, seed=0, dtype=dtype)
    with only_here():
        cells = list(dataset)
    assert sorted(int(row) for each in cells for row in each.rows) == list(range(60))
    for each in cells:
        assert each.X.dtype == getattr(torch, dtype)
        dense = np.zeros((len(each), N_GENES))
        for k, row in enumerate(each.rows.tolist()):
            dense[k, genes[row][n_markers:]] = values[row][n_markers:]
        assert np.array_equal(each.X.to_dense().numpy(), dense)


def test_few_rows_of_a_large_group_do_not_keep_its_pages(path):
    """Two rows of 2,000 are there at once; their pages take far more memory than they do."""
    random = np.random.default_rng(5)
    genes = [np.arange(N_GENES)] * 2000
    values = [random.random(N_GENES, dtype=np.float32) for _ in genes]
    write(path, genes, values)
    collection = open_collection(ParquetSource(path, n_vars=N_GENES))
    made, real = list[CsrRows](), _parquet._found

    def found(rows: CsrRows) -> FoundRows:
        made.append(rows)
        return real(rows)

    with only_here(), mock.patch.object(_parquet, "_found", found):
        X = collection[[5, 1700]].X
        assert collection[:].X.nnz == 2000 * N_GENES
    assert [rows.shape[0] for rows in made] == [2]
    assert X.data.tolist() == [*values[5], *values[1700]]


@given(data=st.data())
def test_damaged_pages_without_checksums(path, data):
    """Values may be others, but nothing is read or written elsewhere, and errors are one line."""
    random = np.random.default_rng(3)
    genes = [np.sort(random.choice(N_GENES, 30, replace=False)) for _ in range(40)]
    values = [random.integers(1, 5, 30).astype(np.float32) for _ in genes]
    options = data.draw(OPTIONS)
    write(path, genes, values, **options | {"write_page_checksum": False})
    metadata, content = pq.read_metadata(path), bytearray(path.read_bytes())
    chunks = [metadata.row_group(0).column(k) for k in (0, 1)]
    first = min(each.dictionary_page_offset or each.data_page_offset for each in chunks)
    stop = first + sum(each.total_compressed_size for each in chunks)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(first, stop - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    collection = open_collection(ParquetSource(path, n_vars=N_GENES))
    try:
        X = collection[:].X
    except CellfeedError as error:
        said = str(error)
        is_one_line = "cells.parquet" in said and "\n" not in said
        assert is_one_line, said
    else:
        assert X.shape == (40, N_GENES)
        X.check_format()


@pytest.mark.parametrize("options", [{}, OTHER_ENCODINGS])
def test_a_file_that_is_replaced_while_it_is_read(path, monkeypatch, options):
    write(path, [[1, 2]], [[1.0, 2.0]], **options)
    collection, opened = open_collection(ParquetSource(path, n_vars=9)), []

    def open_and_replace(*arguments):
        opened.append(arguments)
        os.utime(path, ns=(0, 0))
        return real(*arguments)

    real = pa.OSFile if options else open
    where = (pa, "OSFile") if options else (_files, "open")
    monkeypatch.setattr(*where, open_and_replace, raising=False)
    with pytest.raises(FormatError, match=r"cells\.parquet: was replaced or written to"):
        collection[:]
    assert opened


def test_a_file_that_is_replaced_when_its_pages_are_retained(path):
    write(path, [[1, 2]], [[1.0, 2.0]])
    source = ParquetSource(path, n_vars=9)
    collection, element = open_collection(source), source.elements["X"]
    assert [collection[:].X.sum() for _ in range(3)] == [3, 3, 3]
    assert isinstance(element, ParquetLists)
    assert len(element.retained) == 1
    os.utime(path, ns=(0, 0))
    with pytest.raises(FormatError, match=r"cells\.parquet: was replaced or written to"):
        collection[:]


# The suite, in files, in folders and on a server

# Version 1.0 has no integers without a sign.
NEWER = OPTIONS.map(lambda options: options | {"version": "2.6"})
GROUPS = st.lists(st.integers(1, 12), min_size=1, max_size=4)  # ragged row groups


class TestLists(Suite):
    """Genes have token ids; cells may begin with a marker."""

    layouts = ("csr",)
    max_examples = 8

    def storages(self, layout, dtype):
        return st.fixed_dictionaries(
            {
                "groups": GROUPS,
                "options": NEWER,
                "n_files": st.integers(0, 3),
                "lists": st.fixed_dictionaries(
                    {},
                    optional={
                        "kind": st.sampled_from(["list", "large_list"]),
                        "with_marker": st.booleans(),
                        "dictionary": st.booleans(),
                    },
                ),
            }
        )

    def stored(self, path, case):
        made = case.storage
        has_marker = made["lists"].get("with_marker", False) and np.dtype(case.dtype).kind != "u"
        lists = lists_of(case, first_gene=3, **made["lists"] | {"with_marker": has_marker})
        table = pa.table(lists | obs_columns(case.obs))
        if made["n_files"]:
            write_files(path, table, made["n_files"], made["groups"], **made["options"])
        else:
            write_groups(path, table, made["groups"], **made["options"])
        genes = pd.DataFrame({"token_id": np.arange(3, 3 + case.n_vars)}, index=case.var.index)
        return ParquetSource(path, gene_table=genes, n_markers=int(has_marker))


@pytest.mark.slow
class TestOnServer(TestLists):
    """Files on a web server, read in byte ranges."""

    max_examples = 8

    @pytest.fixture
    def write(self, new_path, url_of):
        def write(case):
            path, made = new_path(".parquet"), case.storage
            table = pa.table(lists_of(case) | obs_columns(case.obs))
            write_groups(path, table, made["groups"], **made["options"])
            genes = pd.DataFrame({"token_id": range(case.n_vars)}, index=case.var.index)
            return ParquetSource(url_of(path), gene_table=genes, n_markers=0)

        return write


@pytest.mark.parametrize("retained_bytes", [0, 1 << 30, 20_000])
def test_pages_that_fit_in_memory_are_decompressed_twice_at_most(tmp_path, retained_bytes):
    """All rows are those written, whether all, none or some row groups of two sources fit."""
    counts = np.random.default_rng(0).poisson(0.5, (200, N_GENES)).astype(np.float32)
    table = pa.table(lists_of(sp.csr_matrix(counts)))
    paths = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    for k, path in enumerate(paths):
        write_groups(path, table.slice(100 * k, 100), [25])
    found = Lists.open.__func__  # type: ignore[attr-defined]
    with (
        mock.patch.object(_parquet, "_RETAINED_BYTES", retained_bytes),
        mock.patch.object(Lists, "open", mock.MagicMock(side_effect=partial(found, Lists))),
        only_here(),
    ):
        sources = [ParquetSource(path, n_vars=N_GENES) for path in paths]
        dataset = CellDataset(
            open_collection(sources), BlockShuffling(2), 8, fetch_factor=4, seed=0
        )
        for _ in range(3):
            for minibatch in dataset:
                assert np.array_equal(minibatch.X.to_dense().numpy(), counts[minibatch.rows])
        n_opened = Lists.open.call_count  # type: ignore[attr-defined]
        n_retained = sum(len(each.elements["X"].retained) for each in sources)  # type: ignore[attr-defined,misc]
    assert (n_opened <= 2 * 2 * 8) == (retained_bytes == 1 << 30)
    assert n_retained == 8 if retained_bytes == 1 << 30 else n_retained < 8
