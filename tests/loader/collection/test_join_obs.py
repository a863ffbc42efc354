import itertools
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.matrices import dense

from cellfeed import (
    CategoricalColumn,
    Cells,
    ColumnError,
    FormatError,
    MismatchError,
    NumericColumn,
    ParameterError,
    open_collection,
)

MISSING = [None, np.nan]


@pytest.fixture(scope="session")
def open_column(write_h5ad):
    """Write one file for each list of values, and open the column that they make together."""

    def open_(*parts, **options):
        files = [
            write_h5ad(np.zeros((len(values), 1), np.float32), {"column": values}, **options)
            for values in parts
        ]
        return open_collection(files, obs=["column"]).obs["column"]

    return open_


def assert_decodes_to(column, values) -> None:
    assert isinstance(column, CategoricalColumn)
    assert column.codes.dtype.kind == "i"
    decoded = column.decode(column.codes).tolist()
    assert decoded == [None if pd.isna(value) else value for value in values]
    assert len(set(column.categories.tolist())) == len(column.categories)


CATEGORICAL = {
    "other categories in another order": [
        pd.Categorical(["B", "T", "B"], categories=["T", "B"]),
        pd.Categorical(["NK", "B"], categories=["NK", "mono", "B"]),
    ],
    "missing": [pd.Categorical(["T", None, "B"]), pd.Categorical([np.nan, "B"])],
    "ordered": [
        pd.Categorical(["lo", "hi"], categories=["lo", "hi"], ordered=True),
        pd.Categorical(["lo", "hi"], categories=["hi", "lo"], ordered=True),
    ],
    "all missing in the second file": [pd.Categorical(["T", "B"]), pd.Categorical(MISSING)],
    "all missing in the first file": [pd.Categorical(MISSING), pd.Categorical(["T", "B"])],
    "all missing in every file": [pd.Categorical(MISSING), pd.Categorical(MISSING)],
    "text": [["T", "B", "T"], ["NK", "T"]],
    "text that never repeats": [["T", "B"], ["NK", "T", "mono"]],
    "text and categories": [["T", "B"], pd.Categorical(["B", "NK"])],
    "text that may be missing": [pd.array(["T", None], dtype="string"), ["B", "T"]],
    "booleans": [[True, False, True], [False]],
    "booleans that may be missing": [pd.array([True, None]), [False, True]],
    "categories that are booleans": [pd.Categorical([True, None]), [False]],
    "categories that are integers": [pd.Categorical([3, 1, None]), pd.Categorical([2, 3])],
    "categories that are fractions": [pd.Categorical([0.5, 2.0]), pd.Categorical([2, 10])],
    "an empty file between": [["T"], pd.Categorical([], categories=["B"]), ["T", "B"]],
}


@pytest.mark.parametrize("parts", CATEGORICAL.values(), ids=CATEGORICAL)
def test_categories_are_stable_across_files(open_column, parts):
    column = open_column(*parts)
    assert_decodes_to(column, itertools.chain(*parts))
    in_order_of_appearance = dict.fromkeys(
        itertools.chain(*(pd.Series(values).astype("category").cat.categories for values in parts))
    )
    assert column.categories.tolist() == list(in_order_of_appearance)


@pytest.mark.parametrize(("n", "dtype"), [(128, np.int8), (129, np.int16)])
def test_codes_are_no_larger_than_needed(open_column, n, dtype):
    values = [f"donor{number}" for number in range(n)]
    column = open_column(values)
    assert column.codes.dtype == dtype
    assert_decodes_to(column, values)


NUMERIC = {
    "floats with NaN": [[1.5, np.nan], [2.0]],
    "float32": [np.array([0.1, 0.2], np.float32)],
    "integers and floats": [[1, 2], [0.5]],
    "integers of two sizes": [np.array([1, 255], np.uint8), np.array([-1], np.int64)],
    "integers that may be missing": [pd.array([1, None, 3]), [4]],
    "integers that could be missing": [pd.array([1, 2]), pd.array([3])],
}


@pytest.mark.parametrize("parts", NUMERIC.values(), ids=NUMERIC)
def test_numbers_are_what_pandas_concatenates(open_column, parts):
    column = open_column(*parts)
    assert isinstance(column, NumericColumn)
    values = np.asarray(column.values, dtype=np.float64)
    expected = pd.concat([pd.Series(part) for part in parts])
    assert np.array_equal(values, expected.to_numpy(np.float64, na_value=np.nan), equal_nan=True)


@pytest.mark.parametrize("dtype", [">f8", ">i4"])
def test_big_endian_numbers_reach_torch(write_h5ad, replace, dtype):
    def edit(file):
        replace(file, "obs/column", np.array([1, 2, 3]), dtype=dtype)

    path = write_h5ad(np.zeros((3, 1), np.float32), {"column": [0, 0, 0]}, edit=edit)
    collection = open_collection(path, obs=["column"])
    assert collection[:].obs["column"].dtype.isnative
    assert collection[:].to_torch().obs["column"].tolist() == [1, 2, 3]


KINDS = {
    "text": ["T", "B"],
    "numbers": [1, 2],
    "booleans": [True, False],
    "categories that are numbers": pd.Categorical([1, 2]),
}


def numbers_of(column):
    assert isinstance(column, NumericColumn)
    return column.values  # noqa: PD011 - not pandas'


class TestIntegers:
    """They come out exactly, or are refused."""

    @pytest.mark.parametrize("dtype", ["<u8", ">u8"])
    def test_above_int64_are_refused(self, write_h5ad, dtype):
        values = np.array([1, 1 << 63], dtype)
        path = write_h5ad(np.zeros((2, 1), np.float32), {"column": values})
        problem = (
            f"^{path}: obs column 'column' has 9223372036854775808, above 9223372036854775807,"
        )
        with pytest.raises(ColumnError, match=problem):
            open_collection(path, obs=["column"])

    @pytest.mark.parametrize("dtypes", [("i8", "u8"), ("u8", "i8"), ("i4", "u8"), ("u8", "i1")])
    def test_signed_beside_unsigned_are_kept(self, write_h5ad, dtypes):
        largest = [min((1 << 63) - 1, int(np.iinfo(dtype).max)) for dtype in dtypes]
        files = [
            write_h5ad(np.zeros((2, 1), np.float32), {"column": np.array([5, n], dtype)})
            for n, dtype in zip(largest, dtypes, strict=True)
        ]
        collection = open_collection(files, obs=["column"])
        numbers = numbers_of(collection.obs["column"])
        assert numbers.dtype == np.int64
        assert numbers.tolist() == [5, largest[0], 5, largest[1]]
        assert collection[:].to_torch().obs["column"].tolist() == [5, largest[0], 5, largest[1]]

    @pytest.mark.parametrize(
        ("parts", "number", "dtype"),
        [
            *[
                ([np.array([-1], np.int64), np.array([n], np.uint64)], n, "int64")
                for n in (1 << 63, (1 << 64) - 1)
            ],
            *[
                ([np.array([0.5]), np.array([1, n], np.int64)], n, "float64")
                for n in ((1 << 53) + 1, -(1 << 53) - 1, (1 << 63) - 1)
            ],
            *[
                ([pd.array([1, (1 << 53) + 1, *missing], dtype="Int64")], (1 << 53) + 1, "float64")
                for missing in ([None], [])
            ],
        ],
    )
    def test_that_do_not_fit_the_common_dtype(self, open_column, parts, number, dtype):
        with pytest.raises(ColumnError, match=f"has {number}, which {dtype}, the common dtype"):
            open_column(*parts)

    def test_that_fit_in_int64_or_beside_fractions(self, open_column):
        values = np.array([0, (1 << 63) - 1], np.uint64)
        assert numbers_of(open_column(values)).tolist() == values.tolist()
        column = open_column(np.array([0.5]), np.array([1 << 53, -(1 << 60)], np.int64))
        assert numbers_of(column).tolist() == [0.5, float(1 << 53), -float(1 << 60)]

    def test_that_a_transform_makes_are_refused_too(self, plates):
        cells = open_collection(plates[0], obs=["number"])[:2]
        made = Cells(cells.elements, {"hash": np.array([1, 1 << 63], np.uint64)}, cells.rows)
        with pytest.raises(ColumnError, match=f"^obs column 'hash' has {1 << 63}, above"):
            made.to_torch()


@pytest.mark.skipif(np.dtype(np.longdouble).itemsize == 8, reason="it is float64 here")
def test_longdouble_is_refused(write_h5ad, replace):
    def edit(file):
        replace(file, "obs/column", file["obs/column"][:].astype(np.longdouble))

    path = write_h5ad(np.zeros((2, 1), np.float32), {"column": np.arange(2.0)}, edit=edit)
    problem = rf"^{path}: obs column 'column' has dtype float\d+, which is neither a numeric dtype"
    with pytest.raises(ColumnError, match=problem):
        open_collection(path, obs=["column"])


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_kinds_that_differ(open_column, first, second):
    expected = rf"\.h5ad: obs column 'column' has {second}, but {first} in .*\.h5ad; write the"
    with pytest.raises(MismatchError, match=expected):
        open_column(KINDS[first], KINDS[second])


def test_missing_categories_are_no_numbers(open_column):
    with pytest.raises(MismatchError, match="write the same kind to all files"):
        open_column([1.0, 2.0], pd.Categorical(MISSING))


class TestColumns:
    def test_only_those_asked_for_are_read_in_that_order(self, plates):
        collection = open_collection(plates, obs=["number", "plate"])
        assert list(collection.obs) == ["number", "plate"]
        assert not open_collection(plates).obs

    def test_one_that_is_absent_from_all_or_from_the_second_file(self, plates, write_h5ad):
        expected = rf"^{plates[0]}: obs has no column 'batch'.* plate, cell_type, number$"
        with pytest.raises(ColumnError, match=expected):
            open_collection(plates, obs=["plate", "batch"])
        path = write_h5ad(sp.csr_matrix(np.zeros((2, 11), np.float32)), {"plate": ["x", "y"]})
        with pytest.raises(ColumnError, match=f"^{path}: obs has no column 'number'"):
            open_collection([plates[0], path], obs=["number"])

    def test_one_that_was_not_opened_is_not_there_and_none_can_be_replaced(self, plates):
        obs = open_collection(plates, obs=["plate"]).obs
        told = r"^obs column 'number' was not opened \(opened: plate\); name it in `open_collection"
        with pytest.raises(ColumnError, match=told):
            obs["number"]
        assert "number" not in obs
        assert obs.get("number") is None
        with pytest.raises(TypeError):
            obs["plate"] = None  # type: ignore[index]


DAMAGES = {
    "a code out of range": lambda file, _: file["obs/column/codes"].write_direct(
        np.array([77, 0, 1], np.int8)
    ),
    "too short": lambda file, replace: replace(file, "obs/other", np.arange(1.0)),
    "all too short": lambda file, replace: [
        replace(file, "obs/column/codes", np.zeros(1, np.int8)),
        replace(file, "obs/other", np.arange(1.0)),
    ],
    "lost": lambda file, _: file.pop("obs/other"),
    "of an unknown encoding": lambda file, _: file["obs/other"].attrs.update(
        {"encoding-type": "a-thing-of-the-future"}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_columns(write_h5ad, replace, damage):
    path = write_h5ad(
        np.zeros((3, 1), np.float32),
        {"column": pd.Categorical(["T", "B", "T"]), "other": np.arange(3.0)},
        edit=lambda file: damage(file, replace),
    )
    with pytest.raises(
        FormatError, match=rf"^{path}: `?obs.* .*; (the file is|write the file|copy or download it)"
    ):
        open_collection(path, obs=["column", "other"])


class TestOldFiles:
    @pytest.mark.parametrize(
        ("name", "columns"),
        [
            ("scgen_valid.h5ad", ["condition", "cell_type", "n_counts", "mt_frac"]),
            ("pbmc68k_reduced.h5ad", ["bulk_labels", "louvain", "phase", "n_genes"]),
        ],
    )
    def test_real_ones_read_as_anndata_reads_them(
        self, shared_file, read_by_anndata, name, columns
    ):
        path = shared_file(name)
        collection = open_collection(path, obs=columns)
        expected = read_by_anndata(path)
        rows = np.random.default_rng(0).integers(0, len(collection), 300)
        cells = collection[rows]
        assert cells.X.dtype == expected.X.dtype
        assert np.array_equal(dense(cells.X), dense(expected.X)[rows])
        assert collection.var_names.tolist() == expected.var_names.tolist()
        for column in columns:
            joined = collection.obs[column]
            if isinstance(joined, CategoricalColumn):
                assert_decodes_to(joined, expected.obs[column])
                assert joined.categories.tolist() == expected.obs[column].cat.categories.tolist()
            else:
                assert np.array_equal(joined.values, expected.obs[column])

    def test_categories_kept_apart_and_referred_to(self, write_h5ad):
        """As anndata 0.7 wrote them."""

        def edit(file):
            obs = file["obs"]
            codes, categories = obs["column/codes"][:], obs["column/categories"][:]
            del obs["column"]
            kept = obs.create_group("__categories").create_dataset(
                "column", data=categories, dtype=h5py.string_dtype()
            )
            kept.attrs["ordered"] = False
            obs.create_dataset("column", data=codes).attrs["categories"] = kept.ref
            for frame in (obs, file["var"]):
                frame.attrs["encoding-version"] = "0.1.0"

        values = pd.Categorical(["T", None, "B", "T"], categories=["T", "B"])
        old = write_h5ad(np.eye(4, 3, dtype=np.float32), {"column": values}, edit=edit)
        new = write_h5ad(np.eye(2, 3, dtype=np.float32), {"column": ["B", "NK"]})
        column = open_collection([old, new], obs=["column"]).obs["column"]
        assert_decodes_to(column, [*values, "B", "NK"])
        assert isinstance(column, CategoricalColumn)
        assert column.categories.tolist() == ["T", "B", "NK"]


class TestMissingColumns:
    @pytest.fixture
    def files(self, write_h5ad):
        X = np.zeros((3, 1), np.float32)
        columns = {
            "drug": pd.Categorical(["a", "b", None]),
            "flag": [True, False, True],
            "text": ["x", "y", "x"],
            "count": np.arange(3),
            "share": np.array([0.5, np.nan, 1], np.float32),
        }
        return [write_h5ad(X), write_h5ad(X, columns), write_h5ad(X, {"count": np.arange(3) + 7})]

    @pytest.mark.parametrize("order", [[0, 1, 2], [1, 0, 2], [2, 1, 0]])
    def test_are_missing_values_where_asked(self, files, read_by_anndata, order):
        paths = [files[k] for k in order]
        names = ["drug", "flag", "text", "count", "share"]
        obs = open_collection(paths, obs=names, join_obs="outer").obs
        tables = [read_by_anndata(path).obs.reindex(columns=names) for path in paths]
        for name in ("drug", "flag", "text"):
            assert_decodes_to(obs[name], [value for each in tables for value in each[name]])
        for name, dtype in (("count", np.float64), ("share", np.float32)):
            expected = np.concatenate([each[name].to_numpy(dtype) for each in tables])
            values = obs[name].values  # noqa: PD011 - a column of ours
            assert values.dtype == dtype
            assert np.array_equal(values, expected, equal_nan=True)

    def test_are_refused_by_default_and_where_no_file_has_them(self, files):
        with pytest.raises(ColumnError, match=f"^{files[0]}: obs has no column 'drug'"):
            open_collection(files, obs=["drug"])
        with pytest.raises(ColumnError, match=f"^{files[1]}: obs has no column 'plate'; its col"):
            open_collection(files[1:], obs=["drug", "plate"], join_obs="outer")
        with pytest.raises(ParameterError, match=r"`join_obs` must be one of .same., .outer., but"):
            open_collection(files, obs=["drug"], join_obs="inner")  # type: ignore[arg-type]


PLAIN: list[Any] = [
    np.array([1, -2, 3], np.int8),
    np.array([1, 2, 3], np.uint16),
    np.array([1, 2, 2**63 + 5], np.uint64),
    np.array([0.5, np.nan, -1], np.float32),
    np.array([True, False, True]),
    pd.Categorical([None, None, None], categories=pd.Index([], dtype=object)),
    pd.Categorical([3, 1, 3]),
    pd.array([1, None, 3], dtype="Int64"),
    np.array(["x", "y", "x"], object),
]
TEXTS: list[Any] = [
    pd.Categorical(["b", None, "a"], categories=["c", "b", "a"]),
    pd.Categorical(["b", "ä", "b"]),
    pd.Categorical(["a", "b", "c", "a"], categories=["b", "a", "c"]),
    pd.Categorical([None, "c", "ä"], categories=["ä", "d", "c"]),
    pd.Categorical(["d", "d"], categories=["d", "a", "b", "c"]),
]


@pytest.fixture(scope="module")
def plain_files(write_h5ad):
    """Files of one column each, and what anndata reads of them."""
    paths = [
        write_h5ad(np.zeros((len(each), 1), np.float32), {"column": each})
        for each in (*TEXTS, *PLAIN)
    ]
    return [(path, ad.read_h5ad(path)) for path in paths]


@given(data=st.data())
def test_columns_of_files_are_those_that_anndata_reads_of_them(plain_files, data):
    last = data.draw(st.sampled_from([len(TEXTS) - 1, len(plain_files) - 1]))
    numbers = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=3, unique=True))

    def opened(cells):
        try:
            return open_collection(cells, obs=["column"]).obs["column"]
        except (ColumnError, MismatchError) as error:
            return type(error), str(error).partition("obs column")[2].partition(" in ")[0]

    by_cellfeed, by_anndata = (
        opened(each) for each in map(list, zip(*(plain_files[k] for k in numbers), strict=True))
    )
    if max(numbers) < len(TEXTS):
        assert_decodes_to(by_cellfeed, itertools.chain(*(TEXTS[k] for k in numbers)))
    assert type(by_cellfeed) is type(by_anndata)
    if isinstance(by_anndata, tuple):
        assert by_cellfeed == by_anndata
        return
    for name in by_anndata.__slots__:
        ours, theirs = (np.asarray(getattr(each, name)) for each in (by_cellfeed, by_anndata))
        assert ours.dtype == theirs.dtype
        assert np.array_equal(ours, theirs, equal_nan=theirs.dtype.kind == "f")
