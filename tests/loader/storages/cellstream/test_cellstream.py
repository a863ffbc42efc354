"""Archives of cellstream hold what the h5ad has that they were made from."""

import re
from dataclasses import replace

import anndata as ad
import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.preshuffling.copies import assert_preshuffled
from tests.loader.sources import cells
from tests.loader.sources.cells import (
    N_CELLS,
    assert_same_epochs,
    epoch_of,
    said_without,
)
from tests.loader.sources.suites import Suite

from cellfeed import FormatError, open_collection

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


@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_same_minibatches_as_from_the_h5ad(stored, num_threads):
    both = [open_collection(path, obs=OBS) for path in stored[:2]]
    assert both[0].var_names.tolist() == both[1].var_names.tolist()
    assert_same_epochs(both, ["X"], OBS, num_threads=num_threads)


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
    for minibatch in epoch_of(open_collection(tmp_path / "cells.csad"), num_threads=2):
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


def test_preshuffled(stored, tmp_path):
    assert_preshuffled(stored[0], stored[2], tmp_path)


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


def test_archives_with_shards(tmp_path):
    cellstream.write_sharded(make_adata(), tmp_path / "shards.shad", layout="shard")
    with pytest.raises(
        FormatError, match=r'not a layout=.cell.*; write it with `layout="cell"`, or'
    ):
        open_collection(tmp_path / "shards.shad")


def test_without_cellstream(stored, monkeypatch):
    expected = (
        "reading a cellstream archive requires cellstream; "
        "install it: pip install 'cellfeed[cellstream]'"
    )
    assert said_without("cellstream", stored[0], monkeypatch) == f"{stored[0]}: {expected}"


@pytest.mark.slow
class TestCellstream(Suite):
    suffix = ".csad"
    layouts = ("csr",)
    dtypes = ("<f4", "<f8")
    max_examples = 15

    def storable(self, case):  # there are no archives without genes
        return replace(case, n_vars=max(1, case.n_vars))

    def stored(self, path, case):
        # Counts are stored as it does by default, with FastPFor; all else with zstd.
        is_default = case.dtype == "<f4" and case.values == "counts"
        dtype = np.dtype(case.dtype).name
        options = {} if is_default else {"codec": "zstd", "data_dtype": dtype}
        cell.write_cell_archive(
            ad.AnnData(case.matrix, obs=case.obs, var=case.var),
            path,
            require_unique_indices=case.columns != "some twice",
            **options,
        )
        return path
