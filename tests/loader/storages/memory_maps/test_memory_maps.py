"""Folders of memory maps: what BioNeMo makes of them, and what is said of others."""

import os
import pickle
import struct
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.sources.cells import labels_of
from tests.loader.sources.suites import Suite
from tests.loader.storages.memory_maps.written import make_scdl, write_npy, write_scdl

from cellfeed import FormatError, MemoryMapSource, ParameterError, PathError, open_collection

N_ROWS, N_VARS = 60, 300
COUNTS = np.random.default_rng(0).poisson(0.3, (N_ROWS, N_VARS)).astype(np.float32)
X = sp.csr_matrix(COUNTS)


def obs_of(n, name="plate"):
    return pd.DataFrame({name: [f"{name} {k % 3}" for k in range(n)]}, index=[*map(str, range(n))])


def genes(n, name="gene"):
    names = [f"{name} {k}" for k in range(n)]
    return pd.DataFrame({"feature_id": names}, index=[*map(str, range(n))])


@pytest.fixture
def scdl():
    return pytest.importorskip("bionemo.scdl.io.single_cell_memmap_dataset")


@pytest.fixture
def where(scdl, tmp_path):
    """Return a folder of SCDL, whose genes are numbered."""
    var = pd.DataFrame(index=[str(k) for k in range(N_VARS)])
    return write_scdl(tmp_path / "cells", X, obs_of(N_ROWS), var)


class TestScdl:
    @pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "float64"])
    def test_any_dtype_that_it_packs(self, scdl, tmp_path, dtype):
        var = genes(N_VARS)
        where = write_scdl(tmp_path / "cells", X, obs_of(N_ROWS), var, data_dtype=dtype)
        written = scdl.SingleCellMemMapDataset(str(where))
        collection = open_collection(where, obs=["plate"])
        assert collection.dtype == dtype
        assert collection.describe()["is_fast"].all()
        assert collection.var_names.tolist() == var["feature_id"].tolist()
        rows = [7, 0, 59]
        oracle = np.stack([written.get_row_padded(row)[0] for row in rows])
        assert np.array_equal(collection[rows].X.toarray(), oracle)
        assert np.array_equal(collection[rows].X.toarray(), COUNTS[rows])

    def test_cells_of_several_tables_of_genes(self, scdl, tmp_path):
        parts = []
        for name, n_vars in (("a", 300), ("b", 40)):
            obs, var = obs_of(N_ROWS, name), genes(n_vars)
            parts.append(make_scdl(tmp_path / name, X[:, :n_vars], obs, var))
        parts[0].concat([parts[1]])
        parts[0].save()
        where = tmp_path / "a"
        with pytest.raises(FormatError, match="has cells of 2 tables of genes; give the folder"):
            MemoryMapSource(where)
        collection = open_collection(where, join_vars="outer", obs=["a", "b"], join_obs="outer")
        assert collection.cells_per_location == (N_ROWS, N_ROWS)
        found = pickle.loads(pickle.dumps(collection))[:].X.toarray()
        assert np.array_equal(found[:N_ROWS], COUNTS)
        assert np.array_equal(found[N_ROWS:, :40], COUNTS[:, :40])
        assert not found[N_ROWS:, 40:].any()
        assert labels_of(collection, "b") == [None] * N_ROWS + obs_of(N_ROWS, "b")["b"].tolist()

    def test_damage(self, where):
        whole, index = (where / "header.sch").read_bytes(), np.array([-1, N_ROWS])
        short = obs_of(N_ROWS - 1).to_parquet()
        junk = "cannot be read"
        for name, damaged, said in (
            ("header.sch", whole[:12] + bytes(4), "is not a known header of BioNeMo SCDL"),
            ("header.sch", whole[:40], "is not a known header of BioNeMo SCDL"),
            ("header.sch", b"HDF5" + whole[4:], "is not a known header of BioNeMo SCDL"),
            ("header.sch", whole[:30] + struct.pack(">I", 77), "is not a known header of BioN"),
            ("obs_features/cumulative_sum_index.npy", b"junk", junk),
            ("obs_features/dataframe_0.parquet", b"junk", junk),
            ("var_features/cumulative_sum_index.npy", b"junk", junk),
            ("var_features/dataframe_0.parquet", b"junk", junk),
            ("obs_features/cumulative_sum_index.npy", index - [0, 1], "covers 59 cells, not 60"),
            ("var_features/cumulative_sum_index.npy", index - [0, 1], "covers 59 cells, not 60"),
            ("obs_features/dataframe_0.parquet", short, "has 59 rows, but its index states 60"),
            ("data.npy", X.data[:-1].tobytes(), "its arrays do not form one CSR matrix"),
            ("data.npy", X.data.tobytes()[:-3], "bytes are not a multiple of float32"),
        ):
            before = (where / name).read_bytes()
            if isinstance(damaged, bytes):
                (where / name).write_bytes(damaged)
            else:
                np.save(where / name, damaged)
            with pytest.raises(FormatError, match=said) as raised:
                open_collection(where, obs=["plate"])
            assert "\n" not in str(raised.value)
            (where / name).write_bytes(before)
            if "_features/" in name:
                (where / name).unlink()
                with pytest.raises(FormatError, match=r"cannot be read|is missing, one of 1"):
                    open_collection(where, obs=["plate"])
                (where / name).write_bytes(before)
        assert np.array_equal(open_collection(where)[:].X.toarray(), COUNTS)

    @pytest.mark.slow
    def test_tables_of_an_earlier_save_are_not_read(self, scdl, tmp_path):
        """With 11 tables in place of 1, files are named by two digits beside one of one digit."""
        labels, parts = [], []
        for k in range(11):
            obs = obs_of(4).assign(plate=f"p{k}")
            obs = obs.assign(extra=1.0) if k % 2 else obs  # other columns, so that it is a table
            parts.append(make_scdl(tmp_path / str(k), X[:4], obs, genes(N_VARS, f"gene {k}")))
            labels += obs["plate"].tolist()
        for part in parts[1:]:
            parts[0].concat([part])
        parts[0].save()
        where = tmp_path / "0"
        assert len([*(where / "obs_features").glob("*.parquet")]) > 11
        collection = open_collection(where, obs=["plate"], join_vars="outer")
        assert labels_of(collection, "plate") == labels
        assert len(collection.var_names) == 11 * N_VARS
        for name in ("obs_features", "var_features"):
            table = where / name / "dataframe_03.parquet"
            table.rename(tmp_path / table.name)
            with pytest.raises(FormatError, match=rf"{name}/.*_03.parquet: is missing, one of 11"):
                open_collection(where, obs=["plate"], join_vars="outer")
            (tmp_path / table.name).rename(table)

    def test_its_own_object(self, scdl, where):
        collection = open_collection(scdl.SingleCellMemMapDataset(str(where)))
        assert np.array_equal(collection[[4, 2]].X.toarray(), COUNTS[[4, 2]])
        assert collection.var_names.tolist() == [str(k) for k in range(N_VARS)]


class TestNpyFolder:
    def test_is_opened_as_it_is(self, tmp_path):
        collection = open_collection(write_npy(tmp_path / "cells", X))
        assert np.array_equal(collection[[5, 1]].X.toarray(), COUNTS[[5, 1]])
        assert collection.var_names[:2].tolist() == ["0", "1"]
        assert collection.codecs == ("none",)
        assert len(pickle.dumps(collection)) < X.data.nbytes

    @pytest.mark.parametrize("name", ["data", "indices", "indptr"])
    def test_files_that_change_are_not_read(self, tmp_path, name):
        """Reading beyond the end of a mapped file would kill the process."""
        folder = write_npy(tmp_path / "cells", X)
        collection = open_collection(folder)
        assert np.array_equal(collection[:].X.toarray(), COUNTS)
        os.truncate(folder / f"{name}.npy", 100)
        with pytest.raises(FormatError, match=f"{name}.npy: was replaced or written to"):
            collection[:]

    @pytest.mark.parametrize("name", ["data", "indices", "indptr", "shape", "format"])
    def test_flipped_bits_of_a_header(self, tmp_path, name):
        """NumPy parses headers as Python, whose errors are of any kind."""
        where = write_npy(tmp_path, X)
        np.save(where / "format.npy", np.array(b"csr"))
        path = where / f"{name}.npy"
        whole = path.read_bytes()
        for k in range(0, 128 * 8, 61):
            damaged = bytearray(whole)
            damaged[k // 8] ^= 1 << k % 8
            path.write_bytes(damaged)
            try:
                open_collection(where)
            except FormatError as error:
                assert "\n" not in str(error)  # noqa: PT017 - some have no consequence

    def test_files_that_are_missing_or_do_not_fit(self, tmp_path):
        with pytest.raises(PathError, match="there is no such folder"):
            MemoryMapSource(tmp_path / "nowhere")
        with pytest.raises(PathError, match=r"data\.npy: is missing; unzip a file that"):
            MemoryMapSource(tmp_path)
        where = write_npy(tmp_path / "cells", X)
        np.save(where / "format.npy", np.array(b"csr"))
        for name, values, said in (
            ("indptr", X.indptr[:-1], "its arrays do not form one CSR matrix"),
            ("indptr", X.indptr[::-1].copy(), "its arrays do not form one CSR matrix"),
            ("indices", X.indices.astype(">i4"), "has >i4, which is not read; write it again on"),
            ("data", X.data.astype("f2"), "has float16, which is not read; write it as float32"),
            ("data", X.data[None], "is not a one-dimensional array"),
            ("format", np.array(b"csc"), "its arrays do not form one CSR matrix"),
        ):
            path = where / f"{name}.npy"
            before = path.read_bytes()
            np.save(path, values)
            with pytest.raises(FormatError, match=said):
                open_collection(where)
            path.write_bytes(before)
        assert np.array_equal(open_collection(where)[:].X.toarray(), COUNTS)
        wild = X.indptr.copy()
        wild[3] = wild[-1] + 5
        np.save(where / "indptr.npy", wild)
        with pytest.raises(FormatError, match=r"`indptr\.npy` does not ascend; it is damaged"):
            open_collection(where)[:]
        np.save(where / "indptr.npy", X.indptr)
        np.save(where / "indices.npy", X.indices + 1)
        with pytest.raises(FormatError, match=r"indices\.npy.* have a column index outside"):
            open_collection(where)[:]
        (where / "indptr.npy").write_bytes(before[:-8])
        with pytest.raises(FormatError, match=r"indptr\.npy: is not a complete \.npy file"):
            open_collection(where)

    def test_names_are_those_of_the_table_and_no_numbers_of_rows(self, tmp_path):
        where = write_npy(tmp_path / "cells", X)
        names = [f"ENSG{k}" for k in range(X.shape[1])]
        var = pd.DataFrame({"gene_id": names})
        for given in (var, var.set_index("gene_id"), var.set_index(var.index + 5)):
            assert open_collection(MemoryMapSource(where, var=given)).var_names.tolist() == names
        with pytest.raises(ParameterError, match="`var` has no names of genes; give a data frame"):
            MemoryMapSource(where, var=var.rename(columns={"gene_id": "name"}))

    def test_tables_that_do_not_fit(self, tmp_path):
        where = write_npy(tmp_path / "cells", X)
        for table in ("obs", "var"):
            with pytest.raises(ParameterError, match=f"`{table}` must have .* rows, but has 2"):
                MemoryMapSource(where, **{table: obs_of(2)})
        with pytest.raises(ParameterError, match="`part` applies only to SCDL folders"):
            MemoryMapSource(where, part=0)


# The suite


@pytest.mark.slow
class TestSuiteOfNpy(Suite):
    layouts = ("csr",)
    index_dtypes = ("<i4", "<i8", "<u2", "|u1")
    dtypes = (*Suite.dtypes, "|b1")
    max_examples = 20
    decoded_here = True

    def stored(self, path, case):
        folder = write_npy(path, case)
        return MemoryMapSource(folder, obs=case.obs, var=case.var)


@pytest.mark.slow
class TestSuiteOfScdl(Suite):
    layouts = ("csr",)
    dtypes = ("<f4",)
    max_examples = 5
    decoded_here = True

    def storable(self, case):  # SCDL drops what is there twice, takes no empty matrix or odd values
        case = replace(
            case,
            n_vars=max(1, case.n_vars),
            density=max(0.5, case.density),
            values="counts",
            columns="in any order" if case.columns == "some twice" else case.columns,
        )
        while not case.indices.size:
            case = replace(case, seed=case.seed + 1)
        return case

    def stored(self, path, case):
        return write_scdl(path, case.matrix, case.obs, case.var)
