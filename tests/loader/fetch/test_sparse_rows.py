"""Sparse rows whose lengths are known once they have been read, against anndata in memory."""

from concurrent.futures import ThreadPoolExecutor

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp

from cellfeed import open_collection
from cellfeed.decode import Decoder
from cellfeed.fetch import Reader, _element_read
from cellfeed.sources.anndata import _matrix

N_GENES = 40
GENES = np.array([f"gene{k}" for k in range(N_GENES)])


def write(path, values, genes=GENES, **options):
    adata = ad.AnnData(values, var=pd.DataFrame(index=list(genes)))
    adata.obs_names = [f"{path.stem}-{k}" for k in range(values.shape[0])]
    adata.write_h5ad(path, **options)
    return path


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(0)
    drawn = rng.integers(1, 9, (300, N_GENES)) * (rng.random((300, N_GENES)) < 0.4)
    return drawn.astype(np.float32)


@pytest.fixture
def path(tmp_path, values):
    return write(tmp_path / "sparse.h5ad", sp.csr_matrix(values), compression="gzip")


def row_layout(collection, rows):
    """Lay out rows of ``X``, which reads what their lengths depend on."""
    with Reader(collection) as reader, ThreadPoolExecutor(2) as threads:
        planned = reader.plan(rows, np.arange(rows.size), 7)
        return planned.elements["X"].laid_out(Decoder(threads, 2), {})


def n_chunks(layout):
    return sum(reads.n_chunks for reads in layout.reads)


class TestSelectedGenes:
    def test_chunks_of_values_with_none_of_them_are_not_decoded(self, tmp_path):
        # The first gene is in the first 50 cells alone; chunks hold some 10 cells.
        dense = np.ones((2000, 30), np.float32)
        dense[50:, 0] = 0
        path = write(tmp_path / "a.h5ad", sp.csr_matrix(dense), GENES[:30], compression="gzip")
        rows = np.arange(2000)
        n_all = n_chunks(row_layout(open_collection(path), rows))
        n_few = n_chunks(row_layout(open_collection(path, genes=["gene0"]), rows))
        assert n_few < n_all / 4
        assert open_collection(path, genes=["gene0"])[:].X.nnz == 50

    def test_memory_is_taken_for_selected_values(self, path, values):
        rows = np.arange(0, 300, 3)
        groups = row_layout(open_collection(path, genes=["gene7"]), rows).groups
        n_selected = np.count_nonzero(values[rows, 7])
        assert sum(group.n_elements for group in groups) == n_selected

    def test_of_files_with_other_orders_of_genes(self, tmp_path, path, values):
        other = write(tmp_path / "other.h5ad", sp.csr_matrix(values[:, ::-1]), GENES[::-1])
        collection = open_collection([path, other], genes=["gene3", "gene1"])
        rows = np.random.default_rng(1).permutation(600)
        expected = np.concatenate([values, values])[:, [3, 1]][rows]
        np.testing.assert_array_equal(collection[rows].X.toarray(), expected)


class TestDenseFilesAmongSparseOnes:
    @pytest.mark.parametrize("compression", ["gzip", None])
    @pytest.mark.parametrize("options", [{}, {"genes": ["gene9", "gene2"]}])
    def test_all_are_decoded_here(self, tmp_path, path, values, monkeypatch, compression, options):
        other = write(tmp_path / "dense.h5ad", values[:100] + 1, compression=compression)

        def refuse(*_):
            pytest.fail("a file is read through h5py")

        for element in (_matrix.StoredCsr, _matrix.StoredDense):
            monkeypatch.setattr(element, "read_rows", refuse)
        monkeypatch.setattr(_element_read, "_BATCH_BYTES", 1000)
        collection = open_collection([path, other], **options)
        rows = np.random.default_rng(1).permutation(400)
        columns = [9, 2] if options else np.arange(N_GENES)
        found = collection[rows].X
        assert isinstance(found, sp.csr_array)
        expected = np.concatenate([values, values[:100] + 1])[:, columns][rows]
        np.testing.assert_array_equal(found.toarray(), expected)

    def test_mean_size_of_a_cell(self, tmp_path, path, values):
        other = write(tmp_path / "dense.h5ad", np.zeros_like(values))
        collection = open_collection([path, other])
        per_element = collection.dtype.itemsize + 4
        expected = np.count_nonzero(values) / 600 * per_element
        assert collection.mean_row_bytes() == pytest.approx(expected, rel=0.2)
