"""Rows are transformed while they are decoded, in however many chunks they lie."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.matrices import dense

from cellfeed import BlockShuffling, CellDataset, open_collection
from cellfeed._fetch import Reader
from cellfeed.transforms import Binarize, Log1p, NormalizeTotal, Scale, Transform

N_GENES = 30
RECIPES: dict[str, list[Transform]] = {
    "normalised": [NormalizeTotal(100.0)],
    "logarithms": [NormalizeTotal(100.0), Log1p()],
    "binary": [Log1p(), Binarize(0.9)],
    "scaled": [NormalizeTotal(100.0), Scale(None, np.arange(1, 31) / 8, zero_center=False)],
}


def chunked(file, n, dtype, compression):
    """Write column indices and values anew, in chunks of ``n`` elements."""
    for name in ("indices", "data"):
        values = file[f"X/{name}"][:]
        del file[f"X/{name}"]
        values = values.astype(dtype if name == "data" else np.int32)
        file["X"].create_dataset(name, data=values, chunks=(n,), compression=compression)


def expected_of(X, recipe):
    X = X.astype(np.float64)
    for each in RECIPES[recipe]:
        if isinstance(each, NormalizeTotal):
            totals = X.sum(axis=1, keepdims=True)
            X = X / np.where(totals == 0, 1, totals / each.target_sum)
        elif isinstance(each, Log1p):
            X = np.log1p(X)
        elif isinstance(each, Binarize):
            X = (each.threshold < X).astype(np.float64)
        elif isinstance(each, Scale):
            X = X / np.asarray(each.std)
    return X.astype(np.float32)


def delivered(dataset, n_rows):
    found = np.full((n_rows, N_GENES), np.nan, np.float32)
    for minibatch in dataset:
        found[np.asarray(minibatch.rows)] = dense(minibatch.X)
    return found


@pytest.mark.parametrize("recipe", list(RECIPES))
def test_chunks_of_any_size(write_h5ad, recipe):
    @settings(max_examples=25)
    @given(
        seed=st.integers(0, 1 << 30),
        n=st.integers(1, 200),
        dtype=st.sampled_from(["float32", "int16", "float64", "uint8"]),
        compression=st.sampled_from(["gzip", None]),
        threads=st.integers(1, 3),
    )
    def check(seed, n, dtype, compression, threads):
        X = np.random.default_rng(seed).poisson(0.4, (25, N_GENES)).astype(np.float32)
        X[0, 0] = 1  # chunks need an element
        path = write_h5ad(sp.csr_matrix(X), edit=lambda file: chunked(file, n, dtype, compression))
        dataset = CellDataset(
            open_collection(path),
            BlockShuffling(3),
            batch_size=4,
            fetch_factor=3,
            seed=seed,
            dtype="float32",
            num_threads=threads,
            transform=RECIPES[recipe],
        )
        expected = expected_of(X, recipe)
        np.testing.assert_allclose(delivered(dataset, 25), expected, rtol=3e-7)

    check()


def test_nothing_is_left_to_be_transformed_after(write_h5ad):
    X = np.random.default_rng(0).poisson(0.4, (40, N_GENES)).astype(np.float32)
    path = write_h5ad(sp.csr_matrix(X), edit=lambda file: chunked(file, 50, "float32", "gzip"))
    with Reader(open_collection(path), transforms={"X": [Log1p()]}) as reader:
        planned = reader.plan(np.arange(40), np.random.default_rng(1).permutation(40), 8)
    layout = planned.elements["X"].row_layout
    assert layout is not None
    assert layout.is_transformed


def test_columns_that_are_added_up_after_others_were_transformed(write_h5ad):
    """In a second file, which comes after fetches that had none."""
    X = np.random.default_rng(0).poisson(2.0, (30, N_GENES)).astype(np.float32) + 1

    def repeat(file):
        indices = file["X/indices"][:]
        indices[N_GENES * 20 + 4] = indices[N_GENES * 20 + 3]
        file["X/indices"][:] = indices

    summed = X.copy()
    summed[20, 3] += summed[20, 4]
    summed[20, 4] = 0
    paths = [write_h5ad(sp.csr_matrix(X)), write_h5ad(sp.csr_matrix(X), edit=repeat)]
    dataset = CellDataset(
        open_collection(paths), BlockShuffling(5), 10, 1, seed=0, transform=RECIPES["logarithms"]
    )
    expected = expected_of(np.concatenate([X, summed]), "logarithms")
    for _ in range(2):
        np.testing.assert_allclose(delivered(dataset, 60), expected, rtol=3e-7)


@pytest.mark.parametrize("prefetch", [1, 8])
def test_columns_that_are_added_up_in_fetches_that_were_planned_before_the_first(
    write_h5ad, prefetch
):
    X = np.random.default_rng(0).poisson(2.0, (60, N_GENES)).astype(np.float32) + 1

    def repeat(file):
        indices = file["X/indices"][:]
        indices[4::N_GENES] = indices[3::N_GENES]
        file["X/indices"][:] = indices

    summed = X.copy()
    summed[:, 3] += summed[:, 4]
    summed[:, 4] = 0
    dataset = CellDataset(
        open_collection(write_h5ad(sp.csr_matrix(X), edit=repeat)),
        BlockShuffling(5),
        10,
        1,
        seed=0,
        transform=RECIPES["logarithms"],
        prefetch=prefetch,
    )
    expected = expected_of(summed, "logarithms")
    np.testing.assert_allclose(delivered(dataset, 60), expected, rtol=3e-7)
