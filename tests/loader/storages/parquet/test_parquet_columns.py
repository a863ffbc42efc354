"""Columns of Parquet files of any name and type, in several files; pyarrow's are the right ones."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from tests.loader.sources.cells import labels_of
from tests.warm import python as warm

from cellfeed import (
    CellfeedError,
    ColumnError,
    MismatchError,
    ParquetSource,
    open_collection,
)

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 6
LISTS = {
    "genes": pa.array([[0, 2]] * N, pa.list_(pa.int32())),
    "expressions": pa.array([[1.0, 2.0]] * N, pa.list_(pa.float32())),
}
TEXT = ["x", None, "y", "x", "", "y"]


def write(folder, *files):
    """Write files of some columns beside lists."""
    folder.mkdir(exist_ok=True)
    for each in folder.iterdir():
        each.unlink()
    for k, columns in enumerate(files):
        pq.write_table(pa.table(LISTS | columns), folder / f"{k}.parquet")
    return folder


def values_of(path, name):
    """Return an obs column as a list, with None where a value is missing."""
    collection = open_collection(path, obs=[name])
    column = collection.obs[name]
    if hasattr(column, "categories"):
        return labels_of(collection, name)
    return [None if np.isnan(value) else value for value in column.values]


WRITES_VIEWS = Version(pa.__version__).major >= 19  # to Parquet
KINDS = {
    "text": [
        pa.string(),
        pa.large_string(),
        *([pa.string_view()] if WRITES_VIEWS else []),
        pa.dictionary(pa.int8(), pa.string()),
        pa.dictionary(pa.int32(), pa.large_string()),
        pa.null(),
    ],
    "numbers": [
        *(
            pa.from_numpy_dtype(f"{sign}int{bits}")
            for sign in ("", "u")
            for bits in (8, 16, 32, 64)
        ),
        pa.float16(),
        pa.float32(),
        pa.float64(),
        pa.null(),
    ],
    "booleans": [pa.bool_(), pa.null()],
}
VALUES = {
    "text": st.sampled_from(["", "a", "drug b", "é"]),
    "numbers": st.integers(0, 100),
    "booleans": st.booleans(),
}


@st.composite
def columns(draw):
    """Return an obs column of some files, of one kind but of any types."""
    kind = draw(st.sampled_from([*KINDS]))
    found = []
    for of in draw(st.lists(st.sampled_from(KINDS[kind]), min_size=1, max_size=3)):
        value = st.none() if of == pa.null() else st.one_of(st.none(), VALUES[kind])
        values = draw(st.lists(value, min_size=N, max_size=N))
        if kind == "numbers" and of == pa.float16():
            values = [None if each is None else np.float16(each) for each in values]
        made = pa.array(values, of.value_type if pa.types.is_dictionary(of) else of)
        found.append(made.dictionary_encode().cast(of) if pa.types.is_dictionary(of) else made)
    return found


@settings(max_examples=10)
@given(parts=columns(), name=st.sampled_from(["drug", "genes.x", "genes.list", "a.b.c", "é ü"]))
def test_obs_columns_are_those_that_pyarrow_reads(tmp_path_factory, parts, name):
    folder = write(tmp_path_factory.getbasetemp() / "obs", *({name: part} for part in parts))
    wanted = [
        value
        for k in range(len(parts))
        for value in pq.read_table(folder / f"{k}.parquet")[name].to_pylist()
    ]
    assert values_of(folder, name) == wanted


# duckdb writes the third by default, in files of version 2.
TEXT_ENCODINGS = ["PLAIN", "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"]


@pytest.mark.parametrize("encoding", TEXT_ENCODINGS)
@pytest.mark.parametrize("of", KINDS["text"][: 2 + WRITES_VIEWS])
@pytest.mark.parametrize("n_files", [1, 2])
def test_text_in_all_encodings(tmp_path, encoding, of, n_files):
    table = pa.table(LISTS | {"drug": pa.array(TEXT, of), "plate": ["p"] * N})
    options = {"use_dictionary": ["plate"], "column_encoding": {"drug": encoding}}
    pq.write_table(table, tmp_path / "0.parquet", row_group_size=4, **options)
    if n_files == 2:
        pq.write_table(table, tmp_path / "1.parquet")
    assert values_of(tmp_path, "drug") == TEXT * n_files
    assert values_of(tmp_path, "plate") == ["p"] * N * n_files


LIST_TYPES = [
    pa.list_,
    pa.large_list,
    *([pa.list_view, pa.large_list_view] if WRITES_VIEWS else []),
    lambda of: pa.list_(of, 3),
]
GENE_TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()]


@settings(max_examples=8)
@given(data=st.data())
def test_lists_of_any_type_and_name_that_differ_between_files(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "lists"
    folder.mkdir(exist_ok=True)
    names = data.draw(st.sampled_from([("a.g", "a.v"), ("genes", "genes.v"), ("v.list", "v")]))
    wanted = []
    for k in range(2):
        make = data.draw(st.sampled_from(LIST_TYPES))
        genes = np.argsort(np.random.default_rng(k).random((N, 9)))[:, :3].tolist()
        values = data.draw(st.sampled_from([*GENE_TYPES, pa.float16(), pa.float32(), pa.float64()]))
        numbers = np.arange(3 * N).reshape(N, 3).astype(values.to_pandas_dtype())
        made = [
            pa.array(genes, make(data.draw(st.sampled_from(GENE_TYPES)))),
            pa.array([*numbers], make(values)),
        ]
        pq.write_table(pa.table(dict(zip(names, made, strict=True))), folder / f"{k}.parquet")
        wanted.append(np.zeros((N, 9)))
        np.put_along_axis(wanted[-1], np.array(genes), numbers.astype(float), axis=1)
    source = ParquetSource(folder, genes=names[0], values=names[1], n_vars=9)
    assert np.array_equal(open_collection(source)[:].X.toarray(), np.vstack(wanted))


def test_the_first_file_may_have_empty_lists_only(tmp_path):
    empty = pa.table({name: [[]] * 3 for name in LISTS})
    for k, table in enumerate((empty, pa.table(LISTS))):
        pq.write_table(table, tmp_path / f"{k}.parquet")
    X = open_collection(tmp_path)[:].X
    assert X.dtype == np.float32
    assert X.toarray().tolist() == [[0, 0, 0]] * 3 + [[1, 0, 2]] * N


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ([{"x": [2**60 + 1, None] * 3}], ColumnError, f"'x' has {2**60 + 1}, which float64, the"),
        (
            [{"x": TEXT}, {"x": range(N)}],
            MismatchError,
            r"1\.parquet: .* 'x' .* int64, but .* str",
        ),
        ([{"x": [True] * N}, {"x": range(N)}], MismatchError, r"1\.parquet: .* int64, but .* bool"),
        ([{}, {"x": TEXT}], ColumnError, r"0\.parquet: has no column 'x', which other files have"),
        ([{"x": [2**60 + 1] * N}, {"x": [0.5] * N}], ColumnError, r"0\.parquet: .* 'x' .* double"),
    ],
)
def test_what_is_no_obs_column_is_told_by_file_column_and_type(tmp_path, files, error, said):
    folder = write(tmp_path, *({k: pa.array([*v]) if isinstance(v, range) else v
                                for k, v in each.items()} for each in files))  # fmt: skip
    assert len(open_collection(folder)) == N * len(files)
    with pytest.raises(error, match=said):
        open_collection(folder, obs=["x"])


@pytest.mark.parametrize(
    "values", [pa.array([0] * N, pa.date32()), [[1]] * N, [b"a"] * N, [{"a": 1}] * N]
)
def test_what_cannot_be_in_obs_is_refused_by_its_type(tmp_path, values):
    folder = write(tmp_path, {"x": values, "drug": TEXT})
    said = f"column 'x' is of type {pa.array(values).type}".replace("[", r"\[").split("<")[0]
    for name, why in (("x", said), ("genes", "column 'genes' has genes or their values")):
        with pytest.raises(ColumnError, match=rf"0\.parquet: {why}"):
            open_collection(folder, obs=[name])
    assert open_collection(folder).obs_columns == ("drug",)
    later = write(tmp_path, {"x": TEXT}, {"x": values})
    with pytest.raises(ColumnError, match=rf"1\.parquet: {said}"):
        open_collection(later, obs=["x"])


@pytest.mark.parametrize("twice", ["drug", "genes"])
def test_two_columns_of_one_name(tmp_path, twice):
    names = [*LISTS, "drug", twice]
    arrays = [*LISTS.values(), pa.array(TEXT), LISTS.get(twice, pa.array(TEXT))]
    pq.write_table(pa.Table.from_arrays(arrays, names), tmp_path / "cells.parquet")
    with pytest.raises(ColumnError, match=rf"cells\.parquet: has 2 columns named '{twice}'"):
        open_collection(tmp_path, obs=["drug"])


# Damaged footers


def damaged(content, at, mask):
    return content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]


ATTEMPT = """
import sys
from cellfeed import ParquetSource, open_collection, CellfeedError
for path in sys.argv[1:]:
    try:
        print(open_collection(ParquetSource(path, n_vars=9))[:].X.sum())
    except CellfeedError as error:
        print("refused", str(error).count("\\n"), path in str(error))
"""


@pytest.mark.process
def test_codecs_that_are_not_known_do_not_end_the_process(tmp_path):
    pq.write_table(pa.table(LISTS), tmp_path / "cells.parquet")
    content = (tmp_path / "cells.parquet").read_bytes()
    at = content.rindex(b"\x07element\x15\x02") + 9
    paths = [tmp_path / f"{mask}.parquet" for mask in (1, 0x40, 0x82)]
    for path in paths:
        path.write_bytes(damaged(content, at, int(path.stem)))
    assert warm.output_of("-c", ATTEMPT, *paths).splitlines() == ["refused 0 True"] * 3


@pytest.mark.process
def test_no_damaged_footer_ends_the_process(tmp_path):
    """Of 300 such files, some do if pyarrow is asked for the columns of row groups."""
    pq.write_table(pa.table(LISTS), tmp_path / "cells.parquet")
    content, random = (tmp_path / "cells.parquet").read_bytes(), np.random.default_rng(0)
    first = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    paths = [tmp_path / f"{k}.parquet" for k in range(300)]
    for path in paths:
        at, mask = random.integers(first, len(content) - 8), random.integers(1, 256)
        path.write_bytes(damaged(content, int(at), int(mask)))
    assert len(warm.output_of("-c", ATTEMPT, *paths).splitlines()) == 300


@given(data=st.data())
def test_bytes_of_the_footer_that_are_others(tmp_path_factory, data):
    """One line that names the file, or all rows; they may have other values."""
    path = tmp_path_factory.getbasetemp() / "footer.parquet"
    codec = data.draw(st.sampled_from(["none", "zstd", "brotli"]))
    columns = LISTS | {"drug": TEXT}
    pq.write_table(pa.table(columns), path, row_group_size=4, compression=codec)
    content = path.read_bytes()
    first = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(first, len(content) - 1))
        content = damaged(content, at, data.draw(st.integers(1, 255)))
    path.write_bytes(content)
    try:
        collection = open_collection(ParquetSource(path, n_vars=9), obs=["drug"])
        cells = collection[:]
    except CellfeedError as error:
        said = str(error)
        is_one_line = str(path) in said and "\n" not in said
        assert is_one_line, said
    else:
        assert cells.X.shape == (N, 9)


def test_footers_are_kept_as_long_as_the_collection(tmp_path):
    source: Any = open_collection(write(tmp_path / "data", {"plate": pa.array(TEXT)})).sources[0]
    kept = weakref.ref(source._files)
    del source
    gc.collect()
    assert kept() is None
