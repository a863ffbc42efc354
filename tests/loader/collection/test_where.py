import operator
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import BlockShuffling, CellDataset, ColumnError, ParameterError, open_collection

N_ROWS = 240
CLASSES = ["x`", "it's", "a & b", "a@b | `c`", 'say "é"\n']


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    """The obs of two files: categories, numbers and booleans, some of them missing."""
    rng = np.random.default_rng(3)
    types = np.array(["T", "B", "NK", None], object)[rng.integers(0, 4, N_ROWS)]
    score = rng.normal(size=N_ROWS).astype(np.float32)
    score[rng.random(N_ROWS) < 0.1] = np.nan
    return pd.DataFrame(
        {
            "cell_type": pd.Categorical(types, categories=["T", "B", "NK"]),
            "plate": pd.Categorical(np.repeat(["p1", "p2"], N_ROWS // 2)),
            "n_counts": rng.integers(0, 1000, N_ROWS),
            "score": score,
            "n_doublets": pd.array(
                [None if k % 5 == 0 else k % 7 for k in range(N_ROWS)], dtype="Int64"
            ),
            "is_live": rng.random(N_ROWS) < 0.5,
            "percent mito": rng.integers(0, 10, N_ROWS) / 10,
            "class": pd.Categorical(rng.choice(CLASSES, N_ROWS)),
        },
        index=[f"cell{k}" for k in range(N_ROWS)],
    )


@pytest.fixture(scope="module")
def paths(table, write_h5ad):
    half = N_ROWS // 2
    parts = [slice(0, half), slice(half, N_ROWS)]
    return [
        write_h5ad(
            sp.csr_matrix(np.eye(half, 3)), {name: table[name].array[part] for name in table}
        )
        for part in parts
    ]


@pytest.fixture(scope="module")
def collection(paths):
    return open_collection(paths, obs=["cell_type", "n_counts"])


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


# Each condition is its text, and a function that gives where it holds in a data frame.
numbers = st.sampled_from(["n_counts", "score", "n_doublets", "`percent mito`"])
operators = st.sampled_from([*COMPARE])
texts = st.sampled_from(["T", "B", "NK", "other", "p1"])


@st.composite
def terms(draw):
    """A number for each row."""
    name = draw(numbers)
    return name, lambda obs: obs[name.strip("`")]


flags = st.just(("is_live", lambda obs: obs["is_live"]))


@st.composite
def comparisons(draw):
    kind = draw(st.sampled_from(["numbers", "between", "text", "list", "numbers in"]))
    if kind == "numbers":
        (left, value), sign = draw(terms()), draw(operators)
        if draw(st.booleans()):
            right, other = draw(terms())
            return f"{left} {sign} {right}", lambda obs: COMPARE[sign](value(obs), other(obs))
        constant = draw(st.integers(-10, 1000) | st.floats(-3, 3))
        return f"{left} {sign} {constant}", lambda obs: COMPARE[sign](value(obs), constant)
    if kind == "between":
        low, high = draw(st.integers(0, 500)), draw(st.integers(300, 1000))
        return (
            f"{low} <= n_counts < {high}",
            lambda obs: (low <= obs["n_counts"]) & (obs["n_counts"] < high),
        )
    if kind == "text":
        column = draw(st.sampled_from(["cell_type", "plate"]))
        text, sign = draw(texts), draw(st.sampled_from(["==", "!="]))
        return f"{column} {sign} '{text}'", lambda obs: COMPARE[sign](obs[column], text)
    if kind == "numbers in":
        numbers_in = draw(st.lists(st.integers(-9, 1000), min_size=1))
        return f"n_counts in {tuple(numbers_in)}", lambda obs: obs["n_counts"].isin(numbers_in)
    chosen, negated = draw(st.lists(texts, min_size=1)), draw(st.booleans())
    word = "not in" if negated else "in"
    return f"cell_type {word} {chosen}", lambda obs: obs["cell_type"].isin(chosen) ^ negated


def combined(conditions):
    def both(pair):
        (left, first), (right, second) = pair
        return f"({left}) and ({right})", lambda obs: first(obs) & second(obs)

    def either(pair):
        (left, first), (right, second) = pair
        return f"({left}) or ({right})", lambda obs: first(obs) | second(obs)

    def negated(one):
        text, value = one
        return f"not ({text})", lambda obs: ~value(obs)

    pairs = st.tuples(conditions, conditions)
    return pairs.map(both) | pairs.map(either) | conditions.map(negated)


class TestWhere:
    @given(st.recursive(flags | comparisons(), combined, max_leaves=6))
    def test_rows_are_those_of_the_data_frame(self, collection, table, condition):
        text, holds = condition
        expected = holds(table).to_numpy(dtype=bool, na_value=False)
        assert np.array_equal(collection.where(text), np.flatnonzero(expected))

    def test_rows_are_indices_in_order(self, collection, table):
        rows = collection.where("cell_type == 'B' and n_counts > 500")
        assert rows.dtype == np.int64
        assert np.array_equal(
            rows, np.flatnonzero(table.eval("cell_type == 'B' and n_counts > 500"))
        )
        dataset = CellDataset(collection, BlockShuffling(2, indices=rows), 4, 2, seed=0)
        assert {*np.concatenate([each.rows for each in dataset])} == {*rows}

    @pytest.mark.parametrize("name", CLASSES)
    def test_text_may_hold_anything(self, collection, table, name):
        rows = collection.where(f"`class` == {name!r}")
        assert np.array_equal(rows, np.flatnonzero(table["class"] == name))

    def test_none_may_be_found(self, collection):
        assert collection.where("cell_type == 'no such type'").tolist() == []

    def test_columns_that_were_not_opened_are_not_kept(self, collection, table):
        assert np.array_equal(collection.where("score > 0"), np.flatnonzero(table["score"] > 0))
        assert list(collection.obs) == ["cell_type", "n_counts"]

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (
                pd.array([True, False, None, True], dtype="boolean"),
                {"v": [0, 3], "not v": [1], "v == False or v": [0, 1, 3], "v != False": [0, 3]},
            ),
            (pd.array([None] * 4, dtype="boolean"), {"not v": []}),
            # Missing integers are in no comparison, unlike NaN, which differs from every number.
            (pd.array([1, 2, None, 1], dtype="Int64"), {"v != 1": [1]}),
            (np.array([1.0, 2.0, np.nan, 1.0]), {"v != 1": [1, 2]}),
            (pd.Categorical([5, 10, 5, 10]), {"v == 5": [0, 2]}),
            # As in pandas, missing categories differ from all others.
            (
                pd.Categorical([True, False, None, True]),
                {"v != True": [1, 2], "not v == True": [1, 2], "v == False": [1]}
                | {"v not in [True]": [1, 2]},
            ),
        ],
    )
    def test_missing_values_and_categories(self, write_h5ad, values, expected):
        collection = open_collection(write_h5ad(np.eye(4), {"v": values}))
        assert {query: collection.where(query).tolist() for query in expected} == expected

    def test_categories_of_booleans_are_not_true_or_false(self, write_h5ad):
        path = write_h5ad(np.eye(4), {"flag": pd.Categorical([True, False, None, True])})
        for query in ("flag", "not flag"):
            with pytest.raises(ParameterError, match=r"not true or false; compare"):
                open_collection(path).where(query)

    def test_integers_that_are_missing_in_one_file(self, write_h5ad):
        nullable = write_h5ad(np.eye(4), {"n": pd.array([1, 2, None, 1], dtype="Int64")})
        plain = write_h5ad(np.eye(4), {"n": [1.0, 2.0, np.nan, 1.0]})
        assert open_collection([plain, nullable]).where("not n == 1").tolist() == [1, 5]

    def test_missing_values_of_parquet_are_those_that_pandas_wrote(self, tmp_path):
        pytest.importorskip("cellfeed.storages.parquet")
        pytest.importorskip("pyarrow")
        table = pd.DataFrame(
            {
                "genes": [[0], [1], [2], [0]],
                "expressions": [[1.0], [2.0], [3.0], [4.0]],
                "n": pd.array([1, 2, None, 1], dtype="Int64"),
                "flag": pd.array([True, None, False, True], dtype="boolean"),
                "number": [1.0, np.nan, 2.0, 3.0],
                "none": pd.array([None] * 4, dtype="boolean"),
            }
        )
        path, without = tmp_path / "a.parquet", tmp_path / "b.parquet"
        table.to_parquet(path)
        collection, again = open_collection(path), pd.read_parquet(path)
        for query in (
            "n != 1",
            "not n == 1",
            "flag != True",
            "not flag",
            "number != 1",
            "not none",
        ):
            expected = again.query(query, engine="python").index.tolist()
            assert collection.where(query).tolist() == expected, query
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pq.read_table(path).replace_schema_metadata(), without)
        assert open_collection(without).where("n != 1").tolist() == [1, 2]  # NaN
        assert open_collection([path, without]).where("none == False").tolist() == []

    def test_files_may_have_other_categories(self, write_h5ad):
        paths = [
            write_h5ad(np.eye(2), {"t": pd.Categorical(values)})
            for values in (["b", "c"], ["a", "b"])
        ]
        assert open_collection(paths).where("t in ['b', 'a']").tolist() == [0, 2, 3]


@pytest.fixture(scope="module")
def large(write_h5ad):
    n = 700_000
    rng = np.random.default_rng(0)
    obs = pd.DataFrame(
        {
            "type": pd.Categorical.from_codes(
                rng.integers(0, 3, n), pd.Index(["a rather long name", "b", "c"])
            ),
            "n": rng.integers(0, 100, n, dtype=np.int32),
        },
    )
    columns = {name: obs[name].array for name in obs}
    path = write_h5ad(sp.csr_matrix(np.zeros((n, 1), np.float32)), columns)
    return open_collection(path, obs=["type", "n"]), obs


@pytest.mark.slow
@pytest.mark.parametrize("text", ["type == 'a rather long name'", "type in ['a rather long name']"])
def test_many_rows_take_few_bytes_each(large, text):
    collection, obs = large
    tracemalloc.start()
    try:
        rows = collection.where(f"{text} and 3 <= n < 13")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    holds = (obs["type"] == "a rather long name") & obs["n"].between(3, 12)
    assert np.array_equal(rows, np.flatnonzero(holds))
    assert peak < 10 * len(collection)  # text for each row would take more than 50 bytes


HOSTILE = [
    "__import__('os').system('true')",
    "cell_type == __import__('os')",
    "@pd.compat.os.system('true')",
    "cell_type.str.upper() == 'B'",
    "cell_type.values",
    "n_counts.__class__",
    "(lambda: 1)()",
    "lambda: n_counts",
    "n_counts[0] > 1",
    "[x for x in n_counts]",
    "n_counts in (x for x in [1])",
    "(y := n_counts) > 1",
    "n_counts > 1 if is_live else 2",
    "f'{n_counts}' == 'B'",
    "sin(n_counts) > 1",
    "index > 3",
    "n_counts > 9 ** 9 ** 9",
    "n_counts > 10 ** 10 ** 10",
    "n_counts ** 1000000 > 1",
    "n_counts ** n_counts > 1",
    "n_counts > " + "9" * 5000,
    "n_counts > 10 ** 64 * 10 ** 64",
    "n_counts > 1 // 0",
    "n_counts > (-8) ** 0.5",
    "cell_type == 'a' * 1000000000",
    "n_counts > 1 << 100000",
    "n_counts @ n_counts",
    "n_counts + 1 > 2",
    "cell_type == 'B' & is_live",
    "~is_live",
    "n_counts == 1j",
    "n_counts > 1 and n_counts",
    "cell_type is 'B'",
    "cell_type == None",
    "cell_type == ['B']",
    "cell_type == {'B': 1}",
    "cell_type in n_counts",
    "'B' in cell_type",
    "'B' in ['B']",
    "cell_type in [n_counts]",
    "n_counts in [1 == 1]",
    "n_counts in [1 + n_counts]",
    "n_counts = 3",
    "n_counts > 1; n_counts",
    "n_counts > 1\nn_counts > 2",
    "cell_type == 'B",
    "`n_counts > 1",
    "1 == 1",
    "True",
    "'B'",
    "",
    "not 3",
    "n_counts",
    "cell_type",
    "cell_type > 'B'",
    "cell_type + 1 > 2",
    "cell_type == plate",
    "\0",
    "(" * 1000 + "n_counts" + ")" * 1000,
    "not " * 5000 + "is_live",
    "n_counts" + " + n_counts" * 5000 + " > 1",
]


REFUSED: list[tuple[Any, str | None]] = [
    (
        "cell_type == @x",
        r"^query 'cell_type == @x': is not an expression, or too long; write",
    ),
    ("tissue == 'lung'", "obs has no column 'tissue'; its columns are: cell_type, plate, n_cou"),
    ("cell_type < 'B'", "^query .cell_type < 'B'.: pandas cannot evaluate it: Unordered Categ"),
    (
        "n_counts + 1",
        r"'n_counts \+ 1' is not allowed; use comparisons of columns with colu",
    ),
    ("n_counts[0] > 3", r"'n_counts\[0\] > 3' is not allowed; .*; for others, compare `read_obs`"),
    ("`percent mito` % 2 > 1", r"'percent mito % 2 > 1' is not allowed; use comparisons"),
    ("cell_type in 'TB'", r"is not allowed; use .*, in \['a', 'b'\];"),
    (3, r"^query '3': is not an expression, .*; write text such as"),
    (None, None),
    *((query, None) for query in HOSTILE),
]


@pytest.mark.parametrize(("query", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_anything_else_is_refused_in_one_line(collection, query, message):
    with pytest.raises((ParameterError, ColumnError), match=message) as raised:
        collection.where(query)
    said = str(raised.value)
    assert "\n" not in said
    assert len(said) < 600
