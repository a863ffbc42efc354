import errno
import json
import shutil
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import anndata
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse

from cellfeed import ParameterError
from cellfeed import synthetic as _synthetic
from cellfeed.synthetic import plate_sizes, write_tahoe_like

CONDITION = ["plate", "drug", "dosage", "cell_line"]
CATEGORICAL = ["plate", "cell_line", "drug", "moa_broad", "moa_fine"]
TINY: dict[str, Any] = {
    "n_cells": 120,
    "n_genes": 300,
    "n_plates": 3,
    "n_cell_lines": 4,
    "n_drugs": 6,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Paths of a collection with everything at full size but the numbers of cells and genes."""
    return write_tahoe_like(tmp_path_factory.mktemp("small"), n_cells=7_000, n_genes=2_000)


@pytest.fixture(scope="module")
def plates(paths):
    return [anndata.read_h5ad(path) for path in paths]


@pytest.fixture(scope="module")
def obs(plates):
    return pd.concat([plate.obs.astype(dict.fromkeys(CATEGORICAL, "str")) for plate in plates])


@pytest.fixture(scope="module")
def full_width(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full_width")
    return write_tahoe_like(folder, n_cells=600, n_plates=1)[0]


class TestExperiment:
    def test_plates_are_as_uneven_as_in_tahoe(self, paths, obs):
        assert [path.name for path in paths] == [f"plate{n:02d}.h5ad" for n in range(1, 15)]
        assert len(obs) == 7_000
        assert obs.index.is_unique
        shares = obs["plate"].value_counts(normalize=True)
        assert len(shares) == 14
        assert -(shares * np.log2(shares)).sum() == pytest.approx(3.78, abs=0.005)
        assert shares.min() == pytest.approx(0.047, abs=0.001)
        assert shares.max() == pytest.approx(0.104, abs=0.001)

    def test_another_number_of_plates_is_even(self, tmp_path):
        paths = write_tahoe_like(tmp_path, **(TINY | {"n_cells": 100}))
        assert [anndata.read_h5ad(path).n_obs for path in paths] == [34, 33, 33]
        assert plate_sizes(100, np.array([3])[0]).tolist() == [34, 33, 33]

    def test_labels_are_those_of_tahoe(self, obs):
        expected = {"cell_line": 50, "drug": 380, "moa_broad": 4, "moa_fine": 25}
        assert obs.nunique()[[*expected]].to_dict() == expected
        assert set(obs["dosage"]) == {0.05, 0.5, 5.0}
        assert len(obs[["drug", "moa_fine", "moa_broad"]].drop_duplicates()) == 380
        assert len(obs[["moa_fine", "moa_broad"]].drop_duplicates()) == 25
        assert (obs.groupby("plate")["cell_line"].nunique() == 50).all()
        # Each drug can be learned without any one plate.
        assert (obs.groupby("drug")["plate"].nunique() == 3).all()

    def test_cells_of_a_condition_lie_together(self, plates):
        for plate in plates:
            codes = plate.obs.groupby(CONDITION, observed=True).ngroup().to_numpy()
            n_runs = 1 + np.count_nonzero(np.diff(codes))
            assert n_runs == len(np.unique(codes))

    def test_conditions_have_about_20_cells_once_all_drugs_have_a_place(self, tmp_path):
        paths = write_tahoe_like(tmp_path, n_cells=3_000, n_genes=50, n_plates=1, n_drugs=30)
        sizes = anndata.read_h5ad(paths[0]).obs.groupby(CONDITION, observed=True).size()
        assert 15 <= sizes.mean() <= 25
        assert sizes.min() < 10
        assert sizes.max() > 30

    def test_no_more_conditions_than_pairs_of_well_and_line(self, tmp_path):
        (path,) = write_tahoe_like(
            tmp_path, n_cells=1_000, n_genes=50, n_plates=1, n_cell_lines=2, n_drugs=2
        )
        assert anndata.read_h5ad(path).obs.groupby(CONDITION, observed=True).ngroups == 12

    @pytest.mark.parametrize("n_plates", [1, 2, 3, 5])
    @pytest.mark.parametrize("n_drugs", [1, 2, 7])
    def test_any_number_of_plates_and_drugs(self, tmp_path, n_plates, n_drugs):
        parameters = TINY | {"n_plates": n_plates, "n_drugs": n_drugs}
        paths = write_tahoe_like(tmp_path, **parameters)
        obs = pd.concat([anndata.read_h5ad(path).obs for path in paths])
        assert len(obs) == 120
        assert obs["drug"].nunique() == n_drugs


class TestMatrix:
    def test_rows_are_sorted_counts_of_the_same_genes(self, plates):
        assert plates[0].var_names.is_unique
        for plate in plates:
            assert plate.var_names.equals(plates[0].var_names)
            assert isinstance(plate.X, scipy.sparse.csr_matrix)
            assert plate.X.dtype == np.float32
            assert plate.X.data.min() == 1
            assert np.array_equal(plate.X.data, plate.X.data.round())
            rows = [plate.X.indices[start:stop] for start, stop in pairwise(plate.X.indptr)]
            assert all((np.diff(genes) > 0).all() and len(genes) for genes in rows)
            assert np.array_equal(plate.obs["n_counts"], np.ravel(plate.X.sum(axis=1)))

    @pytest.mark.slow
    def test_full_width_has_as_many_nonzeros_as_tahoe(self, full_width):
        plate = anndata.read_h5ad(full_width)
        assert plate.n_vars == 62_710
        nonzeros = np.diff(plate.X.indptr)
        assert 2_150 <= nonzeros.mean() <= 2_310
        assert 0.2 <= nonzeros.std() / nonzeros.mean() <= 0.5

    @pytest.mark.slow
    def test_a_few_genes_have_much_of_the_counts(self, full_width):
        totals = np.asarray(anndata.read_h5ad(full_width).X.sum(axis=0)).ravel()
        totals[::-1].sort()
        assert totals[:1000].sum() > 0.4 * totals.sum()
        assert np.count_nonzero(totals) > 20_000


def _describe(path):
    """Return what a file consists of: attributes of everything, and the form of each array."""
    description: dict[str, object] = {}

    def visit(name, item):
        attributes = {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in item.attrs.items()
        }
        form: tuple[object, ...] = ()
        if isinstance(item, h5py.Dataset):
            form = (item.shape, item.dtype, item.maxshape, item.compression, item.compression_opts)
        description[name] = (attributes, form)

    with h5py.File(path) as file:
        visit("/", file)
        file.visititems(visit)
    return description


def test_the_file_is_as_anndata_would_write_it(paths, plates, tmp_path):
    rewritten = tmp_path / "rewritten.h5ad"
    plates[0].write_h5ad(rewritten, compression="gzip")
    assert _describe(paths[0]) == _describe(rewritten)
    with h5py.File(paths[0]) as ours, h5py.File(rewritten) as theirs:
        for name in ("data", "indices"):
            assert np.array_equal(ours["X"][name], theirs["X"][name])
            assert ours["X"][name].chunks[0] == pytest.approx(theirs["X"][name].chunks[0], rel=0.1)


@pytest.mark.parametrize("expected", [300, 30_000, 300_000])
def test_values_are_appended_in_any_portions(tmp_path, expected):
    values = np.random.default_rng(0).poisson(2, 30_000).astype(np.float32)
    with h5py.File(tmp_path / "values.h5", "w") as file:
        array = _synthetic._GrowingArray(file, "values", np.float32, expected)
        for portion in np.split(values, [7, 7, 20_000]):
            array.append(portion)
        array.finish()
        assert np.array_equal(file["values"], values)


def test_row_pointers_of_more_elements_than_int32_can_count(tmp_path, monkeypatch):
    before, *_ = write_tahoe_like(tmp_path / "int32", **TINY)
    monkeypatch.setattr(_synthetic, "_INT32_MAX", 1_000)
    after, *_ = write_tahoe_like(tmp_path / "int64", **TINY)
    for path, dtype in ((before, np.int32), (after, np.int64)):
        with h5py.File(path) as file:
            assert file["X/indptr"].dtype == dtype
    assert (anndata.read_h5ad(after).X != anndata.read_h5ad(before).X).nnz == 0


@pytest.fixture(scope="module")
def expression(plates):
    counts = scipy.sparse.vstack([plate.X for plate in plates]).toarray()
    expression = np.log1p(counts * (500 / counts.sum(axis=1, keepdims=True)))
    return expression - expression.mean(axis=0)


@pytest.mark.parametrize(
    ("task", "at_least"),
    [("cell_line", 0.8), ("moa_broad", 0.4), ("moa_fine", 0.15), ("drug", 0.05)],
)
def test_thirteen_plates_teach_what_is_on_the_other(expression, obs, task, at_least):
    _, codes = np.unique(obs[task], return_inverse=True)
    test = (obs["plate"] == "plate14").to_numpy()
    assert _nearest_centroid_accuracy(expression, codes, test) > at_least


def _nearest_centroid_accuracy(expression, codes, test):
    is_class = np.eye(codes.max() + 1)[codes] * ~test[:, None]
    centroids = (is_class / is_class.sum(axis=0)).T @ expression
    scores = expression[test] @ centroids.T - (centroids**2).sum(axis=1) / 2
    return np.mean(scores.argmax(axis=1) == codes[test])


class TestRepetition:
    def test_bytes_do_not_depend_on_threads(self, tmp_path, monkeypatch):
        monkeypatch.setattr(_synthetic, "usable_cpu_count", lambda: 1)
        one = write_tahoe_like(tmp_path / "one", **TINY)
        monkeypatch.setattr(_synthetic, "usable_cpu_count", lambda: 3)
        three = write_tahoe_like(tmp_path / "three", **TINY)
        for path, other in zip(one, three, strict=True):
            assert path.read_bytes() == other.read_bytes()

    def test_the_seed_changes_all(self, tmp_path):
        (zero, *_), (one, *_) = (
            write_tahoe_like(tmp_path / str(seed), **TINY, seed=seed) for seed in (0, 1)
        )
        zero, one = anndata.read_h5ad(zero), anndata.read_h5ad(one)
        assert not zero.obs["drug"].astype(str).equals(one.obs["drug"].astype(str))
        assert (zero.X != one.X).nnz

    def test_a_complete_collection_is_left_alone(self, tmp_path):
        paths = write_tahoe_like(tmp_path, **TINY)
        before = [path.stat().st_mtime_ns for path in paths]
        assert write_tahoe_like(tmp_path, **TINY) == paths
        assert [path.stat().st_mtime_ns for path in paths] == before

    def test_a_run_that_was_cut_short_is_taken_up(self, tmp_path):
        first, second, third = write_tahoe_like(tmp_path, **TINY)
        before, content = first.stat().st_mtime_ns, second.read_bytes()
        second.unlink()
        (tmp_path / "plate02.h5ad.part").write_bytes(b"what a killed run leaves")
        write_tahoe_like(tmp_path, **TINY)
        assert second.read_bytes() == content
        assert first.stat().st_mtime_ns == before
        assert sorted(tmp_path.iterdir()) == [tmp_path / "collection.json", first, second, third]

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_a_run_that_fails_leaves_no_half_files(self, tmp_path, monkeypatch, num_threads):
        def fail(n_written):
            raise KeyboardInterrupt

        monkeypatch.setattr(_synthetic, "usable_cpu_count", lambda: num_threads)
        with pytest.raises(KeyboardInterrupt):
            write_tahoe_like(tmp_path, **TINY, on_progress=fail)
        assert not list(tmp_path.glob("*.part"))

    @pytest.mark.parametrize("num_threads", [1, 3])
    def test_a_disk_that_runs_full(self, tmp_path, monkeypatch, num_threads):
        def fail(array, values):
            raise OSError(errno.ENOSPC, "file write failed: what HDF5 says about it at length")

        monkeypatch.setattr(_synthetic._GrowingArray, "append", fail)
        monkeypatch.setattr(_synthetic, "usable_cpu_count", lambda: num_threads)
        with pytest.raises(OSError, match=r"No space left on device.*plate0\d\.h5ad'"):
            write_tahoe_like(tmp_path, **TINY)
        assert [path.name for path in tmp_path.iterdir()] == ["collection.json"]

    def test_a_disk_that_is_too_small(self, tmp_path, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000))
        with pytest.raises(OSError, match=r"are needed, but 1\.0 kB are free"):
            write_tahoe_like(tmp_path / "new" / "folder", **TINY)
        assert not list(tmp_path.iterdir())

    def test_a_disk_that_is_too_small_for_many_genes(self, tmp_path):
        with pytest.raises(OSError, match=r"^\[Errno 28\] about .* are needed, but .* are free"):
            write_tahoe_like(tmp_path, **(TINY | {"n_genes": 10**15}))
        assert not list(tmp_path.iterdir())

    def test_progress_ends_with_all_cells(self, tmp_path):
        reports: list[int] = []
        write_tahoe_like(tmp_path, **TINY, on_progress=reports.append)
        assert reports == sorted(reports)
        assert reports[-1] == 120


class TestOtherCollection:
    def test_is_not_mixed(self, tmp_path):
        write_tahoe_like(tmp_path, **TINY)
        with pytest.raises(ParameterError, match=r"contains another collection.*remove its plates"):
            write_tahoe_like(tmp_path, **TINY, seed=1)

    def test_is_not_mixed_with_files_of_unknown_origin(self, tmp_path):
        (tmp_path / "plate07.h5ad").touch()
        with pytest.raises(ParameterError, match=r"plate07\.h5ad"):
            write_tahoe_like(tmp_path, **TINY)

    def test_is_replaced_whatever_its_record(self, tmp_path):
        (tmp_path / "collection.json").write_bytes(b"\xff not UTF-8")
        write_tahoe_like(tmp_path, **TINY)
        assert json.loads((tmp_path / "collection.json").read_text())["n_cells"] == 120


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("n_cells", 0),
        ("n_cells", 29),
        ("n_cells", 10**26),
        ("n_genes", -1),
        ("n_plates", 0),
        ("n_cell_lines", 0),
        ("n_drugs", 2.5),
        ("seed", -1),
    ],
)
def test_bad_parameters_name_the_value(tmp_path, parameter, value):
    with pytest.raises(ParameterError, match=f"{parameter}={value}"):
        write_tahoe_like(tmp_path / "new", **(TINY | {parameter: value}))
    assert not (tmp_path / "new").exists()
