"""Matrices of 10x Genomics are those of scanpy and h5py, and others are refused in one line."""

import re
import shutil
import warnings
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.preshuffling.copies import assert_preshuffled
from tests.loader.sources.cells import labels_of
from tests.loader.storages.tenx.written import barcodes, counts, features, write_tenx

from cellfeed import (
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    TenxSource,
    open_collection,
)

N_CELLS = 90
BOTH = ["mod/Gene Expression/X", "mod/Antibody Capture/X"]


def test_version_2_is_refused(tmp_path):
    write(tmp_path / "a.h5", 5, 4)
    with h5py.File(tmp_path / "a.h5", "r+") as file:
        file.move("matrix", "hg19")
        del file["hg19/features"]
    said = r"a\.h5: is no .* of Cell Ranger 3 .* scanpy\.read_10x_h5\(path\)\.write_h5ad\(\.\.\.\)$"
    for open_ in (open_collection, TenxSource):
        with pytest.raises(FormatError, match=said):
            open_(tmp_path / "a.h5")


def write(path, n_cells, n_genes, n_antibodies=0, *, seed=0, **options):
    """Write counts of genes and antibodies."""
    X = counts(n_cells, n_genes + n_antibodies, seed)
    named: dict[str, Any] = {"barcodes": barcodes(n_cells)}
    named["features"] = features(n_genes, n_antibodies)
    return write_tenx(path, X, **named | options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tenx")
    write(folder / "v3.h5", N_CELLS, 30, 4)
    return folder


@pytest.fixture
def path(folder, tmp_path):
    return shutil.copy(folder / "v3.h5", tmp_path / "filtered_feature_bc_matrix.h5")


def by_hand(path):
    """Return a matrix as SciPy makes it of the arrays of a file."""
    with h5py.File(path) as file:
        parts = [file["matrix"][name][:] for name in ("data", "indices", "indptr")]
        return sp.csc_array(tuple(parts), shape=file["matrix/shape"][:]).T.tocsr()


@pytest.fixture(scope="module")
def scanpy():
    return pytest.importorskip("scanpy")


@settings(max_examples=20)
@given(data=st.data())
def test_as_scanpy_and_scipy_read_it(scanpy, new_folder, data):
    n_genes = data.draw(st.integers(1, 40))
    n_antibodies = data.draw(st.integers(0, 5))
    n_cells, seed = data.draw(st.integers(1, 60)), data.draw(st.integers(0, 99))
    options = {"seed": seed, "chunk": data.draw(st.integers(1, 50))}
    path = write(new_folder() / "matrix.h5", n_cells, n_genes, n_antibodies, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that names of genes are not unique
        adata = scanpy.read_10x_h5(path, gex_only=False)
    collection = open_collection(path)
    rows = data.draw(st.lists(st.integers(0, n_cells - 1)))
    X = collection[rows].X
    assert X.dtype == np.int32
    expected = by_hand(path)[rows]
    np.testing.assert_array_equal(X.toarray(), expected.toarray())
    np.testing.assert_array_equal(X.toarray(), adata.X[rows].toarray())
    assert collection.obs_names(rows).tolist() == adata.obs_names[rows].tolist()
    assert collection.var_names.tolist() == adata.var_names.tolist()
    var = collection.sources[0].read_var()
    pd.testing.assert_frame_equal(var[[*adata.var]], adata.var, check_index_type=False)
    assert {"gene_ids", "feature_types", "genome"} <= {*var}


def test_what_it_is(folder):
    collection = open_collection(folder / "v3.h5")
    (described,) = collection.describe().to_dict("records")
    assert (described["is_fast"], described["codec"]) == (True, "gzip 4")
    assert described["chunk_shape"] == (1000,)
    assert collection.files == (folder / "v3.h5",)
    assert collection.sources[0].file_bytes() == (folder / "v3.h5").stat().st_size


def test_types_of_features_are_elements(folder):
    expected = by_hand(folder / "v3.h5").toarray()
    collection = open_collection(folder / "v3.h5", elements=["X", *BOTH])
    rows = [5, 80, 3]
    cells = collection[rows]
    np.testing.assert_array_equal(cells.X.toarray(), expected[rows])
    np.testing.assert_array_equal(cells[BOTH[0]].toarray(), expected[rows, :30])
    np.testing.assert_array_equal(cells[BOTH[1]].toarray(), expected[rows, 30:])
    proteins = open_collection(folder / "v3.h5", elements=BOTH[1:]).var_names
    assert proteins.tolist() == [f"CD{k}" for k in range(4)]
    antibodies = open_collection(folder / "v3.h5", elements=BOTH[1:], genes=["CD3", "CD0"])
    np.testing.assert_array_equal(antibodies[rows].X.toarray(), expected[rows][:, [33, 30]])


def test_features_by_a_column_of_var(folder):
    var = open_collection(folder / "v3.h5").sources[0].read_var()
    genes = var.index[var["feature_types"] == "Antibody Capture"].tolist()
    cells = open_collection(folder / "v3.h5", genes=genes)[:]
    expected = by_hand(folder / "v3.h5").toarray()
    np.testing.assert_array_equal(cells.X.toarray(), expected[:, 30:])
    with pytest.raises(MismatchError, match=r"v3\.h5: several genes have the same name: 'gene 0'"):
        open_collection(folder / "v3.h5", genes=["gene 0"])


class TestObs:
    def test_libraries(self, tmp_path):
        names = [*barcodes(30), *barcodes(20, 2)]
        for libraries, expected in ((["a", "b"], "ab"), (["a"], "a2"), ([], "12")):
            path = tmp_path / f"{len(libraries)}.h5"
            write(path, 50, 5, barcodes=names, libraries=libraries)
            collection = open_collection(path, obs=["library"])
            assert labels_of(collection, "library") == [*expected[0] * 30, *expected[1] * 20]
            some = collection.sources[0].read_obs_rows(["library"], np.array([2, 40]))
            assert some["library"].tolist() == [*expected]
            assert some.index.tolist() == [names[2], names[40]]

    def test_annotations_by_barcode(self, path):
        names = barcodes(N_CELLS)
        table = pd.DataFrame(
            {
                "cell_type": pd.Categorical(["B", "T", "NK"] * 30),
                "clusters": np.arange(N_CELLS),
                "score": np.linspace(0, 1, N_CELLS),
            },
            index=names,
        )
        lacking = table.drop(names[7])
        given = pd.concat([lacking.sample(frac=1, random_state=0), table[:3].rename(str.lower)])
        collection = open_collection(TenxSource(path, obs=given), obs=[*table])
        expected = [*table["cell_type"]]
        expected[7] = None
        assert labels_of(collection, "cell_type") == expected
        clusters = collection.obs["clusters"].values  # noqa: PD011
        assert np.isnan(clusters[7])
        assert np.delete(clusters, 7).tolist() == [k for k in range(N_CELLS) if k != 7]
        some = collection.sources[0].read_obs_rows(["score", "library"], np.array([6, 7]))
        assert some["score"].isna().tolist() == [False, True]
        assert some["library"].tolist() == ["1", "1"]

    @pytest.mark.parametrize(
        ("index", "message"),
        [
            (["AAAC", "AAAG"], r"`obs` has none of its barcodes: its index is 'AAAC', not '\w+-1'"),
            ([], "`obs` has none of its barcodes: its index is empty"),
            (["AAAC-1", "AAAC-1"], r"`obs` has the barcode 'AAAC-1' twice; give one row for each"),
        ],
    )
    def test_those_of_other_cells(self, path, index, message):
        with pytest.raises(ParameterError, match=rf"^{path}: {message}"):
            TenxSource(path, obs=pd.DataFrame({"a": 1}, index=index))


def damage(path, member, change):
    with h5py.File(path, "r+") as file:
        values = file[member][:]
        del file[member]
        if change != "missing":
            file[member] = values[:-1] if change == "short" else np.full(len(values), b"x")


class TestRefused:
    @pytest.mark.parametrize("element", ["layers/counts", "raw/X", "mod/Peaks/X"])
    def test_other_elements(self, path, element):
        message = rf"^{path}: has no `{element}`; its elements are: `X`, `mod/Gene Expression/X`"
        with pytest.raises(FormatError, match=message):
            open_collection(path, elements=[element])

    @pytest.mark.parametrize("member", ["data", "indices", "indptr", "shape", "barcodes"])
    @pytest.mark.parametrize("change", ["missing", "short", "of text"])
    def test_damaged_members(self, path, member, change):
        damage(path, f"matrix/{member}", change)
        if (member, change) == ("barcodes", "of text"):
            return  # which is what it is
        with pytest.raises(FormatError, match=rf"^{path}: [^\n]+; [^\n]+$") as raised:
            open_collection(path)[:]
        assert "anndata" not in str(raised.value)

    @pytest.mark.parametrize("member", ["name", "feature_type", "id"])
    @pytest.mark.parametrize("change", ["missing", "short"])
    def test_damaged_features(self, path, member, change):
        damage(path, f"matrix/features/{member}", change)
        if member == "id":  # as in files that other programs write
            assert "gene_ids" not in open_collection(path).sources[0].read_var()
            return
        with pytest.raises(FormatError, match=rf"^{path}: [^\n]+; [^\n]+$"):
            open_collection(path)

    def test_features_beyond_those_that_there_are(self, path):
        with h5py.File(path, "r+") as file:
            file["matrix/indices"][5] = 34
        with pytest.raises(FormatError, match=rf"^{path}: `matrix/indices`.*"):
            open_collection(path)[:]

    def test_a_file_that_is_none(self, tmp_path):
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["matrix"] = np.eye(3)
        said = "is no feature-barcode matrix of Cell Ranger 3 or later; give"
        with pytest.raises(FormatError, match=said):
            TenxSource(tmp_path / "x.h5")

    def test_a_folder_of_them(self, path):
        message = rf"^{path.parent}: .* nothing that can be opened .*{re.escape(path.name)}"
        with pytest.raises(PathError, match=message):
            open_collection(path.parent)

    def test_the_matrix_as_text(self, tmp_path):
        (tmp_path / "matrix.mtx.gz").touch()
        with pytest.raises(PathError, match=r"as text; give its \.h5, or write .*read_10x_mtx"):
            open_collection(tmp_path)


def test_shuffled(folder, tmp_path):
    adata = ad.AnnData(by_hand(folder / "v3.h5"))
    shuffled, rows = assert_preshuffled(folder / "v3.h5", adata, tmp_path, obs=["library"])
    assert shuffled.obs_names(slice(None)).tolist() == np.array(barcodes(N_CELLS))[rows].tolist()
    assert labels_of(shuffled, "library") == ["1"] * N_CELLS
    var = shuffled.sources[0].read_var()
    assert var["feature_types"].astype(str).tolist() == features(30, 4)["feature_types"].tolist()


@pytest.mark.server
def test_from_an_object_store(folder, s3_server):
    for sample in ("a", "b"):
        s3_server.put(folder / "v3.h5", f"tenx/{sample}/outs/filtered_feature_bc_matrix.h5")
    url = f"s3://{s3_server.bucket}/tenx/*/outs/*.h5"
    there = open_collection(url, storage_options=s3_server.options)
    expected = by_hand(folder / "v3.h5").toarray()
    np.testing.assert_array_equal(there[:].X.toarray(), np.tile(expected, (2, 1)))
