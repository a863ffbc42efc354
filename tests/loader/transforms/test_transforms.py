"""Transforms against scanpy's formulas in NumPy and float64, for every way rows come."""

import dataclasses
import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.sparse as sp
import torch
from anndata import AnnData
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.loader.matrices import rows_of
from tests.loader.read_options import parameters_of

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    SamplingStrategy,
    Streaming,
    open_collection,
)
from cellfeed.transforms import Log1p, NormalizeTotal, Transform

NORMALIZED = [NormalizeTotal(1e4), Log1p()]
N_GENES = 7
SPARSE_AND_DENSE = pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
Values = NDArray[np.float64]


def expected_of(
    values: NDArray[Any], transforms: Sequence[Transform], *, is_sparse: bool = False
) -> Values:
    """Return what scanpy's formulas make of rows, in float64.

    Of sparse rows, they change elements alone: what has none is 0, even where a total is NaN.
    """
    made = values.astype(np.float64)
    with np.errstate(all="ignore"):
        for each in transforms:
            before = made
            made = formula(made, each, values.dtype)
            if is_sparse:
                made = np.where(before == 0, 0.0, made)
    return made


def formula(X: Values, transform: Transform, dtype: np.dtype[Any]) -> Values:
    if isinstance(transform, NormalizeTotal):
        totals = X.sum(axis=1, keepdims=True)
        divisor = np.where(totals == 0, 1.0, totals / transform.target_sum)
        return np.asarray(X / divisor)
    assert isinstance(transform, Log1p)
    return np.log1p(X)


def delivered(dataset: CellDataset, n_rows: int, n_columns: int = N_GENES) -> NDArray[Any]:
    """Return all cells of an epoch in storage order, dense."""
    found = np.full((n_rows, n_columns), np.nan)
    dtype = None
    for minibatch in dataset:
        X = minibatch.X.to_dense().numpy()
        found[minibatch.rows.numpy()] = X
        dtype = X.dtype
    return found.astype(dtype)


def assert_as_exact_as(actual: NDArray[Any], expected: Values, n_units: float) -> None:
    """Check that values differ by at most so many units in the last place of their dtype."""
    exact = expected.astype(actual.dtype)
    assert np.array_equal(np.isnan(actual), np.isnan(exact))
    is_infinite = np.isinf(exact)
    assert np.array_equal(actual[is_infinite], exact[is_infinite])
    known = np.isfinite(exact)
    assert np.isfinite(actual[known]).all()
    off = np.abs(actual[known].astype(np.float64) - expected[known])
    assert (off <= n_units * np.spacing(np.abs(exact[known])).astype(np.float64)).all()


COUNTS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 12), st.just(N_GENES)),
    elements=st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 1 << 20)),
)
# Sums of these are exact in float64, whatever their order.
NUMBERS = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 12), st.just(N_GENES)),
    elements=st.one_of(
        st.just(0),
        st.integers(-(1 << 20), 1 << 20).map(lambda n: n / 64),
        st.sampled_from([np.nan, np.inf, -np.inf, -1.0, -0.0, 1e-30, 1e30]),
    ),
)


RECIPES: list[list[Transform]] = [
    [NormalizeTotal(100.0)],
    [NormalizeTotal(100.0), Log1p()],
    [Log1p(), NormalizeTotal(7.0)],
]
ONE = st.one_of(
    st.builds(NormalizeTotal, st.sampled_from([1.0, 1e4, 1e6])),
    st.just(Log1p()),
)


@pytest.fixture(scope="module")
def write(write_h5ad) -> Callable[..., Any]:
    def write(X: NDArray[Any], *, is_sparse: bool, **options: Any) -> Any:
        return write_h5ad(sp.csr_matrix(X) if is_sparse else X, **options)

    return write


@pytest.fixture(scope="module")
def checked(write) -> Callable[..., None]:
    """Compare what is delivered with the formulas."""

    def check(
        X: NDArray[Any],
        transforms: Sequence[Transform],
        *,
        is_sparse: bool,
        units: float,
        dtype: str | None = None,
        threads: int = 2,
        edit: Callable[[h5py.File], None] | None = None,
    ) -> None:
        collection = open_collection(write(X, is_sparse=is_sparse, edit=edit))
        options: dict[str, Any] = {"dtype": dtype, "num_threads": threads}
        options |= {"seed": 0, "transform": transforms}
        dataset = CellDataset(collection, BlockShuffling(2), 5, 2, **parameters_of(options))
        found = delivered(dataset, len(X))
        stored = X.astype(found.dtype)
        assert_as_exact_as(found, expected_of(stored, transforms, is_sparse=is_sparse), units)

    return check


def of_users(warnings):
    """Return the texts of those for users; Python 3.12 warns developers of each fork."""
    return [str(each.message) for each in warnings if each.category is UserWarning]


def told_once(dataset, num_workers, text):
    """Return the minibatches of an epoch, which warns once of all, as the next one does not."""
    loader = dataset.loader(num_workers=num_workers)
    with pytest.warns(UserWarning, match=text) as all_:
        minibatches = list(loader)
    assert len(of_users(all_)) == 1
    list(loader)
    return minibatches


def one_minibatch(path, transforms, **options):
    collection = open_collection(path)
    return CellDataset(
        collection, BlockShuffling(2), 20, 1, transform=transforms, **parameters_of(options)
    )


IN_EVERY_WAY = pytest.mark.parametrize(
    ("dtype", "is_sparse", "num_workers"),
    [
        *itertools.product(["float32", "float64"], [True, False], [0]),
        pytest.param("float32", True, 2, marks=pytest.mark.process),
    ],
)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
class TestWhatMayNotBeCounts:
    """Values whose logarithm is NaN, and rows whose total is no integer."""

    @IN_EVERY_WAY
    def test_are_told_once_with_their_number(self, write, dtype, is_sparse, num_workers):
        X = np.random.default_rng(0).normal(size=(20, N_GENES))
        X[3, 2] = -1
        n_undefined = np.count_nonzero(X.astype(dtype) <= -1)
        (minibatch,) = told_once(
            one_minibatch(write(X, is_sparse=is_sparse), [Log1p()], dtype=dtype),
            num_workers,
            rf"^{n_undefined} values so far are -1 or less",
        )
        values = minibatch.X.to_dense() if is_sparse else minibatch.X
        assert n_undefined == np.count_nonzero(~np.isfinite(np.asarray(values)))

    @pytest.mark.parametrize("n_fetch", [5, 20])
    def test_columns_that_do_not_ascend_are_counted_once(self, n_fetch):
        X = sp.csr_array(np.random.default_rng(0).normal(size=(20, N_GENES)).astype(np.float32))
        X.indices = np.tile(np.arange(N_GENES, dtype=np.int32)[::-1], 20)
        X.has_sorted_indices = False
        collection = open_collection(AnnData(X))
        dataset = CellDataset(collection, Streaming(), 5, n_fetch // 5, transform=[Log1p()])
        with pytest.warns(UserWarning, match="are -1 or less"):
            rows = np.concatenate([each.X.to_dense().numpy() for each in dataset])
        assert dataset.counters.non_counts == (int(np.count_nonzero(X.data <= -1)), 0)
        expected = expected_of(X.toarray(), [Log1p()], is_sparse=True)
        assert np.allclose(rows, expected, rtol=1e-6, equal_nan=True)

    @IN_EVERY_WAY
    @pytest.mark.parametrize("then", [(), (Log1p(),)])
    def test_what_is_log_transformed_already(self, write, dtype, is_sparse, num_workers, then):
        X = np.log1p(np.random.default_rng(0).poisson(0.7, (20, N_GENES))).astype(np.float32)
        X[3] = 0
        n = np.count_nonzero(X.astype(dtype).sum(axis=1, dtype=np.float64) % 1)
        told_once(
            one_minibatch(write(X, is_sparse=is_sparse), [NormalizeTotal(1e4), *then], dtype=dtype),
            num_workers,
            rf"^in {n} of the cells so far, the values do",
        )

    @pytest.mark.parametrize(
        "method",
        [None, *(pytest.param(each, marks=pytest.mark.process) for each in ("fork", "forkserver"))],
    )
    def test_interleaved_datasets_tell_of_theirs(self, write, method):
        X = np.log1p(np.random.default_rng(0).poisson(0.7, (20, N_GENES))).astype(np.float32)
        collection = open_collection(write(X - 2.0, is_sparse=False))
        datasets = [
            CellDataset(collection, BlockShuffling(2), 20, 1, transform=NORMALIZED),
            CellDataset(collection, BlockShuffling(2), 20, 1, transform=[Log1p()]),
        ]
        options = {} if method is None else {"multiprocessing_context": method}
        loader = InterleavedDatasets(datasets).loader(0 if method is None else 1, **options)
        with pytest.warns(UserWarning, match="so far") as all_:
            list(loader)
        assert sorted(each.partition(" so far")[2][:9] for each in of_users(all_)) == [
            " are -1 o",
            ", the val",
        ]

    @pytest.mark.parametrize("transforms", [NORMALIZED, [Log1p(), NormalizeTotal(1.0)]], ids=repr)
    def test_counts_and_totals_of_other_values_are_silent(self, write, transforms):
        X = np.random.default_rng(0).poisson(0.7, (20, N_GENES)).astype(np.float32)
        X[0], X[1, 0] = 0, 5
        for is_sparse in (False, True):
            (minibatch,) = one_minibatch(write(X, is_sparse=is_sparse), transforms)
            assert np.isfinite(np.asarray(minibatch.X.to_dense())).all()


@pytest.mark.filterwarnings("ignore:.* values so far are -1 or less:UserWarning")
@pytest.mark.filterwarnings("ignore:.* do not add up to an integer, as counts do:UserWarning")
class TestFormulas:
    @SPARSE_AND_DENSE
    @given(
        X=COUNTS | NUMBERS,
        transform=ONE,
        dtype=st.sampled_from(["float32", "float64"]),
        threads=st.integers(1, 3),
    )
    def test_one_transform(self, checked, is_sparse, X, transform, dtype, threads):
        options = {"is_sparse": is_sparse, "dtype": dtype, "threads": threads}
        # In float64 the oracle rounds as well.
        checked(X, [transform], units=1 if dtype == "float32" else 4, **options)

    @SPARSE_AND_DENSE
    @given(X=COUNTS | NUMBERS, target=st.sampled_from([1.0, 1e4, 1e30]))
    def test_normalised_and_logarithm(self, checked, is_sparse, X, target):
        transforms = [NormalizeTotal(target), Log1p()]
        checked(X, transforms, is_sparse=is_sparse, units=1, dtype="float32")

    @SPARSE_AND_DENSE
    @given(X=COUNTS, chain=st.permutations([NormalizeTotal(50), Log1p(), NormalizeTotal(7)]))
    def test_chains_are_applied_in_order(self, checked, is_sparse, X, chain):
        checked(X, chain, is_sparse=is_sparse, units=4, dtype="float64")

    @given(
        X=COUNTS,
        recipe=st.sampled_from(RECIPES),
        n=st.integers(1, 50),
        dtype=st.sampled_from(["float32", "int16", "float64", "uint8"]),
        compression=st.sampled_from(["gzip", None]),
        threads=st.integers(1, 3),
    )
    def test_chunks_of_any_size(self, checked, replace, X, recipe, n, dtype, compression, threads):
        """Rows are transformed while they are decoded, in however many chunks they lie."""
        X = np.minimum(X, 99)
        X[0, 0] = 1  # chunks need an element

        def chunk(file: h5py.File) -> None:
            for name, stored_as in (("indices", np.int32), ("data", dtype)):
                values = file[f"X/{name}"][:]
                options = {"chunks": (min(n, values.size),), "compression": compression}
                replace(file, f"X/{name}", values.astype(stored_as), **options)

        options = {"threads": threads, "edit": chunk, "dtype": "float32"}
        checked(X, recipe, is_sparse=True, units=3, **options)

    @SPARSE_AND_DENSE
    def test_logarithms_are_right_to_one_unit(self, write_h5ad, is_sparse):
        """Over all magnitudes, and beside where one polynomial ends and the next begins."""
        near = np.concatenate([np.sqrt(2.0) ** np.arange(1, 60) - 1, 2.0 ** np.arange(-30, 99)])
        steps = near[:, None] * (1 + np.arange(-20, 21) * 2.0**-23)
        some = np.concatenate([np.geomspace(1e-45, 3e38, 40_000), np.arange(9_000), steps.ravel()])
        chains = ([Log1p()], [NormalizeTotal(7e3), Log1p()], [NormalizeTotal(5e9), Log1p()])
        for values in (some, np.arange(9_000)):
            X = values.astype(np.float32)[None]
            collection = open_collection(write_h5ad(sp.csr_matrix(X) if is_sparse else X))
            for transforms in chains:
                dataset = CellDataset(collection, Streaming(), 1, transform=transforms)
                found = delivered(dataset, 1, X.size)
                assert found.dtype == np.float32
                assert_as_exact_as(found, expected_of(X, transforms), 1)


class TestSparse:
    @pytest.mark.parametrize(
        "transform",
        NORMALIZED,
        ids=lambda each: type(each).__name__,
    )
    def test_stays_sparse(self, plates, transform):
        collection = open_collection(plates)
        plain = next(iter(CellDataset(collection, Streaming(), 63))).X
        X = next(iter(CellDataset(collection, Streaming(), 63, transform=transform))).X
        assert X.layout == torch.sparse_csr
        assert torch.equal(X.crow_indices(), plain.crow_indices())
        assert torch.equal(X.col_indices(), plain.col_indices())
        assert X.values().shape == plain.values().shape

    @pytest.mark.parametrize("first_file", [True, False])
    @pytest.mark.parametrize("options", [{"dense": True}, {"prefetch": 1}, {"prefetch": 8}])
    def test_columns_of_one_gene_are_added_up_before(self, write_h5ad, first_file, options):
        """Also in a second file, after fetches that had none, or in fetches planned before."""
        X = np.random.default_rng(0).poisson(2.0, (30, N_GENES)).astype(np.float32) + 1

        def repeat(file: h5py.File) -> None:
            indices = file["X/indices"][:]
            indices[4::N_GENES] = indices[3::N_GENES]
            file["X/indices"][:] = indices

        summed = X.copy()
        summed[:, 3] += summed[:, 4]
        summed[:, 4] = 0
        paths, parts = [write_h5ad(sp.csr_matrix(X), edit=repeat)], [summed]
        if not first_file:
            paths, parts = [write_h5ad(sp.csr_matrix(X)), *paths], [X, *parts]
        dataset = CellDataset(
            open_collection(paths), BlockShuffling(5), 10, 1, seed=0, transform=NORMALIZED,
            **parameters_of(options),
        )  # fmt: skip
        values = np.concatenate(parts)
        for _ in range(2):
            found = delivered(dataset, len(values))
            assert_as_exact_as(found, expected_of(values, NORMALIZED), 1)


@dataclasses.dataclass(frozen=True)
class Repeated(SamplingStrategy):
    """Each row three times, far apart."""

    shuffles_fetch = True

    def n_positions(self, n_rows):
        return 3 * n_rows

    def epoch_order(self, *, n_rows, epoch_key):
        return lambda positions: positions % n_rows


def normalized(paths, strategy=BlockShuffling(4), batch_size=8, **options):  # noqa: B008
    collection = open_collection(paths)
    return CellDataset(
        collection, strategy, batch_size, **parameters_of({"transform": NORMALIZED} | options)
    )


@pytest.fixture(scope="module")
def reference(plates):
    return delivered(normalized(plates, Streaming(), 63, num_threads=1), 63, 11)


class TestHowRowsCome:
    """What is delivered is the same bit for bit, however it is."""

    def test_rows_in_memory_that_are_longer_than_chunks(self):
        """In the first fetch they are transformed once placed, in the second before."""
        n_rows, n_columns = 250, 40_000  # a fetch of this size is written past the cache
        row = np.random.default_rng(0).poisson(2.0, (1, n_columns)).astype(np.float32) + 1
        indices = np.tile(np.arange(n_columns, dtype=np.int32), n_rows)
        pointers = np.arange(n_rows + 1, dtype=np.int32) * n_columns
        X = sp.csr_matrix((np.tile(row[0], n_rows), indices, pointers))
        dataset = CellDataset(open_collection(AnnData(X)), Streaming(), 25, 5, transform=NORMALIZED)
        expected = expected_of(row, NORMALIZED)
        for minibatch in dataset:
            values = minibatch.X.values().numpy().reshape(25, n_columns)
            assert_as_exact_as(values[:1], expected, 1)
            assert (values == values[0]).all()

    def test_it_is_right(self, reference, in_memory, plates):
        assert_as_exact_as(reference, expected_of(in_memory(plates), NORMALIZED), 1)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    @pytest.mark.parametrize("dense", [False, True], ids=["sparse", "made dense"])
    @pytest.mark.parametrize("strategy", [BlockShuffling(4), Streaming(), Repeated()], ids=repr)
    def test_with_any_threads_and_order(self, plates, reference, threads, dense, strategy):
        options = {"fetch_factor": 3, "seed": 0, "dense": dense, "num_threads": threads}
        dataset = normalized(plates, strategy, **options)
        rows = rows_of([*dataset, *dataset], reference)  # what is kept stays as it is
        assert len(rows) == 2 * strategy.n_positions(63)

    @pytest.mark.process
    def test_from_worker_processes(self, plates, reference):
        loader = normalized(plates, fetch_factor=2, seed=0).loader(num_workers=2)
        assert len(rows_of(loader, reference)) == 63

    def test_stored_dense_and_after_a_pickle(self, plates, reference, in_memory, write_h5ad):
        for path in (plates, write_h5ad(in_memory(plates))):
            dataset = normalized(path)
            for each in (dataset, pickle.loads(pickle.dumps(dataset))):
                assert np.array_equal(delivered(each, 63, 11), reference)

    def test_totals_are_of_the_genes_that_are_delivered(self, plates, in_memory):
        genes = ["gene7", "gene2", "gene3"]
        dataset = CellDataset(
            open_collection(plates, genes=genes), BlockShuffling(4), 8, transform=NORMALIZED
        )
        selected = in_memory(plates)[:, [7, 2, 3]]
        assert_as_exact_as(delivered(dataset, 63, 3), expected_of(selected, NORMALIZED), 1)

    def test_functions_of_the_user_come_after(self, plates, reference):
        def doubled(cells):
            return dataclasses.replace(cells, elements={"X": cells.X * np.float32(2)})

        def dense_and_rows(minibatch):
            return minibatch.X.to_dense().numpy(), minibatch.rows

        functions = {"fetch_transform": doubled, "batch_transform": dense_and_rows}
        for X, rows in normalized(plates, **functions):
            assert np.array_equal(X, 2 * reference[rows.numpy()])


class TestDtypes:
    @SPARSE_AND_DENSE
    @pytest.mark.parametrize(
        ("stored", "asked", "read"),
        [
            *((each, None, "float32") for each in ("uint8", "uint16", "int64", "float32", "bool")),
            ("float64", None, "float64"),
            ("float64", "float32", "float32"),
            ("int32", "float64", "float64"),
            ("int32", {"X": "float64"}, "float64"),
        ],
    )
    def test_values_are_floats(self, write, is_sparse, stored, asked, read):
        X = np.random.default_rng(0).poisson(1.0, (20, N_GENES)).astype(stored)
        collection = open_collection(write(X, is_sparse=is_sparse))
        dataset = CellDataset(collection, Streaming(), 8, dtype=asked, transform=NORMALIZED)
        found = delivered(dataset, 20)
        assert found.dtype == read
        expected = expected_of(X.astype(read), NORMALIZED)
        assert_as_exact_as(found, expected, 1 if read == "float32" else 4)
        of_floats = collection.mean_row_bytes(np.dtype(read))
        assert dataset.buffer_bytes == int(20 * of_floats)  # all cells, which two fetches exceed

    @pytest.mark.parametrize("asked", ["int32", "float16", {"X": "uint8"}], ids=str)
    def test_others_are_refused(self, plates, asked):
        with pytest.raises(ParameterError, match="must be float32 or float64 with a `transform`"):
            CellDataset(open_collection(plates), Streaming(), 8, dtype=asked, transform=Log1p())


class TestElements:
    @pytest.fixture
    def collection(self, write_h5ad):
        X = np.random.default_rng(0).poisson(1.0, (20, N_GENES)).astype(np.int32)
        file = write_h5ad(sp.csr_matrix(X), layers={"counts": X, "twice": sp.csr_matrix(2 * X)})
        return open_collection(file, elements=["layers/counts", "X", "layers/twice"])

    def test_the_first_by_default_and_others_by_name(self, collection):
        stored = [collection[:][name] for name in collection.elements]
        counts, X, twice = (
            each if isinstance(each, np.ndarray) else each.toarray() for each in stored
        )
        (first,) = CellDataset(collection, Streaming(), 20, transform=Log1p())
        assert_as_exact_as(first.X.numpy(), np.log1p(counts.astype(np.float64)), 1)
        assert np.array_equal(first["X"].to_dense().numpy(), X)
        assert first["X"].dtype == torch.int32
        by_name: dict[str, Any] = {
            "X": NormalizeTotal(10),
            "layers/twice": NORMALIZED,
            "layers/counts": [],
        }
        (named,) = CellDataset(collection, Streaming(), 20, transform=by_name)
        assert np.array_equal(named.X.numpy(), counts)
        assert named.X.dtype == torch.int32
        for name, values in (("X", X), ("layers/twice", twice)):
            chain = by_name[name] if isinstance(by_name[name], list) else [by_name[name]]
            made = expected_of(values.astype(np.float32), chain)
            assert_as_exact_as(named[name].to_dense().numpy(), made, 1)

    def test_names_that_are_not_there(self, collection):
        with pytest.raises(ParameterError, match="names 'raw/X', which is not among the elements"):
            CellDataset(collection, Streaming(), 8, transform={"raw/X": Log1p()})

    @pytest.mark.parametrize(
        "wrong", [Log1p, "log1p", np.log1p, [Log1p(), 3], {"X": None}], ids=repr
    )
    def test_what_is_no_transform(self, collection, wrong):
        told = r"must be from `cellfeed\.transforms`.*batch_transform"
        with pytest.raises(ParameterError, match=told):
            CellDataset(collection, Streaming(), 8, transform=wrong)


class TestValues:
    """Transforms say all that they do."""

    @pytest.mark.parametrize(
        "wrong",
        [
            functools.partial(NormalizeTotal, 0),
            functools.partial(NormalizeTotal, float("inf")),
            functools.partial(NormalizeTotal, "1e4"),  # type: ignore[arg-type]
            functools.partial(NormalizeTotal, float("nan")),
            functools.partial(NormalizeTotal, True),
        ],
        ids=repr,
    )
    def test_wrong_parameters(self, wrong):
        with pytest.raises(ParameterError, match=r"must (hold|be|have)"):
            wrong()

    def test_they_are_told_apart_by_what_they_say(self):
        assert NormalizeTotal() == NormalizeTotal(10_000) != NormalizeTotal(1e6)
        assert repr(NormalizeTotal(float(np.float32(0.5)))) == "NormalizeTotal(target_sum=0.5)"
