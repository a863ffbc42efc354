"""The obs columns that `preshuffle` writes, against pandas; and sources of other storages."""

import shutil
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.preshuffling.test_preshuffle import parts_of
from tests.loader.sources.arriving import Arriving, Rows

from cellfeed import ColumnError, MismatchError, open_collection, preshuffle
from cellfeed.sources import Storage, register

pytestmark = pytest.mark.usefixtures("zarr_in_this_thread")


def written_obs(store: Path) -> Any:
    """The obs of all parts in the order of the input."""
    table = pd.concat([part.obs for part in parts_of(store)])
    return table.sort_values(["source_file", "source_row"])


@pytest.mark.slow
def test_every_kind_of_obs_column(write_h5ad, out):
    def obs(cells, n):
        return {
            "category": pd.Categorical([*cells, None][:n]),
            "ordered": pd.Categorical(["low", "high"] * n, ["low", "high"], ordered=True)[:n],
            "text": [f"text {cell}" for cell in cells][:n],
            "flag": np.arange(n) % 2 == 0,
            "count": np.arange(n, dtype=np.int16),
            "score": np.linspace(0, 1, n, dtype=np.float32),
            "maybe": pd.array([*range(n - 1), None], dtype="Int32"),
        }

    X = sp.csr_matrix(np.eye(4, dtype=np.float32))
    paths = [write_h5ad(X, obs(cells, 4)) for cells in (["b", "a", "c", "d"], ["z", "a", "y", "x"])]
    preshuffle(paths, out, memory=2_000)
    found = written_obs(out)
    expected = pd.concat([ad.read_h5ad(path).obs.astype(object) for path in paths])
    assert list(found["category"].cat.categories) == ["a", "b", "c", "d", "x", "y", "z"]
    assert found["ordered"].cat.ordered
    assert list(found["ordered"].cat.categories) == ["low", "high"]
    dtypes = {"flag": bool, "count": "int16", "score": "float32", "maybe": "Int32"}
    assert all(found[name].dtype == dtype for name, dtype in dtypes.items())
    assert found["text"].tolist() == expected["text"].tolist()
    for name in expected:
        missing = expected[name].isna().to_numpy()
        np.testing.assert_array_equal(found[name].isna(), missing)
        assert found[name][~missing].tolist() == expected[name][~missing].tolist()


@pytest.mark.slow
def test_columns_that_only_some_files_have(write_h5ad, out):
    X = sp.csr_matrix(np.eye(3, dtype=np.float32))
    first = dict[str, Any](a=pd.Categorical(list("xyx")), n=[1, 2, 3], t=list("pqr"), f=[True] * 3)
    paths = [write_h5ad(X, first), write_h5ad(X, {"b": [0.5, 1.5, 2.5]})]
    preshuffle(paths, out, memory=1_500)
    found = written_obs(out)
    assert list(found) == ["a", "n", "t", "f", "b", "source_file", "source_row"]
    for name, values in first.items():
        assert found[name].tolist()[:3] == list(values)
        assert found[name].isna().tolist() == [False] * 3 + [True] * 3
    assert found["b"].isna().tolist() == [True] * 3 + [False] * 3


def test_same_file_names_are_told_apart_by_folder(plates, tmp_path, out):
    paths = []
    for folder, plate in zip("ab", plates, strict=True):
        (tmp_path / folder).mkdir()
        paths.append(Path(shutil.copy(plate, tmp_path / folder / "plate.h5ad")))
    preshuffle(paths, out)
    assert set(parts_of(out)[0].obs["source_file"]) == {str(path) for path in paths}


def test_provenance_gives_way_to_columns_of_that_name(write_h5ad, out):
    path = write_h5ad(np.eye(3, dtype=np.float32), {"source_row": ["mine"] * 3})
    done = preshuffle(path, out)
    assert done.provenance == ("source_file", "source_row_2")
    obs = parts_of(out)[0].obs
    assert obs["source_row"].tolist() == ["mine"] * 3
    assert sorted(obs["source_row_2"]) == [0, 1, 2]


def test_integers_of_obs_are_kept_or_refused(write_h5ad, out, tmp_path):
    X = np.eye(2, dtype=np.float32)

    def write(dtype, largest):
        return write_h5ad(X, {"number": np.array([5, largest], dtype)})

    signed, unsigned = write("i8", (1 << 53) + 1), write("u8", (1 << 63) - 1)
    preshuffle([signed, unsigned], out)
    assert sorted(written_obs(out)["number"]) == [5, 5, (1 << 53) + 1, (1 << 63) - 1]
    alone = tmp_path / "alone.zarr"
    preshuffle([write("u8", 1 << 63)], alone)
    assert sorted(written_obs(alone)["number"]) == [5, 1 << 63]
    told = r"'number' has \d+, which (int|float)64, the common dtype of the files, cannot"
    for k, other in enumerate((write("u8", 1 << 63), write_h5ad(X, {"number": [0.5, 1.5]}))):
        with pytest.raises(ColumnError, match=told):
            preshuffle([signed, other], tmp_path / f"{k}.zarr")


def test_columns_that_do_not_fit(write_h5ad, out):
    X = np.eye(2, dtype=np.float32)
    paths = [write_h5ad(X, {"a": [1, 2]}), write_h5ad(X, {"a": ["x", "y"]})]
    with pytest.raises(MismatchError, match="'a' has text, but numbers"):
        preshuffle(paths, out)
    assert not out.exists()


# Sources of any storage, which are read through `Source` alone

GENES = ["g0", "g1", "g2", "g3", "g4"]


def counts_of(number):
    return np.random.default_rng(number).poisson(1, (70, 5)).astype(np.float32)


def obs_of(number):
    plate = np.array(["a", "b", None], object)[np.arange(70) % 3]
    return pd.DataFrame({"plate": plate, "number": np.arange(70.0), f"only {number}": 1})


def open_counts(location, elements):
    number = int(location.name)
    counts = counts_of(number)
    matrix = sp.csr_array(counts) if location.scheme == "test-csr" else counts
    return [Arriving(location, {"X": Rows(matrix, GENES)}, obs_of(number))]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Observation names are not unique:UserWarning")
@pytest.mark.parametrize("scheme", ["test-csr", "test-dense"])
def test_sources_of_another_storage(tmp_path, scheme):
    register(Storage(name=scheme, open=open_counts, schemes=(scheme,)))
    given = [f"{scheme}://cells/1", f"{scheme}://cells/2"]
    out = tmp_path / "out.zarr"
    done = preshuffle(given, out, seed=1, memory=30_000)
    assert (done.n_cells, done.n_parts_written) == (140, done.n_parts)
    assert done.n_parts > 1
    parts = [ad.read_zarr(out / f"dataset_{k}") for k in range(done.n_parts)]
    cells = ad.concat(parts, join="outer")
    assert list(parts[0].var_names) == GENES
    keys = [*zip(cells.obs["source_file"], cells.obs["source_row"], strict=True)]
    assert sorted(keys) == [(name, row) for name in "12" for row in range(70)]
    X = np.stack([counts_of(int(name))[row] for name, row in keys])
    np.testing.assert_array_equal(sp.csr_array(cells.X).toarray(), X)
    expected = pd.concat({name: obs_of(int(name)) for name in "12"}).loc[keys]
    assert list(cells.obs_names) == [str(row) for _, row in keys]
    for name in expected:
        found, own = cells.obs[name].astype(object), expected[name].astype(object)
        assert found.isna().tolist() == own.isna().tolist()
        assert found.dropna().tolist() == own.dropna().tolist()
    again = preshuffle(given, out, seed=1, memory=30_000)
    assert again.n_parts_written == 0
    assert len(open_collection(out, obs=["plate"])) == 140
