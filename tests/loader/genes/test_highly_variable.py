"""Highly variable genes against the published formulas in NumPy, and against scanpy."""

import sys
import types
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from cellfeed import (
    ColumnError,
    FormatError,
    ParameterError,
    highly_variable_genes,
    open_collection,
    qc_metrics,
)
from cellfeed.genes import _sums

N, N_GENES = 300, 120


class PolynomialFit:
    """Stands in for scikit-misc's loess, where that is not installed: one polynomial for all."""

    def __init__(self, x, y, span, degree):
        self.x, self.y, self.degree, self.span = x, y, degree, span

    def fit(self):
        if np.unique(self.x).size <= self.degree:
            raise ValueError("b'svddc failed in l2fit.'")
        fitted = np.polyval(np.polyfit(self.x, self.y, self.degree), self.x)
        self.outputs = types.SimpleNamespace(fitted_values=fitted)


@pytest.fixture(params=["polynomial", "loess"])
def regression(request, monkeypatch):
    if request.param == "loess":
        return pytest.importorskip("skmisc.loess").loess
    module = types.ModuleType("skmisc.loess")
    module.loess = PolynomialFit  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "skmisc", types.ModuleType("skmisc"))
    monkeypatch.setitem(sys.modules, "skmisc.loess", module)
    return PolynomialFit


def counts_of(seed=0, n=N, n_genes=N_GENES):
    """Counts of cells of several kinds, with some genes that no cell or only one has."""
    rng = np.random.default_rng(seed)
    means = rng.gamma(0.4, 2.0, n_genes)
    kinds = rng.gamma(2.0, 0.5, (3, n_genes))[rng.integers(3, size=n)]
    X = rng.poisson(means * kinds).astype(np.float32)
    X[:, :3] = 0
    X[n // 2, 2] = 7
    return X


@pytest.fixture(scope="module")
def adata():
    batches = np.random.default_rng(1).choice(["b", "a", "c"], N, p=[0.6, 0.3, 0.1])
    obs = pd.DataFrame(
        {"plate": pd.Categorical(batches), "run": np.arange(N) % 2},
        index=[f"cell{k}" for k in range(N)],
    )
    var = pd.DataFrame(index=[f"gene{k:03}" for k in range(N_GENES)])
    X = sp.csr_matrix(counts_of())
    return ad.AnnData(X, obs=obs, var=var, layers={"counts": X})


@pytest.fixture(scope="module")
def files(adata, tmp_path_factory):
    """The cells in two files."""
    folder = tmp_path_factory.mktemp("plates")
    adata[:170].write_h5ad(folder / "p1.h5ad", compression="gzip")
    adata[170:].write_h5ad(folder / "p2.h5ad")
    return sorted(folder.glob("*.h5ad"))


def moments(X):
    return X.mean(axis=0, dtype=np.float64), X.var(axis=0, ddof=1, dtype=np.float64)


def standardised_variances(X, regression):
    """Variances of counts that are standardised and clipped (Stuart et al. 2019)."""
    X = X.astype(np.float64)
    means, variances = moments(X)
    varies = variances > 0
    model = regression(np.log10(means[varies]), np.log10(variances[varies]), span=0.3, degree=2)
    model.fit()
    expected = np.zeros(means.size)
    expected[varies] = model.outputs.fitted_values
    deviations = np.sqrt(10**expected)
    clipped = np.minimum((X - means) / deviations, np.sqrt(len(X)))
    return np.square(clipped).sum(axis=0) / (len(X) - 1)


@pytest.mark.filterwarnings("ignore:.*(invalid|divide|empty slice|All-NaN).*:RuntimeWarning")
class TestFormulas:
    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_counts(self, files, adata, regression, num_threads, monkeypatch):
        monkeypatch.setattr(_sums, "usable_cpu_count", lambda: num_threads)
        table = highly_variable_genes(open_collection(files), n_top_genes=20)
        X = adata.X.toarray()
        means, variances = moments(X)
        norm = standardised_variances(X, regression)
        assert table.index.tolist() == adata.var_names.tolist()
        assert np.allclose(table["means"], means)
        assert np.allclose(table["variances"], variances)
        assert np.allclose(table["variances_norm"], norm)
        best = np.argsort(-norm)[:20]
        assert set(np.flatnonzero(table["highly_variable"])) == set(best)
        assert table["highly_variable_rank"].iloc[best].tolist() == [*range(20)]
        assert table["highly_variable_rank"].notna().sum() == 20
        assert "highly_variable_nbatches" not in table

    def test_large_values_are_clipped(self, write_h5ad, regression):
        X = np.random.default_rng(0).poisson(np.linspace(0.1, 20, N_GENES), (400, N_GENES))
        X[::20, 7] = 200  # 20 cells, above about 70
        X[::10, 8] = 90
        collection = open_collection(write_h5ad(sp.csr_matrix(X.astype(np.float32))))
        table = highly_variable_genes(collection, n_top_genes=2)
        expected = standardised_variances(X, regression)
        assert np.allclose(table["variances_norm"], expected)
        plain = moments(X)[1] / moments(X)[0]
        assert expected[7] < plain[7] / 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scanpy's own
class TestScanpy:
    """The whole table is that of scanpy, in memory."""

    @pytest.fixture
    def sc(self):
        return pytest.importorskip("scanpy")

    @staticmethod
    def compare(sc, files, adata, batch_key):
        expected = adata.copy()
        if batch_key == "run":
            expected.obs["run"] = expected.obs["run"].astype("category")
        there = sc.pp.highly_variable_genes(
            expected, n_top_genes=20, flavor="seurat_v3", batch_key=batch_key, inplace=False
        )
        here = highly_variable_genes(open_collection(files), n_top_genes=20, batch_key=batch_key)
        there = there.drop(columns=["gene_name"], errors="ignore")
        pd.testing.assert_frame_equal(
            here, there[here.columns], check_dtype=False, check_names=False, rtol=1e-4, atol=1e-4
        )
        assert set(here) == set(there)
        assert here["highly_variable"].sum() == 20

    def test_counts(self, sc, files, adata, regression):
        self.compare(sc, files, adata, None)

    @pytest.mark.parametrize("regression", ["polynomial"], indirect=True)
    @pytest.mark.parametrize("batch_key", ["plate", "run"])
    def test_counts_of_batches(self, sc, files, adata, regression, batch_key):
        self.compare(sc, files, adata, batch_key)

    @pytest.mark.parametrize("regression", ["loess"], indirect=True)
    @pytest.mark.parametrize("batch_key", ["plate", "run"])
    def test_loess_of_batches(self, sc, files, adata, regression, batch_key):
        """Against scanpy's tables of each batch alone.

        Loess is not continuous: the last bit of a mean can change its fit by some percent. With a
        `batch_key`, scanpy 1.12 rounds means in another way than without.
        """
        here = highly_variable_genes(open_collection(files), n_top_genes=20, batch_key=batch_key)
        there = [
            sc.pp.highly_variable_genes(
                adata[adata.obs[batch_key] == batch].copy(),
                n_top_genes=20,
                flavor="seurat_v3",
                inplace=False,
            )
            for batch in adata.obs[batch_key].unique()
        ]
        ranks = pd.concat([table["highly_variable_rank"] for table in there], axis=1)
        assert np.allclose(
            here["variances_norm"], np.mean([table["variances_norm"] for table in there], axis=0)
        )
        assert np.array_equal(here["highly_variable_rank"], ranks.median(axis=1), equal_nan=True)
        assert np.array_equal(here["highly_variable_nbatches"], ranks.notna().sum(axis=1))

    def test_qc_metrics(self, sc, files, adata):
        of_cells, of_genes = sc.pp.calculate_qc_metrics(
            adata, percent_top=None, log1p=False, inplace=False
        )
        obs, var = qc_metrics(open_collection(files))
        assert [*obs] == [*of_cells]
        assert [*var] == [*of_genes]
        assert np.allclose(obs, of_cells)
        pd.testing.assert_frame_equal(var, of_genes, check_dtype=False, check_names=False)


DTYPES = ["float32", "float64", "uint8", "int16", "int32", "int64"]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    n, n_genes = draw(st.integers(1, 40)), draw(st.integers(1, 30))
    rng = np.random.default_rng(draw(st.integers(0, 9)))
    dtype = draw(st.sampled_from(DTYPES))
    X = rng.poisson(draw(st.sampled_from([0.01, 1.0, 20.0])), (n, n_genes)).astype(dtype)
    if dtype == "int64":
        X *= 2**30 + 1  # float32 would round it
    if dtype.startswith("float") and draw(st.booleans()):
        X *= rng.random(X.shape).astype(dtype)
    rows = draw(st.none() | st.sets(st.integers(0, n - 1), min_size=1))
    return {
        "X": X if draw(st.booleans()) else sp.csr_matrix(X),
        "rows": None if rows is None else sorted(rows),
        "num_threads": draw(st.integers(1, 3)),
        "bytes": draw(st.sampled_from([1, 2_000, 1 << 26])),
    }


class TestQcMetrics:
    @given(case=cases())
    def test_sums_are_exact(self, write_h5ad, case):
        path = write_h5ad(case["X"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_sums, "_FETCH_BYTES", case["bytes"])
            patch.setattr(_sums, "usable_cpu_count", lambda: case["num_threads"])
            obs, var = qc_metrics(open_collection(path), indices=case["rows"])
        dense = case["X"] if isinstance(case["X"], np.ndarray) else case["X"].toarray()
        rows = np.arange(len(dense)) if case["rows"] is None else case["rows"]
        exact = dense[rows].astype(np.float64)
        assert obs.index.tolist() == list(rows)
        assert np.allclose(obs["total_counts"], exact.sum(axis=1), rtol=1e-14)
        assert np.array_equal(obs["n_genes_by_counts"], (exact != 0).sum(axis=1))
        assert np.allclose(var["total_counts"], exact.sum(axis=0), rtol=1e-14)
        assert np.allclose(var["mean_counts"], exact.mean(axis=0), rtol=1e-14)
        assert np.array_equal(var["n_cells_by_counts"], (exact != 0).sum(axis=0))
        dropout = 100 * (exact == 0).mean(axis=0)
        assert np.allclose(var["pct_dropout_by_counts"], dropout)

    def test_an_element_and_joined_genes(self, write_h5ad):
        paths = [
            write_h5ad(sp.csr_matrix(np.full((2, 2), k, np.float32)), genes=genes)
            for k, genes in ((1, ["a", "b"]), (2, ["c", "b"]))
        ]
        _, var = qc_metrics(open_collection(paths, join_vars="outer"))
        assert var["total_counts"].to_dict() == {"a": 2, "b": 6, "c": 4}

    def test_a_layer(self, files, adata):
        collection = open_collection(files, elements=["X", "layers/counts"])
        obs, _ = qc_metrics(collection, element="layers/counts")
        assert np.array_equal(obs["total_counts"], np.ravel(adata.layers["counts"].sum(axis=1)))
        with pytest.raises(ParameterError, match=r"no element 'layers/count'.* open it"):
            qc_metrics(collection, element="layers/count")


class TestRefused:
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    @pytest.mark.parametrize("sparse", [False, True])
    def test_values_that_are_not_finite(self, write_h5ad, value, sparse):
        X = counts_of()
        X[123, 45] = value
        paths = [write_h5ad(X[:100]), write_h5ad(sp.csr_matrix(X[100:]) if sparse else X[100:])]
        told = rf"`X` is {value} in row 123 .* gene 'gene45'"
        with pytest.raises(FormatError, match=told) as raised:
            qc_metrics(open_collection(paths))
        assert str(raised.value).startswith(str(paths[1]))
        assert qc_metrics(open_collection(paths), indices=np.r_[:123, 124:N])[0].shape == (N - 1, 2)

    def test_counts_that_are_none(self, write_h5ad, regression):
        X = counts_of()
        X[0, 5] = 0.5
        with pytest.warns(UserWarning, match="1 values that are no integers, and so no counts"):
            highly_variable_genes(open_collection(write_h5ad(X)))
        X[0, 5] = -1
        with pytest.raises(ParameterError, match="`X` has 1 negative values, which are no counts"):
            highly_variable_genes(open_collection(write_h5ad(X)))

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"n_top_genes": 0}, ParameterError, "`n_top_genes >= 1`"),
            ({"span": 2}, ParameterError, "`0 < span <= 1` must hold, but got span=2"),
            ({"span": "wide"}, ParameterError, "`0 < span <= 1`"),
            ({"batch_key": "plte"}, ColumnError, "plte"),
            ({"indices": [N]}, ParameterError, f"`indices < {N}`"),
        ],
    )
    def test_parameters(self, files, regression, options, error, message):
        with pytest.raises(error, match=message):
            highly_variable_genes(open_collection(files), **options)

    def test_cells_without_a_batch(self, write_h5ad, regression):
        plates = ["a", None, "b", "b"]
        without = open_collection(write_h5ad(counts_of(n=4), {"plate": plates}))
        with pytest.raises(ColumnError, match=r"1 cells have no 'plate' in obs; .*`indices`"):
            highly_variable_genes(without, batch_key="plate")

    @pytest.mark.parametrize("X", [np.zeros((3, N_GENES)), np.zeros((1, N_GENES)), counts_of(n=1)])
    def test_cells_in_which_no_gene_varies(self, regression, X):
        told = rf"^no gene varies in {len(X)} cells; give cells with counts$"
        with pytest.raises(ParameterError, match=told):
            highly_variable_genes(open_collection(ad.AnnData(X)))
        names = [*map(str, range(N + len(X)))]
        plates = pd.DataFrame({"plate": ["a"] * N + ["b"] * len(X)}, index=names)
        both = ad.AnnData(np.vstack([counts_of(), X]), plates)
        told = rf"^no gene varies in batch 'b' \({len(X)} cells\); leave it out of `indices`$"
        with pytest.raises(ParameterError, match=told):
            highly_variable_genes(open_collection(both), batch_key="plate")

    def test_a_regression_that_fails(self, write_h5ad, regression):
        path = write_h5ad(np.eye(2, dtype=np.float32))
        with pytest.raises(ParameterError, match=r"variances of 2 genes in 2 cells fails"):
            highly_variable_genes(open_collection(path))

    def test_what_has_no_genes(self, tmp_path):
        with pytest.raises(ParameterError, match="open it with `open_collection`"):
            qc_metrics(np.eye(3))  # type: ignore[arg-type]
        images = ad.AnnData(np.eye(3), obsm={"image": np.zeros((3, 2, 2))})
        with pytest.raises(ParameterError, match="'obsm/image' has no column for each gene"):
            qc_metrics(open_collection(images, elements=["obsm/image"]))


def test_without_scikit_misc(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "skmisc.loess", None)
    told = r"need scikit-misc.*pip install 'cellfeed\[hvg\]'"
    with pytest.raises(ParameterError, match=told):
        highly_variable_genes(open_collection(files))
