"""Files as ten public sources publish them, built small from their descriptions."""

import itertools
import warnings

import anndata as ad
import h5py
import mudata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.sources.cells import labels_of
from tests.loader.storages.tenx.written import features, write_tenx

from cellfeed import (
    CellDataset,
    FormatError,
    Streaming,
    TenxSource,
    open_collection,
)

N_CELLS, N_GENES = 60, 40


@pytest.fixture
def counts() -> sp.csr_matrix:
    dense = np.random.default_rng(0).poisson(0.4, (N_CELLS, N_GENES)).astype(np.float32)
    dense[7] = 0  # a cell without counts
    return sp.csr_matrix(dense)


@pytest.fixture
def obs() -> pd.DataFrame:
    names = [f"AAACCTGAGAAACC{number:02}-1" for number in range(N_CELLS)]
    labels = pd.Categorical(np.resize(["CD4 T", "B", "NK"], N_CELLS))
    return pd.DataFrame({"cell_type": labels}, index=names)


@pytest.fixture
def var() -> pd.DataFrame:
    ids = [f"ENSG{number:011}" for number in range(N_GENES)]
    symbols = [f"G{number}" for number in range(N_GENES)]
    symbols[5] = symbols[4]  # as in references of 10x
    return pd.DataFrame({"feature_name": symbols}, index=ids)


def dense(source, element: str = "X", **options) -> np.ndarray:
    """An element of all cells in storage order, through minibatches."""
    collection = open_collection(source, elements=[element], **options)
    dataset = CellDataset(collection, Streaming(), batch_size=16, fetch_factor=2, dense=True)
    return np.concatenate([np.asarray(minibatch[element]) for minibatch in dataset])


def labels(source, column="cell_type"):
    return labels_of(open_collection(source, obs=[column]), column)


def write_csr(parent: h5py.Group, name: str, matrix: sp.csr_matrix, **attributes) -> None:
    """Of 64-bit row pointers and column indices, as R writes them."""
    group = parent.create_group(name)
    group.create_dataset("data", data=matrix.data.astype(np.float64), compression="gzip")
    group.create_dataset("indices", data=matrix.indices.astype(np.int64), compression="gzip")
    group.create_dataset("indptr", data=matrix.indptr.astype(np.int64), compression="gzip")
    group.attrs.update(attributes)


def test_cellxgene_delivers_counts_in_raw(tmp_path, counts, obs, var):
    normalized = counts.copy()
    normalized.data = np.log1p(normalized.data)
    obs = obs.assign(
        cell_type_ontology_term_id=pd.Categorical(["CL:0000624"] * N_CELLS),
        is_primary_data=np.arange(N_CELLS) % 2 == 0,
        donor_id=pd.Categorical(np.resize(["D1", "D2"], N_CELLS)),
    )
    filtered = np.arange(N_GENES) < N_GENES - 4  # X has fewer genes than raw
    adata = ad.AnnData(normalized[:, filtered], obs, var[filtered])
    adata.raw = ad.AnnData(counts, obs, var)
    adata.obsm["X_umap"] = np.zeros((N_CELLS, 2), np.float32)
    adata.uns.update({"schema_version": "5.2.0", "default_embedding": "X_umap"})
    path = tmp_path / "atlas.h5ad"
    adata.write_h5ad(path, compression="gzip")

    np.testing.assert_array_equal(dense(path, "raw/X"), counts.toarray())
    np.testing.assert_array_equal(dense(path), normalized[:, filtered].toarray())
    collection = open_collection(path, obs=["cell_type"]).where("is_primary_data")
    assert len(collection) == N_CELLS // 2


@pytest.mark.parametrize("kind", ["multiome", "flex"])
def test_10x_multiome_and_flex(tmp_path, counts, obs, var, kind):
    path = tmp_path / "filtered_feature_bc_matrix.h5"
    types = np.full(N_GENES, b"Gene Expression")
    if kind == "multiome":
        types[30:] = b"Peaks"
    with h5py.File(path, "w") as file:
        file.attrs["filetype"] = "matrix"
        file.attrs["version"] = 2
        matrix = file.create_group("matrix")
        matrix["barcodes"] = np.array(obs.index, "S18")
        for name, values, dtype in (
            ("data", counts.data, np.int32),
            ("indices", counts.indices, np.int64),
            ("indptr", counts.indptr, np.int64),
        ):
            matrix.create_dataset(name, data=values.astype(dtype), chunks=True, compression="gzip")
        matrix["shape"] = np.array([N_GENES, N_CELLS], np.int32)
        features = matrix.create_group("features")
        features["id"] = np.array(var.index, "S15")
        features["name"] = np.array(var["feature_name"], "S8")
        features["feature_type"] = types
        features["genome"] = np.full(N_GENES, b"GRCh38")
        features["_all_tag_keys"] = np.array([b"genome", b"interval"])
        if kind == "multiome":
            features["interval"] = np.full(N_GENES, b"chr1:10-20")
        else:
            features["target_sets/Human Transcriptome"] = np.arange(N_GENES)
            features["filtered_probes"] = np.ones(N_GENES, bool)

    np.testing.assert_array_equal(dense(path), counts.toarray())
    for each in set(types):
        values = counts.toarray()[:, types == each]
        np.testing.assert_array_equal(dense(path, f"mod/{each.decode()}/X"), values)
    assert labels(TenxSource(path, obs=obs)) == [*obs["cell_type"]]


def test_seurat_converted_by_seuratdisk(tmp_path, counts, obs, var):
    # 64-bit floats, and the encodings of anndata before 0.7: categories beside their column.
    path = tmp_path / "converted.h5ad"
    normalized = counts.copy()
    normalized.data = np.log1p(normalized.data)
    csr = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": counts.shape}
    frame = {"encoding-type": "dataframe", "encoding-version": "0.1.0", "_index": "_index"}
    text = h5py.string_dtype()
    with h5py.File(path, "w") as file:
        write_csr(file, "X", normalized, **csr)
        write_csr(file.create_group("raw"), "X", counts, **csr)
        for name, index in (
            ("obs", obs.index),
            ("var", var["feature_name"]),
            ("raw/var", var["feature_name"]),
        ):
            table = file.create_group(name)
            table["_index"] = np.array(index, dtype=text)
            table.attrs.update(frame | {"column-order": np.array([], dtype=text)})
        codes = file["obs"].create_dataset("cell_type", data=obs["cell_type"].cat.codes.values)
        categories = file["obs"].create_dataset(
            "__categories/cell_type", data=np.array(obs["cell_type"].cat.categories, dtype=text)
        )
        categories.attrs["ordered"] = False
        codes.attrs["categories"] = categories.ref
        file["obs"].attrs["column-order"] = np.array(["cell_type"], dtype=text)
        file["obsm/X_pca"] = np.zeros((N_CELLS, 3))

    np.testing.assert_array_equal(dense(path), normalized.toarray())
    np.testing.assert_array_equal(dense(path, "raw/X"), counts.toarray())
    assert labels(path) == [*obs["cell_type"]]


def test_tahoe_parquet_with_its_tables_of_metadata(tmp_path, counts, obs, var):
    # Lists begin with a marker (token 1, value -2); tokens are numbers of the table of genes.
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    tokens = np.arange(N_GENES) + 3
    rows = [(counts.indices[a:b], counts.data[a:b]) for a, b in itertools.pairwise(counts.indptr)]
    cells = pa.table(
        {
            "genes": [[1, *tokens[genes].tolist()] for genes, _ in rows],
            "expressions": [[-2.0, *values.tolist()] for _, values in rows],
            "drug": [*obs["cell_type"]],
            "BARCODE_SUB_LIB_ID": [*obs.index],
            "canonical_smiles": [None] * N_CELLS,
        },
        pa.schema(
            [
                ("genes", pa.list_(pa.int64())),
                ("expressions", pa.list_(pa.float32())),
                ("drug", pa.string()),
                ("BARCODE_SUB_LIB_ID", pa.string()),
                ("canonical_smiles", pa.string()),
            ]
        ),
    )
    (tmp_path / "data").mkdir()
    (tmp_path / "metadata").mkdir()
    pq.write_table(cells.slice(0, 35), tmp_path / "data" / "train-00000-of-00002.parquet")
    pq.write_table(cells.slice(35), tmp_path / "data" / "train-00001-of-00002.parquet")
    genes = tmp_path / "metadata" / "gene_metadata.parquet"
    pq.write_table(
        pa.table(
            {
                "gene_symbol": [*var["feature_name"]],
                "ensembl_id": [*var.index],
                "token_id": pa.array(tokens, pa.int64()),
            }
        ),
        genes,
    )

    folder = tmp_path / "data"
    np.testing.assert_array_equal(dense(folder), counts.toarray())
    assert labels(folder, "drug") == [*obs["cell_type"]]
    assert {*open_collection(folder).var.columns} >= {"gene_symbol", "token_id"}


def test_scbasecount(tmp_path, counts, obs, var):
    # One file for each experiment of SRA: counts of STARsolo in X and its layers.
    for accession in ("SRX1", "SRX2"):
        obs = obs.assign(SRX_accession=pd.Categorical([accession] * N_CELLS), gene_count=7)
        adata = ad.AnnData(counts, obs.drop(columns="cell_type"), var)
        adata.layers["UniqueAndMult-EM"] = counts * 2
        adata.write_h5ad(tmp_path / f"{accession}.h5ad", compression="gzip")
    twice = np.tile(counts.toarray(), (2, 1))
    np.testing.assert_array_equal(dense(tmp_path), twice)
    np.testing.assert_array_equal(dense(tmp_path, "layers/UniqueAndMult-EM"), 2 * twice)
    assert labels(tmp_path, "SRX_accession") == ["SRX1"] * N_CELLS + ["SRX2"] * N_CELLS


def test_parse(tmp_path, counts, obs, var):
    # split-pipe writes Matrix Market beside an AnnData file with int64 counts.
    folder = tmp_path / "DGE_filtered"
    folder.mkdir()
    obs = obs.assign(bc1_well="A1", gene_count=counts.getnnz(axis=1), species="hg38")
    ad.AnnData(counts.astype(np.int64), obs, var).write_h5ad(folder / "anndata.h5ad")
    (folder / "count_matrix.mtx").write_text("%%MatrixMarket matrix coordinate integer general\n")
    (folder / "all_genes.csv").write_text("gene_id,gene_name,genome\n")
    np.testing.assert_array_equal(dense(folder), counts.toarray())
    with pytest.raises(FormatError, match="Matrix Market"):
        open_collection(folder / "count_matrix.mtx")


def test_visium_hd(tmp_path, counts, var):
    # Bins in place of cells, and positions in a Parquet file.
    pytest.importorskip("pyarrow")
    bins = pd.Index([f"s_008um_{n // 10:05}_{n % 10:05}-1" for n in range(N_CELLS)])
    folder = tmp_path / "square_008um"
    (folder / "spatial").mkdir(parents=True)
    positions = pd.DataFrame(
        {
            "barcode": bins[::-1],
            "in_tissue": 1,
            "array_row": np.arange(N_CELLS)[::-1] // 10,
            "pxl_row_in_fullres": np.linspace(0, 99, N_CELLS)[::-1],
        }
    )
    positions.to_parquet(folder / "spatial" / "tissue_positions.parquet")
    path = write_tenx(
        folder / "filtered_feature_bc_matrix.h5",
        sp.csr_array(counts),
        barcodes=[*bins],
        features=features(N_GENES),
    )
    table = pd.read_parquet(folder / "spatial" / "tissue_positions.parquet").set_index("barcode")
    source = TenxSource(path, obs=table)
    np.testing.assert_array_equal(dense(source), counts.toarray())
    collection = open_collection(source, obs=["array_row"], obs_names=True)
    assert [*collection.obs_names([11])] == ["s_008um_00001_00001-1"]
    np.testing.assert_array_equal(
        collection.read_obs(["array_row"])["array_row"].values, np.arange(N_CELLS) // 10
    )


def test_layer_with_64_bit_pointers(tmp_path, counts, obs, var):
    layer = counts.copy()
    layer.indptr, layer.indices = layer.indptr.astype(np.int64), layer.indices.astype(np.int64)
    adata = ad.AnnData(counts, obs, var, layers={"counts": layer})
    adata.write_h5ad(tmp_path / "a.h5ad", compression="lzf")
    np.testing.assert_array_equal(dense(tmp_path / "a.h5ad", "layers/counts"), counts.toarray())


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_table_of_spatialdata(tmp_path, counts, obs, var, zarr_format):
    zarr = pytest.importorskip("zarr")
    store = tmp_path / "sample.zarr"
    root = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    root.attrs["spatialdata_attrs"] = {"version": "0.2"}
    for folder in ("images", "labels", "points", "shapes", "tables"):
        root.create_group(folder)
    obs = obs.assign(region=pd.Categorical(["cells"] * N_CELLS), instance_id=range(N_CELLS))
    adata = ad.AnnData(counts, obs, var)
    adata.uns["spatialdata_attrs"] = {
        "region": "cells",
        "region_key": "region",
        "instance_key": "instance_id",
    }
    with warnings.catch_warnings(), ad.settings.override(zarr_write_format=zarr_format):
        warnings.simplefilter("ignore")
        adata.write_zarr(store / "tables" / "table")
    attributes = {"encoding-type": "ngff:regions_table", "encoding-version": "0.1"}
    zarr.open_group(store / "tables" / "table", mode="r+").attrs.update(attributes)

    np.testing.assert_array_equal(dense(store / "tables" / "table"), counts.toarray())
    assert labels(store / "tables" / "table") == [*obs["cell_type"]]
    with pytest.raises(FormatError, match="tables/table"):
        open_collection(store)


def test_mudata(tmp_path, counts, obs, var):
    rna = ad.AnnData(counts, obs, var)
    protein = ad.AnnData(counts.toarray()[:, :5], obs[[]], var.iloc[:5])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mudata.MuData({"rna": rna, "prot": protein}).write(tmp_path / "cite.h5mu")
    path = tmp_path / "cite.h5mu"
    np.testing.assert_array_equal(dense(path, "mod/rna/X"), counts.toarray())
    np.testing.assert_array_equal(dense(path, "mod/prot/X"), counts.toarray()[:, :5])
