# ruff: noqa: S101 - a suite asserts
"""Tests of the contract of sources, for any storage."""

import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellfeed._errors import ColumnError
from cellfeed._runs import merge_consecutive
from cellfeed.bytes import Location
from cellfeed.collection import Collection
from cellfeed.dataset import CellDataset, ReadOptions
from cellfeed.dataset._loader import context_without_threads
from cellfeed.fetch import Reader
from cellfeed.rows import CategoricalColumn, Cells, ObsColumn, RaggedRows, summable
from cellfeed.sampling import BlockShuffling
from cellfeed.sources import Layout, Source
from cellfeed.sources._registry import open_location, storage_of

# Matrices for a suite to store, and the expected results, made from a few numbers and a seed.

Columns = Literal["ascending", "in any order", "some twice"]
Values = Literal["counts", "any"]

PLATES = ("plate 1", "plate 2", "plate 3")


@dataclass(frozen=True, kw_only=True)
class StoredCase:
    """A matrix with its annotations, to be written to the tested storage.

    Parameters
    ----------
    layout
        Layout of the stored matrix: CSR, dense or ragged.
    n_rows, n_vars
        Number of cells and of genes.
    dtype
        Dtype of the stored values, as NumPy names it, such as ``">f4"``.
    index_dtype, pointer_dtype
        Dtypes of the stored ``indices`` and ``indptr``.
    density
        Share of elements that are stored.
    columns
        Whether the columns of a row ascend, are in any order, or include duplicates.
    values
        Whether values are small counts, or also include extreme and special values of the dtype.
    element
        Name of the element: ``"X"``, ``"layers/counts"`` or ``"raw/X"``.
    further_shape
        Dimensions of a dense array after cells and genes.
    storage
        Options of the storage, as the suite's ``storages`` draws them.
    seed
        Seed of the random content.

    Examples
    --------
    >>> case = StoredCase(n_rows=2, n_vars=3, density=1.0)
    >>> case.indptr
    array([0, 3, 6], dtype=int32)
    >>> case.in_memory().shape
    (2, 3)
    """

    layout: Layout = "csr"
    n_rows: int
    n_vars: int
    dtype: str = "<f4"
    index_dtype: str = "<i4"
    pointer_dtype: str = "<i4"
    density: float = 0.5
    columns: Columns = "ascending"
    values: Values = "counts"
    element: str = "X"
    further_shape: tuple[int, ...] = ()
    storage: Any = None
    seed: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix: (n_rows, n_vars), and `further_shape`; (n_rows,) if ragged."""
        if self.layout == "ragged":
            return (self.n_rows,)
        return self.n_rows, self.n_vars, *self.further_shape

    @property
    def indptr(self) -> NDArray[Any]:
        """Row pointers of CSR or ragged rows, as they must be stored, shape (n_rows + 1,)."""
        return np.cumsum([0, *map(len, self._columns)]).astype(self.pointer_dtype)

    @property
    def indices(self) -> NDArray[Any]:
        """Column of each CSR element, as it must be stored, shape (n_elements,)."""
        return np.concatenate([np.empty(0, np.int64), *self._columns]).astype(self.index_dtype)

    @property
    def data(self) -> NDArray[Any]:
        """Values of CSR elements or ragged rows, as they must be stored, shape (n_elements,)."""
        return self._values(sum(map(len, self._columns)))

    @property
    def dense(self) -> NDArray[Any]:
        """The dense matrix, as it must be stored, of `shape`."""
        values = self._values(math.prod(self.shape)).reshape(self.shape)
        is_stored = self._random(1).random(values.shape) < self.density
        return np.where(is_stored, values, np.zeros((), values.dtype)).astype(self.dtype)

    @property
    def matrix(self) -> Any:
        """The matrix as it must be stored: `dense`, or a `scipy.sparse.csr_matrix` of its parts."""
        if self.layout == "dense":
            return self.dense
        parts = (self.data, self.indices, self.indptr.astype(np.int64))
        return sp.csr_matrix(parts, shape=(self.n_rows, self.n_vars))

    @cached_property
    def obs(self) -> pd.DataFrame:
        """The obs table: ``plate``, categorical, and ``number``, both with missing values."""
        random = self._random(2)
        plates = random.integers(-1, len(PLATES), size=self.n_rows)
        numbers = np.where(random.random(self.n_rows) < 0.2, np.nan, np.arange(self.n_rows))  # noqa: PLR2004 - some
        return pd.DataFrame(
            {
                "plate": pd.Categorical.from_codes(plates, categories=pd.Index(PLATES)),
                "number": numbers,
            },
            index=pd.Index([f"cell{k}" for k in range(self.n_rows)], dtype=object),
        )

    @property
    def var(self) -> pd.DataFrame:
        """The table of genes, which has only names; it is empty for ragged rows."""
        n_vars = 0 if self.layout == "ragged" else self.n_vars
        return pd.DataFrame(index=pd.Index([f"gene{k}" for k in range(n_vars)], dtype=object))

    @property
    def dtype_in_memory(self) -> np.dtype[Any]:
        """Expected dtype of the values that are read, unless another is requested."""
        native = np.dtype(self.dtype).newbyteorder("=")
        widened = self.layout == "csr" and native == np.float16  # SciPy has none of these
        return np.dtype(np.float32) if widened else native

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Number of stored elements in each row."""
        if self.layout == "dense":
            return np.full(self.n_rows, math.prod(self.shape[1:]), np.int64)
        return np.array([len(columns) for columns in self._columns], np.int64)

    def in_memory(self, dtype: np.dtype[Any] | None = None) -> Any:
        """Return the oracle: the dense matrix, of `shape`, or `RaggedRows`.

        Values are cast as by `numpy.ndarray.astype`, and duplicates are summed.
        """
        dtype = self.dtype_in_memory if dtype is None else dtype
        with np.errstate(over="ignore"):
            if self.layout == "ragged":
                return RaggedRows(self.indptr.astype(np.int64), self.data.astype(dtype))
            if self.layout == "dense":
                return self.dense.astype(dtype)
            matrix = np.zeros((self.n_rows, self.n_vars), dtype)
            rows = np.repeat(np.arange(self.n_rows), self.row_lengths)
            np.add.at(matrix, (rows, self.indices.astype(np.int64)), self.data.astype(dtype))
            return matrix

    @cached_property
    def _columns(self) -> list[NDArray[np.int64]]:
        random = self._random(3)
        rows = list[NDArray[np.int64]]()
        for _ in range(self.n_rows):
            columns = np.flatnonzero(random.random(self.n_vars) < self.density)
            if random.random() < 0.2:  # noqa: PLR2004 - some cells have nothing
                columns = columns[:0]
            if self.columns == "some twice" and columns.size:
                columns = np.append(columns, random.choice(columns))
            rows.append(columns if self.columns == "ascending" else random.permutation(columns))
        return rows

    def _values(self, n: int) -> NDArray[Any]:
        dtype, random = np.dtype(self.dtype), self._random(4)
        counts = random.integers(0, 8, n)
        if self.values == "counts":
            return counts.astype(dtype)
        odd = _odd_values(dtype.newbyteorder("="))
        is_odd = random.random(n) < 0.3  # noqa: PLR2004 - some
        odd_values = odd[random.integers(len(odd), size=n)]
        return np.where(is_odd, odd_values, counts.astype(odd.dtype)).astype(dtype)

    def _random(self, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, purpose])


def _odd_values(dtype: np.dtype[Any]) -> NDArray[Any]:
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return np.array([limits.min, limits.max, limits.max // 2 + 1, limits.max // 3], dtype)
    numbers = np.finfo(dtype)
    odd = [numbers.min, numbers.max, numbers.tiny, -0.0, 0.1, np.inf, -np.inf, np.nan]
    return np.array(odd, dtype)


# Running the checks of a suite over examples that hypothesis draws.


def for_all(
    check: Callable[..., None], *, max_examples: int, **drawn: st.SearchStrategy[Any]
) -> None:
    """Call ``check`` with drawn arguments, the same in each run.

    This is not a decorator of the tests, since they draw from attributes of the subclass.

    Parameters
    ----------
    check
        The function with assertions.
    max_examples
        Maximum number of calls; a hypothesis profile may lower it.
    **drawn
        Strategies of the arguments.
    """
    configured = settings(
        max_examples=min(max_examples, settings().max_examples),
        deadline=None,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    configured(given(**drawn)(check))()


# The suite.

_OBS = ("plate", "number")
_CAST_TO = ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")

_COLUMNS: Sequence[Columns] = ("ascending", "ascending", "in any order", "some twice")
_VALUES: st.SearchStrategy[Values] = st.sampled_from(get_args(Values))

Write = Callable[[StoredCase], Path | Source]


class SourceConformance:
    """Tests that every source must pass; a subclass inherits them and stores the cases.

    A subclass supplies the fixture ``write``, which returns a function that stores a
    `StoredCase` and returns either a path that `open_collection` takes, or an open source.
    hypothesis draws the cases, the same ones in each run. Other attributes and methods may be
    overridden.

    Attributes
    ----------
    layouts
        Layouts of the storage; "ragged" cannot be combined with others.
    dtypes, index_dtypes
        Dtypes of values and of column indices that it can store, as NumPy names them.
    elements
        Elements that it can store.
    further_shapes
        Dimensions that dense arrays can have after cells and genes; ``()`` for none.
    max_examples
        Maximum number of cases that each test tries; a hypothesis profile may lower it.

    Examples
    --------
    >>> import itertools
    >>> import anndata as ad
    >>> class TestMyStorage(SourceConformance):
    ...     layouts = ("csr",)
    ...
    ...     @pytest.fixture
    ...     def write(self, tmp_path):
    ...         numbers = itertools.count()
    ...
    ...         def write(case):
    ...             path = tmp_path / f"{next(numbers)}.h5ad"
    ...             ad.AnnData(case.matrix, obs=case.obs, var=case.var).write_h5ad(path)
    ...             return path
    ...
    ...         return write
    """

    layouts: Sequence[Layout] = ("csr", "dense")
    dtypes: Sequence[str] = ("<f4", "<f8", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8")
    index_dtypes: Sequence[str] = ("<i4", "<i8")
    elements: Sequence[str] = ("X",)
    further_shapes: Sequence[tuple[int, ...]] = ((),)
    max_examples: int = 50

    def storages(self, layout: Layout, dtype: np.dtype[Any]) -> st.SearchStrategy[Any]:  # noqa: ARG002 - for subclasses
        """Return a hypothesis strategy for `StoredCase.storage`, such as compression and chunks."""
        return st.none()

    def cases(
        self,
        *,
        min_rows: int = 1,
        n_vars: int | None = None,
        element: str | None = None,
        further_shape: tuple[int, ...] | None = None,
    ) -> st.SearchStrategy[StoredCase]:
        """Return a hypothesis strategy of cases that can be stored, which shrinks to simple ones.

        None allows any value.
        """
        elements = self.elements if element is None else (element,)
        further_shapes = self.further_shapes if further_shape is None else (further_shape,)

        @st.composite
        def cases(draw: st.DrawFn) -> StoredCase:
            further = draw(st.sampled_from(further_shapes))
            layout = "dense" if further else draw(st.sampled_from(self.layouts))
            dtype = draw(st.sampled_from(self.dtypes))
            genes = draw(st.integers(0, 12)) if n_vars is None else n_vars
            columns = draw(st.sampled_from(_COLUMNS))
            return StoredCase(
                layout=layout,
                n_rows=draw(st.integers(min_rows, 40)),
                n_vars=genes,
                dtype=dtype,
                index_dtype=draw(st.sampled_from(self.index_dtypes)),
                pointer_dtype=draw(st.sampled_from(["<i4", "<i8", "<u4", "<u8", ">i8"])),
                density=draw(st.sampled_from([0.5, 1.0, 0.1, 0.0])),
                columns=columns,
                # Sums of odd values would depend on their order.
                values="counts" if columns == "some twice" else draw(_VALUES),
                element=draw(st.sampled_from(elements)),
                further_shape=further,
                storage=draw(self.storages(layout, np.dtype(dtype))),
                seed=draw(st.integers(0, 999)),
            )

        return cases()

    def test_what_it_says_of_itself(self, write: Write) -> None:
        """Shape, dtype, layout, names and lengths of rows."""

        def check(case: StoredCase, data: st.DataObject) -> None:
            source = _source(write(case), case)
            assert source.n_rows == case.n_rows
            assert list(source.elements) == [case.element]
            stored = source.elements[case.element]
            assert stored.shape == case.shape
            assert stored.dtype == case.dtype_in_memory
            assert stored.dtype.isnative
            assert stored.layout == case.layout
            assert stored.rows_per_chunk > 0
            assert stored.stored_bytes() >= 0
            assert stored.var_names().tolist() == case.var.index.tolist()
            assert set(source.obs_names()) >= set(_OBS)
            rows = data.draw(_distinct_rows(case.n_rows))
            lengths = stored.row_lengths(merge_consecutive(rows))
            if lengths is not None:
                row_order = np.arange(case.n_rows) if stored.row_order is None else stored.row_order
                assert case.layout != "dense"
                assert lengths.dtype == np.int64
                assert lengths.tolist() == case.row_lengths[np.argsort(row_order)][rows].tolist()
            columns = data.draw(st.lists(st.sampled_from(_OBS), min_size=1, unique=True))
            table = source.read_obs(columns)
            assert list(table.columns) == columns
            for name in columns:  # text may come as categories, and these in any order
                assert _or_none(table[name]) == _or_none(case.obs[name])
            some = source.read_obs_rows(columns, rows)
            assert len(some.index) == len(rows)
            for name in columns:
                assert _or_none(some[name]) == _or_none(case.obs[name].iloc[rows])
            assert source.read_obs_rows([], rows).index.tolist() == some.index.tolist()
            everything = source.obs_names()
            dtypes = [source.read_obs_rows(everything, own).dtypes for own in (rows, rows[:0])]
            assert dtypes[0].to_dict() == dtypes[1].to_dict()
            names = Collection([source]).obs_names(rows[::-1])
            assert names.tolist() == some.index.tolist()[::-1]
            if stored.var != stored.stored_as:  # a data frame has names of its own
                assert source.read_var().index.tolist() == case.var.index.tolist()
            with pytest.raises(ColumnError, match=re.escape(str(source.location))):
                Collection([source], obs=["no such column"])

        self._try(check, case=self.cases(), data=st.data())

    def test_any_rows_in_any_order(self, write: Write) -> None:
        """Groups of rows of many sources, some delivered twice, in any dtype, by any threads."""

        def check(data: st.DataObject) -> None:
            cases = self._some_cases(data)
            collection = _collection(write, cases)
            rows = np.array(data.draw(st.lists(st.integers(0, len(collection) - 1))), np.int64)
            dtype = _drawn_dtype(data, cases)
            size, num_threads = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
            distinct, order = np.unique(rows, return_inverse=True)
            with Reader(collection, dtype=dtype, num_threads=num_threads) as reader:
                groups = list(reader.read_groups(distinct, order, size))
            assert len(groups) == max(1, math.ceil(len(rows) / size))
            oracle = Oracle(cases, dtype, obs=collection.obs)
            for k, group in enumerate(groups):
                oracle.check(group, rows[k * size : (k + 1) * size])

        self._try(check, data=st.data())

    def test_epochs(self, write: Write) -> None:
        """Every row once in an epoch; minibatches that are kept stay as they are."""

        def check(data: st.DataObject) -> None:
            cases = self._some_cases(data)
            dense, drop_last = data.draw(st.booleans()), data.draw(st.booleans())
            dtype, has_names = _drawn_dtype(data, cases), data.draw(st.booleans())
            collection = _collection(write, cases, obs_names=has_names)
            batch_size = data.draw(st.integers(1, 7))
            dataset = _dataset(
                collection,
                BlockShuffling(block_size=data.draw(st.integers(1, 9))),
                batch_size=batch_size,
                fetch_factor=data.draw(st.integers(1, 4)),
                seed=data.draw(st.integers(0, 99)),
                drop_last=drop_last and len(collection) > batch_size,
                dense=dense,
                dtype=dtype,
                read_options=ReadOptions(num_threads=data.draw(st.integers(1, 4))),
            )
            is_kept = np.array(data.draw(st.lists(st.booleans(), min_size=1)))
            oracle = Oracle(cases, dtype, obs=dataset.collection.obs)
            names = dataset.collection.obs_names(slice(None)) if has_names else None
            kept = list[Cells]()
            for _ in range(2):
                seen, k = list[NDArray[np.int64]](), 0
                for k, minibatch in enumerate(dataset):
                    oracle.check_minibatch(minibatch, dense=dense)
                    _check_names(minibatch, names)
                    seen.append(minibatch.rows.copy())
                    if is_kept[k % len(is_kept)]:
                        kept.append(minibatch)
                assert k + 1 == len(dataset)
                delivered = np.sort(np.concatenate(seen))
                if dataset.drop_last:
                    assert len(np.unique(delivered)) == len(delivered)
                else:
                    assert delivered.tolist() == list(range(len(dataset.collection)))
            for minibatch in kept:
                oracle.check_minibatch(minibatch, dense=dense)
                _check_names(minibatch, names)

        self._try(check, data=st.data())

    def test_copies(self, write: Write) -> None:
        """Copies read the same, before and after the original was read, or its tables were."""

        def check(case: StoredCase) -> None:
            collection = _collection(write, [case])
            oracle, rows = Oracle([case], obs=collection.obs), np.arange(case.n_rows)[::-1]
            for _ in range(3):
                copy = pickle.loads(pickle.dumps(collection))  # noqa: S301 - our own
                oracle.check(copy[rows], rows)
                copy.load_tables()
                oracle.check(copy[rows], rows)
                oracle.check(collection[rows], rows)
                collection.load_tables()

        self._try(check, case=self.cases(), max_examples=max(1, self.max_examples // 5))

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("method", ["fork", "forkserver"])
    def test_in_worker_processes(self, write: Write, method: Literal["fork", "forkserver"]) -> None:
        """Workers read the same, after the parent has read and while it reads.

        Forked workers inherit the parent's state; those of a fork server get only pickled state.
        """

        def check(case: StoredCase) -> None:
            collection = _collection(write, [case], obs_names=True)
            oracle = Oracle([case], obs=collection.obs)
            rows = np.arange(case.n_rows)
            oracle.check(collection[rows], rows)
            names = collection[rows].obs_names
            strategy = BlockShuffling(block_size=3)
            dataset = _dataset(collection, strategy, batch_size=4, fetch_factor=2, seed=0)
            options = dict[str, Any]()  # where it cannot be forked, the loader takes the server
            if method == "forkserver":
                options = {"multiprocessing_context": context_without_threads()}
            elif collection.can_be_forked:
                options = {"multiprocessing_context": "fork"}
            workers = iter(dataset.loader(num_workers=2, **options))
            seen = list[int]()
            for minibatch, own in zip(workers, dataset, strict=True):
                oracle.check_minibatch(minibatch, dense=False)
                oracle.check_minibatch(own, dense=False)
                _check_names(minibatch, names)
                _check_names(own, names)
                seen += minibatch.rows.tolist()
            assert sorted(seen) == rows.tolist()
            oracle.check(collection[rows], rows)

        self._try(check, case=self.cases(min_rows=24), max_examples=3)

    def _some_cases(self, data: st.DataObject) -> list[StoredCase]:
        """Draw one to three cases with the same element and columns, which form a collection."""
        n_vars, element = data.draw(st.integers(0, 12)), data.draw(st.sampled_from(self.elements))
        further_shape = data.draw(st.sampled_from(self.further_shapes))
        cases = self.cases(n_vars=n_vars, element=element, further_shape=further_shape)
        return data.draw(st.lists(cases, min_size=1, max_size=3))

    def _try(
        self,
        check: Callable[..., None],
        *,
        max_examples: int | None = None,
        **strategies: st.SearchStrategy[Any],
    ) -> None:
        most = self.max_examples if max_examples is None else max_examples
        for_all(check, max_examples=most, **strategies)


def _source(written: Path | Source, case: StoredCase) -> Source:
    if not isinstance(written, Path):
        return written
    location = Location.of(written)
    (source,) = open_location(storage_of(location), location, [case.element])
    return source


def _collection(
    write: Write, cases: Sequence[StoredCase], *, obs_names: bool = False
) -> Collection:
    sources = [_source(write(case), case) for case in cases]
    return Collection(sources, obs=_OBS, obs_names=obs_names)


def _check_names(minibatch: Cells, names: NDArray[np.object_] | None) -> None:
    """Check that a minibatch has the names of its rows, or none if there are none."""
    if names is None:
        assert minibatch.obs_names is None
    else:
        assert minibatch.obs_names is not None
        assert minibatch.obs_names.tolist() == names[minibatch.rows].tolist()


def _dataset(collection: Collection, strategy: BlockShuffling, **options: Any) -> CellDataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is read slowly
        return CellDataset(collection, strategy, as_torch=False, **options)


def _or_none(values: "pd.Series[Any]") -> list[Any]:
    return values.astype(object).where(values.notna(), None).tolist()


def _distinct_rows(n_rows: int) -> st.SearchStrategy[NDArray[np.int64]]:
    return st.sets(st.integers(0, n_rows - 1)).map(lambda rows: np.array(sorted(rows), np.int64))


def _drawn_dtype(data: st.DataObject, cases: Sequence[StoredCase]) -> np.dtype[Any] | None:
    """Draw a dtype for reading; None for the stored dtype."""
    name = data.draw(st.none() | st.sampled_from(_CAST_TO))
    if name is None:
        return None
    dtype = np.dtype(name)
    is_odd = any(each.values == "any" and each.dtype_in_memory.kind == "f" for each in cases)  # noqa: PD011 - no pandas
    # What becomes of fractions that an integer cannot hold is undefined.
    return None if is_odd and dtype.kind in "iu" else dtype


# The expected contents of stored cases, and their comparison with what was read.


class Oracle:
    """The expected contents of a collection of cases.

    Parameters
    ----------
    cases
        The stored cases.
    dtype
        Dtype for reading; one that can hold all values if None.
    obs
        The obs columns of the collection, to decode categories.
    """

    def __init__(
        self,
        cases: Sequence[StoredCase],
        dtype: np.dtype[Any] | None = None,
        *,
        obs: Mapping[str, ObsColumn],
    ) -> None:
        self._obs = obs
        self._dtype = dtype or np.result_type(*(case.dtype_in_memory for case in cases))
        self._is_sparse = any(case.layout == "csr" for case in cases)
        self._is_ragged = cases[0].layout == "ragged"
        in_memory = [case.in_memory(self._dtype) for case in cases]
        self._matrix: Any = _joined(in_memory) if self._is_ragged else np.vstack(in_memory)
        table = pd.concat([case.obs for case in cases])
        self._plates = np.array([None if pd.isna(plate) else plate for plate in table["plate"]])
        self._numbers = table["number"].to_numpy()

    def check(self, cells: Cells, rows: NDArray[np.int64]) -> None:
        """Check that these are the cells of ``rows``."""
        assert cells.rows.tolist() == rows.tolist()
        self.check_minibatch(cells, dense=False)

    def check_minibatch(self, cells: Cells, *, dense: bool) -> None:
        """Check that a minibatch has the cells of its ``rows``: values, dtype, parts and obs."""
        X, rows, expected = cells.X, cells.rows, self._matrix[cells.rows]
        is_dense = isinstance(X, np.ndarray)
        assert is_dense == (not self._is_ragged and (dense or not self._is_sparse))
        if self._is_ragged:
            assert isinstance(X, RaggedRows)
            assert X.dtype == self._dtype
            assert X.offsets.tolist() == expected.offsets.tolist()
            np.testing.assert_array_equal(X.values, expected.values)
        else:
            in_scipy = isinstance(X, sp.csr_array)
            dtype = summable(self._dtype) if in_scipy else self._dtype
            assert (X if is_dense else X.data).dtype == dtype
            if not is_dense:
                _check_csr(X.indptr, X.indices, X.data, expected.shape)
                matrix = np.zeros(expected.shape, self._dtype)
                matrix[np.repeat(np.arange(len(rows)), np.diff(X.indptr)), X.indices] = X.data
                X = matrix
            np.testing.assert_array_equal(X, expected)
        column = self._obs["plate"]
        assert isinstance(column, CategoricalColumn)
        assert column.decode(cells.obs["plate"]).tolist() == self._plates[rows].tolist()
        np.testing.assert_array_equal(cells.obs["number"], self._numbers[rows])


def _joined(parts: Sequence[RaggedRows]) -> RaggedRows:
    lengths = np.concatenate([part.lengths for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return RaggedRows(offsets, np.concatenate([part.values for part in parts]))  # noqa: PD011 - no pandas


def _check_csr(
    indptr: NDArray[Any], indices: NDArray[Any], data: NDArray[Any], shape: tuple[int, ...]
) -> None:
    """Check that columns of each row ascend strictly and are within the matrix."""
    assert indptr.dtype == indices.dtype
    assert indptr[0] == 0
    assert indptr[-1] == len(indices) == len(data)
    assert len(indptr) == shape[0] + 1
    assert (np.diff(indptr) >= 0).all()
    for start, stop in itertools.pairwise(indptr):
        columns = indices[start:stop]
        assert (np.diff(columns.astype(np.int64)) > 0).all()
        assert ((columns >= 0) & (columns < shape[1])).all()
