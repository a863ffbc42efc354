"""Archives of cellstream hold what the h5ad has that they were made from."""

import os
import re
import sys
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.warm import python as warm

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    FormatError,
    PathError,
    open_collection,
    preshuffle,
)
from cellfeed_tuner import autotune

cellstream = pytest.importorskip("cellstream")
cell = pytest.importorskip("cellstream.cell")

N_CELLS, N_GENES = 300, 40
OBS = ["plate", "donor", "n_counts", "dosage"]
SMALL: dict[str, Any] = {
    "block_sizes": [4],
    "fetch_factors": [2],
    "workers": [0],
    "entropy_floor": 0.5,
}


def make_adata(seed=0, dtype=np.float32, largest=9):
    random = np.random.default_rng(seed)
    X: Any = sp.random(N_CELLS, N_GENES, 0.4, "csr", random_state=random)
    X.data = random.integers(1, largest + 1, X.nnz).astype(dtype)
    obs = pd.DataFrame(
        {
            "plate": pd.Categorical.from_codes(
                random.integers(-1, 3, N_CELLS), pd.Index(["p2", "p1", "p3"])
            ),
            "donor": [f"donor {k % 7}" for k in range(N_CELLS)],
            "n_counts": np.arange(N_CELLS),
            "dosage": np.where(random.random(N_CELLS) < 0.2, np.nan, 0.5),
        },
        index=[f"cell {k}" for k in range(N_CELLS)],
    )
    adata = ad.AnnData(X, obs=obs, var=pd.DataFrame(index=[f"gene {k}" for k in range(N_GENES)]))
    adata.var["length"] = np.arange(N_GENES)
    adata.obsm["X_pca"] = random.random((N_CELLS, 3)).astype(np.float32)
    return adata


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cellstream")
    adata = make_adata()
    adata.write_h5ad(folder / "cells.h5ad")
    cell.write_cell_archive(adata, folder / "cells.csad")
    return folder / "cells.csad", folder / "cells.h5ad", adata


def minibatches_of(collection, **options):
    strategy = BlockShuffling(4)
    options = {"batch_size": 16, "fetch_factor": 3, "seed": 1, "as_torch": False, **options}
    return CellDataset(collection, strategy, **options)


def labels_of(collection, name, values):
    column = collection.obs[name]
    return column.decode(values).tolist() if hasattr(column, "decode") else values.tolist()


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_same_minibatches_as_from_the_h5ad(stored, n_threads):
    elements = ["X", "obsm/X_pca"]
    both = [open_collection(path, obs=OBS, elements=elements) for path in stored[:2]]
    assert both[0].var_names.tolist() == both[1].var_names.tolist()
    epochs = [minibatches_of(each, num_threads=n_threads) for each in both]
    n = 0
    for some, others in zip(*epochs, strict=True):
        assert some.rows.tolist() == others.rows.tolist()
        for part in ("data", "indices", "indptr"):
            np.testing.assert_array_equal(getattr(some.X, part), getattr(others.X, part))
        np.testing.assert_array_equal(some["obsm/X_pca"], others["obsm/X_pca"])
        for name in OBS:
            pair = zip(both, (some, others), strict=True)
            labels = [labels_of(each, name, cells.obs[name]) for each, cells in pair]
            assert str(labels[0]) == str(labels[1])  # NaN equals NaN
        n += len(some.rows)
    assert n == N_CELLS


def test_values_that_float32_does_not_hold(tmp_path):
    adata = make_adata(dtype=np.float64, largest=2**31)
    cell.write_cell_archive(adata, tmp_path / "wide.csad")
    collection = open_collection(tmp_path / "wide.csad")
    rows = np.array([5, 0, 299, 5])
    assert collection.elements["X"].dtype == np.float64
    np.testing.assert_array_equal(collection[rows].X.toarray(), adata.X[rows].toarray())


@pytest.mark.filterwarnings("ignore:CellStore.gather_rows:UserWarning")
def test_without_its_compiled_decoder(tmp_path, monkeypatch):
    adata = make_adata()
    cell.write_cell_archive(adata, tmp_path / "cells.csad", codec="zstd")
    monkeypatch.setenv("CELLSTREAM_DISABLE_RUST", "1")
    collection = open_collection(tmp_path / "cells.csad")
    with pytest.warns(UserWarning, match=r"cellstream.*install its current wheel"):
        dataset = minibatches_of(collection, num_threads=2)
    for minibatch in dataset:
        expected = adata.X[minibatch.rows].toarray()
        np.testing.assert_array_equal(minibatch.X.toarray(), expected)


def test_genes_that_are_selected_beside_an_h5ad(stored, tmp_path):
    archive, _, adata = stored
    other = make_adata(seed=1)[:, ::-1].copy()
    other.write_h5ad(tmp_path / "other.h5ad")
    genes = ["gene 7", "gene 39", "gene 0"]
    collection = open_collection([archive, tmp_path / "other.h5ad"], genes=genes)
    rows = np.random.default_rng(0).permutation(2 * N_CELLS)[:200]
    expected = np.vstack([adata[:, genes].X.toarray(), other[:, genes].X.toarray()])[rows]
    np.testing.assert_array_equal(collection[rows].X.toarray(), expected)
    joined = open_collection([archive, tmp_path / "other.h5ad"], join_vars="inner")
    expected = np.vstack([adata.X.toarray(), other[:, adata.var_names].X.toarray()])[rows]
    np.testing.assert_array_equal(joined[rows].X.toarray(), expected)


def test_duplicate_entries_are_added_up(tmp_path):
    X = sp.csr_matrix((np.ones(3, np.float32), [1, 1, 0], [0, 2, 3]), shape=(2, 3))
    cell.write_cell_archive(ad.AnnData(X), tmp_path / "twice.csad", require_unique_indices=False)
    found = open_collection(tmp_path / "twice.csad")[[0, 1]].X
    np.testing.assert_array_equal(found.toarray(), [[0, 2, 0], [1, 0, 0]])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_weights_and_resume(stored):
    archive, _, adata = stored
    collection = open_collection(archive, obs=["plate"])
    weights = np.where(adata.obs["plate"] == "p1", 3.0, 1.0)
    dataset = CellDataset(
        collection, BlockWeightedSampling(4, weights=weights), batch_size=16, seed=0
    )
    copies = CellDataset(
        collection, BlockWeightedSampling(4, weights=weights), batch_size=16, seed=0
    )
    alone, seen = [each.rows.tolist() for each in copies], []
    for minibatch in dataset.loader(num_workers=2):
        rows = np.asarray(minibatch.rows)
        assert np.array_equal(dense(minibatch.X), adata.X[rows].toarray())
        seen.append(rows.tolist())
    assert sorted(seen) == sorted(alone)
    first = minibatches_of(collection)
    begun = iter(first)
    before = [next(begun).rows.tolist() for _ in range(5)]
    again = minibatches_of(collection)
    again.load_state_dict(first.state_dict())
    after = [each.rows.tolist() for each in again]
    assert before + after == [each.rows.tolist() for each in minibatches_of(collection)]


@pytest.mark.usefixtures("short_replicates")
def test_autotune_and_preshuffle(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    archive, _, adata = stored
    collection = open_collection(archive, obs=["donor"])
    result = autotune(collection, label="donor", batch_size=16, budget=300, **SMALL)
    assert result.loader_fault is None
    assert result.recommended is not None
    preshuffle(archive, tmp_path / "shuffled.zarr", seed=0)
    shuffled = open_collection(tmp_path / "shuffled.zarr", obs=["source_row"])
    rows = np.asarray(shuffled.obs["source_row"].values)
    assert np.array_equal(np.sort(rows), np.arange(N_CELLS))
    assert np.array_equal(shuffled[:].X.toarray(), adata.X[rows].toarray())


def test_a_damaged_archive(stored, tmp_path):
    """A frame that says another length is refused; so is an archive that lost its end."""
    whole = bytearray(stored[0].read_bytes())
    damaged = tmp_path / "damaged.csad"
    first = 4096  # where frames begin
    whole[first : first + 4] = b"\xff\xff\xff\x7f"
    damaged.write_bytes(whole)
    collection = open_collection(damaged)
    said = rf"^{re.escape(str(damaged))}: cellstream cannot read its cells \d+ to \d+"
    with pytest.raises(FormatError, match=said) as raised:
        collection[:]
    assert "\n" not in str(raised.value)
    with pytest.raises(FormatError, match=said):
        list(minibatches_of(collection))
    damaged.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        FormatError, match=r"damaged.csad: cellstream cannot read its archive"
    ) as raised:
        open_collection(damaged)
    assert "\n" not in str(raised.value)


def test_an_archive_that_changes_while_it_is_read(stored, tmp_path):
    changing = tmp_path / "changing.csad"
    content = stored[0].read_bytes()
    changing.write_bytes(content)
    collection = open_collection(changing)
    collection[:3]
    os.truncate(changing, len(content) // 2)  # what is mapped there is gone
    with pytest.raises(FormatError, match=r"was replaced or written to since it was opened"):
        collection[:]
    changing.unlink()
    with pytest.raises(PathError, match=r"was removed since it was opened; put it back"):
        collection[:]


def test_archives_with_shards(tmp_path):
    cellstream.write_sharded(make_adata(), tmp_path / "shards.shad", layout="shard")
    with pytest.raises(FormatError, match=r'with shards, .* write it with `layout="cell"`$'):
        open_collection(tmp_path / "shards.shad")


WITHOUT = """
import sys
import cellfeed
assert "cellstream" not in sys.modules
sys.modules["cellstream"] = None
try:
    cellfeed.open_collection(sys.argv[1])
except cellfeed.FormatError as error:
    print(error)
"""


def test_without_cellstream(stored):
    command = [sys.executable, "-c", WITHOUT, str(stored[0])]
    ran = warm.run(command)
    assert ran.returncode == 0, ran.stderr
    expected = (
        "reading a cellstream archive requires cellstream; "
        "install it: pip install 'cellfeed[cellstream]'"
    )
    assert ran.stdout == f"{stored[0]}: {expected}\n"
