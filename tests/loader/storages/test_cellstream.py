"""Archives of cellstream hold what the h5ad has that they were made from."""

import os
import re

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import rows_of
from tests.loader.storages import cells
from tests.loader.storages.cells import (
    N_CELLS,
    assert_same_epochs,
    assert_tuned_and_preshuffled,
    epoch_of,
    said_without,
)

from cellfeed import (
    BlockWeightedSampling,
    CellDataset,
    FormatError,
    PathError,
    open_collection,
)

cellstream = pytest.importorskip("cellstream")
cell = pytest.importorskip("cellstream.cell")

OBS = ["plate", "donor", "n_counts", "dosage"]


def make_adata(seed=0):
    """Cells with all that an archive has."""
    adata = cells.make_adata(seed)
    del adata.raw, adata.layers["counts"], adata.obs["is_control"]
    adata.var["length"] = np.arange(adata.n_vars)
    return adata


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cellstream")
    adata = make_adata()
    adata.write_h5ad(folder / "cells.h5ad")
    cell.write_cell_archive(adata, folder / "cells.csad")
    return folder / "cells.csad", folder / "cells.h5ad", adata


@pytest.mark.parametrize("n_threads", [1, 3])
def test_the_same_minibatches_as_from_the_h5ad(stored, n_threads):
    elements = ["X", "obsm/X_pca"]
    both = [open_collection(path, obs=OBS, elements=elements) for path in stored[:2]]
    assert both[0].var_names.tolist() == both[1].var_names.tolist()
    assert_same_epochs(both, elements, OBS, num_threads=n_threads)


def test_values_that_float32_does_not_hold(tmp_path):
    adata = make_adata()
    adata.X = adata.X.astype(np.float64)
    adata.X.data = np.random.default_rng(0).integers(1, 2**31 + 1, adata.X.nnz).astype(np.float64)
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
        dataset = epoch_of(collection, num_threads=2)
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
    alone = [each.rows.tolist() for each in copies]
    X = adata.X.toarray()
    found = [rows_of([each], X) for each in dataset.loader(num_workers=2)]
    assert sorted(found) == sorted(alone)
    first = epoch_of(collection)
    begun = iter(first)
    before = [next(begun).rows.tolist() for _ in range(5)]
    again = epoch_of(collection)
    again.load_state_dict(first.state_dict())
    after = [each.rows.tolist() for each in again]
    assert before + after == [each.rows.tolist() for each in epoch_of(collection)]


@pytest.mark.usefixtures("short_replicates")
def test_autotune_and_preshuffle(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    archive, _, adata = stored
    collection = open_collection(archive, obs=["donor"])
    assert_tuned_and_preshuffled(archive, collection, adata, tmp_path)


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
        list(epoch_of(collection))
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


def test_without_cellstream(stored):
    expected = (
        "reading a cellstream archive requires cellstream; "
        "install it: pip install 'cellfeed[cellstream]'"
    )
    assert said_without("cellstream", stored[0]) == f"{stored[0]}: {expected}\n"
