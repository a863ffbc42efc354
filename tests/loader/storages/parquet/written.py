"""Writes Parquet files of cells."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse as sp

LISTS = {"list": pa.list_, "large_list": pa.large_list}


def lists_of(matrix, *, kind="list", first_gene=0, with_marker=False, dictionary=False):
    """Return two columns of lists, of a CSR matrix; cells may begin with a marker of gene 1."""
    indptr = np.asarray(matrix.indptr, np.int64)
    indices, data = np.asarray(matrix.indices) + first_gene, np.asarray(matrix.data)
    if with_marker:
        starts = indptr[:-1]
        indices, data = np.insert(indices, starts, 1), np.insert(data, starts, data.dtype.type(-2))
        indptr = indptr + np.arange(indptr.size)
    of = pa.ListArray if kind == "list" else pa.LargeListArray
    offsets = pa.array(indptr, pa.int32() if kind == "list" else pa.int64())
    genes = pa.array(indices)
    genes = genes.dictionary_encode() if dictionary else genes
    return {
        "genes": of.from_arrays(offsets, genes),
        "expressions": of.from_arrays(offsets, pa.array(data)),
    }


# Encodings that only pyarrow decodes.
OTHER_ENCODINGS = {
    "use_dictionary": False,
    "column_encoding": {"genes.list.element": "DELTA_BINARY_PACKED"},
}


def obs_columns(obs):
    """Return columns of a data frame, text with None where it is missing."""
    return {name: pa.Array.from_pandas(obs[name]) for name in obs}


def write_groups(path, table, groups, **options):
    """Write row groups of the given numbers of rows; the last number counts again and again."""
    with pq.ParquetWriter(path, table.schema, **options) as writer:
        first, k = 0, 0
        while first < table.num_rows:
            n = groups[min(k, len(groups) - 1)]
            writer.write_table(table.slice(first, n), row_group_size=n)
            first, k = first + n, k + 1
    return path


def write_files(folder, table, n_files, groups, **options):
    """Write rows to several files of a folder, which may have different numbers of rows."""
    folder.mkdir(parents=True)
    bounds = np.linspace(0, table.num_rows, n_files + 1).astype(int).tolist()
    for k in range(n_files):
        rows = table.slice(bounds[k], bounds[k + 1] - bounds[k])
        write_groups(folder / f"train-{k:05d}.parquet", rows, groups, **options)
    return folder


def write_repository(root, n_cells, n_genes):
    """Write a folder like the repository of Tahoe-100M."""
    counts = np.random.default_rng(0).poisson(0.5, (n_cells, n_genes)).astype(np.float32)
    lists = lists_of(sp.csr_matrix(counts), first_gene=3, with_marker=True)
    labels = {"drug": [f"drug {k // 50}" for k in range(n_cells)]}
    labels["plate"] = [f"plate{k // 300}" for k in range(n_cells)]
    write_files(root / "data", pa.table(lists | labels), 2, [100])
    names = {"gene_symbol": [f"G{k}" for k in range(n_genes)]}
    names["ensembl_id"] = [f"ENSG{k}" for k in range(n_genes)]
    (root / "metadata").mkdir()
    genes = pa.table(names | {"token_id": np.arange(3, 3 + n_genes)})
    pq.write_table(genes, root / "metadata/gene_metadata.parquet")
