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
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from cellfeed import (
    BlockShuffling,
    CellDataset,
    InterleavedDatasets,
    ParameterError,
    SamplingStrategy,
    Streaming,
    open_collection,
)
from cellfeed.transforms import Binarize, Log1p, NormalizeTotal, Scale, Transform

NORMALIZED = [NormalizeTotal(1e4), Log1p()]
N_GENES = 7
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
            if is_sparse and each.keeps_zeros:
                made = np.where(before == 0, 0.0, made)
    return made


def formula(X: Values, transform: Transform, dtype: np.dtype[Any]) -> Values:
    if isinstance(transform, NormalizeTotal):
        totals = X.sum(axis=1, keepdims=True)
        divisor = np.where(totals == 0, 1.0, totals / transform.target_sum)
        return np.asarray(X / divisor)
    if isinstance(transform, Log1p):
        return np.log1p(X)
    if isinstance(transform, Binarize):
        return np.where(dtype.type(transform.threshold) < X, 1.0, 0.0)
    assert isinstance(transform, Scale)
    mean = np.asarray(transform.mean if transform.zero_center else 0.0, np.float64)
    std = np.asarray(transform.std, np.float64)
    X = (X - mean) / np.where(std == 0, 1.0, std)
    if transform.max_value is None:
        return X
    X = np.where(transform.max_value < X, transform.max_value, X)
    if transform.zero_center:
        X = np.where(-transform.max_value > X, -transform.max_value, X)
    return X


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


def scales() -> st.SearchStrategy[Scale]:
    columns = st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=7, max_size=7)
    most = st.none() | st.integers(1, 30).map(float)
    return st.builds(Scale, mean=columns, std=columns, max_value=most, zero_center=st.booleans())


ONE = st.one_of(
    st.builds(NormalizeTotal, st.sampled_from([1.0, 1e4, 1e6])),
    st.just(Log1p()),
    st.builds(Binarize, st.sampled_from([0.0, 0.1, 3.0, -1.0])),
    scales(),
)


@pytest.fixture
def write(write_h5ad) -> Callable[..., Any]:
    def write(X: NDArray[Any], *, is_sparse: bool, **options: Any) -> Any:
        return write_h5ad(sp.csr_matrix(X) if is_sparse else X, **options)

    return write


@pytest.fixture
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
    ) -> None:
        collection = open_collection(write(X, is_sparse=is_sparse))
        is_dense = not all(each.keeps_zeros for each in transforms)
        dataset = CellDataset(
            collection,
            BlockShuffling(2),
            batch_size=5,
            fetch_factor=2,
            seed=0,
            dense=is_dense,
            dtype=dtype,
            num_threads=threads,
            transform=transforms,
        )
        found = delivered(dataset, len(X))
        stored = X.astype(found.dtype)
        assert_as_exact_as(found, expected_of(stored, transforms, is_sparse=is_sparse), units)

    return check


def of_users(warnings):
    """Return the texts of those for users; Python 3.12 warns developers of each fork."""
    return [str(each.message) for each in warnings if each.category is UserWarning]


class TestWhatMayNotBeCounts:
    """Values whose logarithm is NaN, and rows whose total is no integer."""

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize("first", [(), (Scale([1.0] * 7, [1.0] * 7, zero_center=False),)])
    def test_are_told_once_with_their_number(self, write, dtype, is_sparse, num_workers, first):
        X = np.random.default_rng(0).normal(size=(20, N_GENES))
        X[3, 2] = -1
        n_undefined = np.count_nonzero(X.astype(dtype) <= -1)
        collection = open_collection(write(X, is_sparse=is_sparse))
        dataset = CellDataset(
            collection,
            BlockShuffling(2),
            batch_size=20,
            fetch_factor=1,
            dtype=dtype,
            transform=[*first, Log1p()],
        )
        loader = dataset.loader(num_workers=num_workers)
        with pytest.warns(
            UserWarning, match=rf"^{n_undefined} values so far are -1 or less"
        ) as all_:
            (minibatch,) = loader
        assert len(of_users(all_)) == 1
        values = minibatch.X.to_dense() if is_sparse else minibatch.X
        assert n_undefined == np.count_nonzero(~np.isfinite(np.asarray(values)))
        list(loader)  # is told once

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    @pytest.mark.parametrize("num_workers", [0, 2])
    @pytest.mark.parametrize(
        "then", [(), (Log1p(),), (Scale([0.0] * 7, [1.0] * 7, zero_center=False),)]
    )
    def test_what_is_log_transformed_already(self, write, dtype, is_sparse, num_workers, then):
        X = np.log1p(np.random.default_rng(0).poisson(0.7, (20, N_GENES))).astype(np.float32)
        X[3] = 0
        totals = X.astype(dtype).sum(axis=1, dtype=np.float64)
        dataset = CellDataset(
            open_collection(write(X, is_sparse=is_sparse)),
            BlockShuffling(2),
            batch_size=20,
            fetch_factor=1,
            dtype=dtype,
            transform=[NormalizeTotal(1e4), *then],
        )
        loader = dataset.loader(num_workers=num_workers)
        n = np.count_nonzero(totals % 1)
        with pytest.warns(
            UserWarning, match=rf"^in {n} of the cells so far, the values do"
        ) as all_:
            list(loader)
        assert len(of_users(all_)) == 1
        list(loader)  # is told once

    @pytest.mark.parametrize("method", [None, "fork", "spawn"])
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

    def test_totals_of_what_another_step_has_made_are_silent(self, write):
        X = np.random.default_rng(0).poisson(0.7, (20, N_GENES)).astype(np.float32)
        dataset = CellDataset(
            open_collection(write(X, is_sparse=True)),
            BlockShuffling(2),
            batch_size=20,
            fetch_factor=1,
            transform=[Log1p(), NormalizeTotal(1.0)],
        )
        list(dataset.loader())

    def test_counts_are_silent(self, write):
        X = np.random.default_rng(0).poisson(0.7, (20, N_GENES))
        X[0], X[1, 0] = 0, 5
        dataset = CellDataset(
            open_collection(write(X.astype(np.float32), is_sparse=False)),
            BlockShuffling(2),
            batch_size=5,
            fetch_factor=1,
            transform=NORMALIZED,
        )
        assert all(np.isfinite(np.asarray(each.X)).all() for each in dataset)


@pytest.mark.filterwarnings("ignore:.* values so far are -1 or less:UserWarning")
@pytest.mark.filterwarnings("ignore:.* do not add up to an integer, as counts do:UserWarning")
class TestFormulas:
    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    def test_one_transform(self, checked, is_sparse):
        @given(
            X=COUNTS | NUMBERS,
            transform=ONE,
            dtype=st.sampled_from(["float32", "float64"]),
            threads=st.integers(1, 3),
        )
        def check(X, transform, dtype, threads):
            options = {"is_sparse": is_sparse, "dtype": dtype, "threads": threads}
            # In float64 the oracle rounds as well.
            checked(X, [transform], units=1 if dtype == "float32" else 4, **options)

        check()

    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    def test_normalised_and_logarithm(self, checked, is_sparse):
        @given(X=COUNTS | NUMBERS, target=st.sampled_from([1.0, 1e4, 1e30]))
        def check(X, target):
            transforms = [NormalizeTotal(target), Log1p()]
            checked(X, transforms, is_sparse=is_sparse, units=1, dtype="float32")

        check()

    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    def test_chains_are_applied_in_order(self, checked, is_sparse):
        @given(X=COUNTS, chain=st.permutations([NormalizeTotal(50), Log1p(), Binarize(0.7)]))
        def check(X, chain):
            checked(X, chain, is_sparse=is_sparse, units=4, dtype="float64")

        check()

    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
    @pytest.mark.parametrize("zero_center", [True, False])
    def test_of_a_whole_recipe(self, write, is_sparse, zero_center):
        X = np.random.default_rng(0).poisson(1.0, (30, N_GENES)).astype(np.float64)
        normal = expected_of(X, NORMALIZED)
        scale = Scale(normal.mean(0), normal.std(0), max_value=1.5, zero_center=zero_center)
        dataset = CellDataset(
            open_collection(write(X, is_sparse=is_sparse)),
            BlockShuffling(4),
            batch_size=8,
            seed=0,
            dense=zero_center,
            transform=[*NORMALIZED, scale],
        )
        found = delivered(dataset, 30)
        assert np.abs(found).max() == 1.5 or not zero_center
        np.testing.assert_allclose(found, expected_of(X, [*NORMALIZED, scale]), atol=1e-13)

    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
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
        [*NORMALIZED, Binarize(1), Scale(None, np.ones(11), zero_center=False)],
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

    def test_columns_of_one_gene_are_added_up_before(self, write_h5ad, replace):
        X = sp.csr_matrix(np.eye(4, 3, dtype=np.float32) * 5 + 1)

        def repeat(file: h5py.File) -> None:
            replace(file, "X/indices", np.array([2, 0, 2, *X.indices[3:]], np.int32))

        file = write_h5ad(X, edit=repeat)
        summed = np.vstack([[1, 0, 7], X.toarray()[1:]]).astype(np.float32)
        for dense in (False, True):
            dataset = CellDataset(
                open_collection(file), Streaming(), 3, dense=dense, transform=NORMALIZED
            )
            assert_as_exact_as(delivered(dataset, 4, 3), expected_of(summed, NORMALIZED), 1)

    @pytest.mark.parametrize(
        "transform", [Scale(np.zeros(11), np.ones(11)), Binarize(-1)], ids=["Scale", "Binarize"]
    )
    def test_is_not_made_dense_unasked(self, plates, transform):
        collection, transforms = open_collection(plates), [Log1p(), transform]
        with pytest.raises(ParameterError, match=r"^'X' is sparse, and .* use dense=True"):
            CellDataset(collection, Streaming(), 8, transform=transforms)
        identity: Callable[[Any], Any] = lambda cells: cells  # noqa: E731
        with pytest.raises(ParameterError, match="dense=True without `fetch_transform`"):
            CellDataset(
                collection,
                Streaming(),
                8,
                dense=True,
                fetch_transform=identity,
                transform=transforms,
            )


@dataclasses.dataclass(frozen=True)
class Repeated(SamplingStrategy):
    """Each row three times, far apart."""

    shuffles_fetch = True

    def n_positions(self, n_rows):
        return 3 * n_rows

    def epoch_order(self, *, n_rows, epoch_key):
        return lambda positions: positions % n_rows


@pytest.fixture(scope="module")
def reference(plates):
    dataset = CellDataset(
        open_collection(plates), Streaming(), 63, num_threads=1, transform=NORMALIZED
    )
    return delivered(dataset, 63, 11)


class TestHowRowsCome:
    """What is delivered is the same bit for bit, however it is."""

    def test_it_is_right(self, reference, in_memory, plates):
        assert_as_exact_as(reference, expected_of(in_memory(plates), NORMALIZED), 1)

    @pytest.mark.parametrize("threads", [1, 2, 5])
    @pytest.mark.parametrize("dense", [False, True], ids=["sparse", "made dense"])
    @pytest.mark.parametrize("strategy", [BlockShuffling(4), Streaming(), Repeated()], ids=repr)
    def test_with_any_threads_and_order(self, plates, reference, threads, dense, strategy):
        dataset = CellDataset(
            open_collection(plates),
            strategy,
            batch_size=8,
            fetch_factor=3,
            seed=0,
            dense=dense,
            num_threads=threads,
            transform=NORMALIZED,
        )
        n_rows = 0
        for minibatch in itertools.chain(dataset, dataset):
            n_rows += len(minibatch)
            rows = minibatch.rows.numpy()
            assert np.array_equal(minibatch.X.to_dense().numpy(), reference[rows])
        assert n_rows == 2 * strategy.n_positions(63)

    @pytest.mark.parametrize("num_workers", [1, 2])
    def test_from_worker_processes(self, plates, reference, num_workers):
        dataset = CellDataset(
            open_collection(plates), BlockShuffling(4), 8, 2, seed=0, transform=NORMALIZED
        )
        n_rows = 0
        for minibatch in dataset.loader(num_workers):
            n_rows += len(minibatch)
            rows = minibatch.rows.numpy()
            assert np.array_equal(minibatch.X.to_dense().numpy(), reference[rows])
        assert n_rows == 63

    def test_stored_dense(self, plates, reference, in_memory, write_h5ad):
        file = write_h5ad(in_memory(plates))
        dataset = CellDataset(open_collection(file), BlockShuffling(4), 8, transform=NORMALIZED)
        assert np.array_equal(delivered(dataset, 63, 11), reference)

    def test_after_a_pickle(self, plates, reference):
        dataset = CellDataset(open_collection(plates), Streaming(), 8, transform=NORMALIZED)
        copy = pickle.loads(pickle.dumps(dataset))
        assert np.array_equal(delivered(copy, 63, 11), reference)

    def test_kept_minibatches_stay_as_they_are(self, plates, reference):
        dataset = CellDataset(
            open_collection(plates), BlockShuffling(2), 4, 2, seed=0, transform=NORMALIZED
        )
        for minibatch in list(dataset) + list(dataset):
            rows = minibatch.rows.numpy()
            assert np.array_equal(minibatch.X.to_dense().numpy(), reference[rows])

    def test_totals_are_of_the_genes_that_are_delivered(self, plates, in_memory):
        genes = ["gene7", "gene2", "gene3"]
        dataset = CellDataset(
            open_collection(plates, genes=genes), BlockShuffling(4), 8, transform=NORMALIZED
        )
        selected = in_memory(plates)[:, [7, 2, 3]]
        assert_as_exact_as(delivered(dataset, 63, 3), expected_of(selected, NORMALIZED), 1)

    def test_functions_of_the_user_come_after(self, plates, reference):
        dataset = CellDataset(
            open_collection(plates),
            BlockShuffling(4),
            batch_size=8,
            fetch_transform=lambda cells: dataclasses.replace(
                cells, elements={"X": cells.X * np.float32(2)}
            ),
            batch_transform=lambda minibatch: (minibatch.X.to_dense().numpy(), minibatch.rows),
            transform=NORMALIZED,
        )
        for X, rows in dataset:
            assert np.array_equal(X, 2 * reference[rows.numpy()])


class TestDtypes:
    @pytest.mark.parametrize("is_sparse", [True, False], ids=["sparse", "dense"])
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
        assert dataset.buffer_bytes == int(2 * 8 * 16 * of_floats)

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

    def test_columns_of_another_element(self, collection):
        scale = Scale(np.zeros(3), np.ones(3))
        with pytest.raises(ParameterError, match="got 3 for the 7 columns of 'layers/counts'"):
            CellDataset(collection, Streaming(), 8, transform=scale)

    @pytest.mark.parametrize(
        "wrong", [Log1p, "log1p", np.log1p, [Log1p(), 3], {"X": None}], ids=repr
    )
    def test_what_is_no_transform(self, collection, wrong):
        with pytest.raises(
            ParameterError, match=r"must be from `cellfeed\.transforms`.*batch_transform"
        ):
            CellDataset(collection, Streaming(), 8, transform=wrong)


class TestValues:
    """Transforms say all that they do."""

    @pytest.mark.parametrize(
        "wrong",
        [
            functools.partial(NormalizeTotal, 0),
            functools.partial(NormalizeTotal, float("inf")),
            functools.partial(NormalizeTotal, "1e4"),  # type: ignore[arg-type]
            functools.partial(Binarize, float("nan")),
            functools.partial(Binarize, True),
            functools.partial(Scale, [1.0], [-1.0]),
            functools.partial(Scale, [1.0], [np.nan]),
            functools.partial(Scale, [1.0, 2.0], [1.0]),
            functools.partial(Scale, [[1.0]], [[1.0]]),
            functools.partial(Scale, None, [1.0]),
            functools.partial(Scale, ["a"], [1.0]),
            functools.partial(Scale, [0.0], [1.0], max_value=-1),
        ],
        ids=repr,
    )
    def test_wrong_parameters(self, wrong):
        with pytest.raises(ParameterError, match=r"must (hold|be|have)"):
            wrong()

    def test_they_are_told_apart_by_what_they_say(self):
        assert NormalizeTotal() == NormalizeTotal(10_000) != NormalizeTotal(1e6)
        assert repr(NormalizeTotal(float(np.float32(0.5)))) == "NormalizeTotal(target_sum=0.5)"
        ones, others = np.ones(2_000), np.ones(2_000)
        others[1_000] = 2
        assert repr(Scale(ones, ones)) == repr(Scale(list(ones), ones))
        texts = {
            repr(each)
            for each in (
                Scale(ones, ones),
                Scale(others, ones),
                Scale(ones, others),
                Scale(ones, ones, 3),
                Scale(ones, ones, zero_center=False),
                Scale(None, ones, zero_center=False),
            )
        }
        assert len(texts) == 6

    def test_arrays_are_copies_that_nobody_can_change(self):
        mean, std = np.zeros(3), np.ones(3)
        scale = Scale(mean, std)
        mean[:] = std[:] = 9
        assert np.asarray(scale.mean).tolist() == [0, 0, 0]
        assert np.asarray(scale.std).tolist() == [1, 1, 1]
        with pytest.raises(ValueError, match="read-only"):
            np.asarray(scale.std)[0] = 5
        with pytest.raises(dataclasses.FrozenInstanceError):
            scale.max_value = 3  # type: ignore[misc]
