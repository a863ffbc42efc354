"""What happens with files that are damaged, inconsistent, or not AnnData."""

import fcntl
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense

from cellfeed import FormatError, MismatchError, PathError, open_collection

# Rows 0 to 39 of 30 genes, about 600 elements in chunks of 50.
COUNTS = np.random.default_rng(0).poisson(0.7, size=(40, 30)).astype(np.float32)


def read_all(path: Path | list[Path], **options: Any) -> np.ndarray:
    return dense(open_collection(path, **options)[:].X)


@pytest.fixture
def csr_file(write_h5ad):
    return write_h5ad(sp.csr_matrix(COUNTS), {"plate": ["p"] * 40})


class TestOtherFiles:
    def test_one_that_is_truncated(self, csr_file):
        whole = csr_file.read_bytes()
        for n_bytes in (len(whole) - 1, len(whole) // 2, 600):
            csr_file.write_bytes(whole[:n_bytes])
            with pytest.raises(FormatError, match=f"^{csr_file}: .*; copy or download it again$"):
                open_collection(csr_file)

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("cells.h5ad", b"cell,gene\n", "is not an HDF5 file, .*; give AnnData"),
            ("cells.h5ad", bytes(5000), "is not an HDF5 file, .*; give AnnData"),
            ("cells.h5ad.gz", b"\x1f\x8b", "is compressed; unpack it"),
            ("cells.zarr.zip", b"PK\x03\x04", "is compressed; unpack it"),
            *(
                (name, *each)
                for name in ("cells.h5ad", "cells.data")
                for each in (
                    (b"", "is empty; copy or download it again"),
                    (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS; g"),
                    (b"\n<!DOCTYPE html><html>", "is a web page, not the file that it leads to"),
                    (b"\x1f\x8b\x08 ", "is compressed; unpack it"),
                    (b"PAR1...PAR1", "is a Parquet file; give it a name that ends with"),
                    (b"%%MatrixMarket matrix", "is a Matrix Market file; read it with `scanpy.re"),
                )
            ),
        ],
    )
    def test_one_of_another_format_by_its_first_bytes(self, tmp_path, name, content, said):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(FormatError, match=rf"^{path}: {said}"):
            open_collection(path)

    @pytest.mark.parametrize(
        ("members", "said"),
        [
            (["matrix.h5ad"], "not an AnnData file, since .*; write it with"),
            (["matrix", "row_attrs/Gene", "col_attrs/CellID"], "a loom file; read it with `annd"),
            (["tables/table", "images/x"], "SpatialData; give a table in it"),
            (["a/obs/x", "a/var/x"], "a file with AnnData in `a`; write that as"),
        ],
    )
    def test_one_of_another_format_by_its_members(self, tmp_path, members, said):
        path = tmp_path / ("cells.h5ad" if members == ["matrix.h5ad"] else "cells.h5")
        with h5py.File(path, "w") as file:
            for name in members:
                file[name] = np.arange(3)
        with pytest.raises(FormatError, match=rf"^{path}: is {said}"):
            open_collection(path)

    def test_a_folder_among_the_matches(self, tmp_path, csr_file):
        (tmp_path / "folder.h5ad").mkdir()
        with pytest.raises(FormatError, match=r"folder\.h5ad: no storage opens it; known"):
            open_collection(f"{tmp_path}/*.h5ad")

    def test_one_that_another_process_writes(self, csr_file):
        with csr_file.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(PathError, match=r"another process .* for writing; close it there$"):
                open_collection(csr_file)

    def test_ones_without_cells(self, write_h5ad):
        path = write_h5ad(sp.csr_matrix(np.zeros((0, 3), np.float32)))
        with pytest.raises(FormatError, match=f"^{path}: has no cells; give files"):
            open_collection(path)


class TestMatrix:
    def test_stored_by_gene(self, write_h5ad):
        path = write_h5ad(sp.csc_matrix(COUNTS), layers={"raw": sp.csc_matrix(COUNTS)})
        for element in ("X", "layers/raw"):
            with pytest.raises(FormatError, match=rf"^{path}: .*{element}.*\(CSC\).*; make it CSR"):
                open_collection(path, elements=[element])

    @pytest.mark.parametrize(
        ("layers", "known"), [(None, "none"), ({"a": COUNTS, "b": COUNTS}, "a, b")]
    )
    def test_a_layer_that_is_absent(self, write_h5ad, layers, known):
        path = write_h5ad(COUNTS, layers=layers)
        expected = f"^{path}: has no `layers/counts`; its layers are: {known}$"
        with pytest.raises(FormatError, match=expected):
            open_collection(path, elements=["layers/counts"])

    @pytest.mark.parametrize(
        ("name", "values", "said"),
        [
            ("X", np.zeros((40, 30), "S3"), r"`X` is inconsistent: .*\(40, 30\)"),
            ("X", np.zeros((40, 30), "complex64"), r"`X` is inconsistent: .*\(40, 30\)"),
            ("X", np.zeros((), "float32"), r"`X` is inconsistent: .*\(\)"),
            ("X", np.zeros(40), "var has 30 rows, but `X` has 1 columns; write the file again wit"),
            ("var/_index", np.array([b"gene"] * 29), "var has 29 rows, but `X` has 30 col"),
            ("var/_index", np.array([b"gene"] * 31), "var has 31 rows, but `X` has 30 col"),
        ],
    )
    def test_dense_that_is_inconsistent(self, write_h5ad, replace, name, values, said):
        path = write_h5ad(COUNTS, edit=lambda file: replace(file, name, values))
        with pytest.raises(FormatError, match=rf"^{path}: {said}"):
            open_collection(path)

    def test_dense_of_one_dimension_is_one_gene(self, write_h5ad, replace):
        path = write_h5ad(COUNTS[:, :1], edit=lambda file: replace(file, "X", np.arange(40.0)))
        assert open_collection(path)[[3, 1]].X.tolist() == [[3], [1]]


def set_attribute(name, value):
    return lambda file, replace: file["X"].attrs.__setitem__(name, value)


def delete(name):
    return lambda file, replace: file.__delitem__(name)


def change(name, function):
    return lambda file, replace: replace(file, name, function(file[name][:]))


def fewer_gene_names(file, replace):
    is_nullable = isinstance(file["var/_index"], h5py.Group)
    for name in ["var/_index/values", "var/_index/mask"] if is_nullable else ["var/_index"]:
        replace(file, name, file[name][:-1])


def link_to_nowhere(file, replace):
    del file["X"]
    file["X"] = h5py.ExternalLink("nowhere.h5", "/X")


def group_in_place_of_values(file, replace):
    del file["X/data"]
    file["X"].create_group("data")


def put(place, value):
    def put_(values):
        values = values.astype(np.int64)
        values[place] = value
        return values

    return put_


INCONSISTENT = {
    "no indices": delete("X/indices"),
    "no values": delete("X/data"),
    "no row pointer": delete("X/indptr"),
    "no gene names": delete("var/_index"),
    "no shape": lambda file, replace: file["X"].attrs.__delitem__("shape"),
    "a shape of one number": set_attribute("shape", [40]),
    "a shape of other rows": set_attribute("shape", [39, 30]),
    "a shape of fewer genes": set_attribute("shape", [40, 29]),
    "a shape of more genes": set_attribute("shape", [40, 31]),
    "an unknown encoding": set_attribute("encoding-type", "a-thing-of-the-future"),
    "a list of encodings": set_attribute("encoding-type", np.array([b"csr_matrix", b"csc_matrix"])),
    "fewer gene names": fewer_gene_names,
    "fewer values": change("X/data", lambda values: values[:-1]),
    "fewer indices": change("X/indices", lambda values: values[:-1]),
    "fewer row pointers": change("X/indptr", lambda values: values[:-1]),
    "an empty row pointer": change("X/indptr", lambda values: values[:0]),
    "a table of row pointers": change("X/indptr", lambda values: values[:, None]),
    "text for values": change("X/data", lambda values: values.astype("S5")),
    "complex values": change("X/data", lambda values: values.astype(complex)),
    "row pointers that start late": change("X/indptr", put(0, 1)),
    "a negative row pointer": change("X/indptr", put(1, -3)),
    **{f"a row pointer {at} that descends": change("X/indptr", put(at, 10**5)) for at in (7, 39)},
    **{
        f"column {each}": change("X/indices", put(300, each))
        for each in (30, -1, 2**31, 2**32, 2**32 + 1, -(2**40))
    },
    "a link to nowhere": link_to_nowhere,
    "a group in place of values": group_in_place_of_values,
}


@pytest.mark.parametrize("name", INCONSISTENT)
@pytest.mark.parametrize("how", ["alone", "beside a dense file", "by the library"])
def test_inconsistent_csr(write_h5ad, replace, name, how):
    def edit_file(file):
        INCONSISTENT[name](file, replace)
        for array in ("X/indices", "X/data") if how == "by the library" else ():
            if array in file and hasattr(file[array], "dtype") and file[array].dtype.kind in "iuf":
                replace(file, array, file[array][:], chunks=(50,), fletcher32=True)

    path = write_h5ad(sp.csr_matrix(COUNTS), edit=edit_file)
    paths = [path, write_h5ad(COUNTS)] if how == "beside a dense file" else [path]
    said = {
        "a list": " is not as .*`encoding-type`.*; write",
        "column": ".* a column index (is )?outside",
        "a row p": ".* the row pointers do not asc",
    }
    words = next((each for key, each in said.items() if name.startswith(key)), "")
    with pytest.raises(FormatError, match=f"^{path}: `?(X|var)`?{words}"):
        read_all(paths)


def edit_attributes(
    file: h5py.File, edit: Callable[[h5py.AttributeManager, str, Any], None]
) -> None:
    def edit_all(_name: str, element: Any) -> None:
        for key, value in list(element.attrs.items()):
            edit(element.attrs, key, value)

    edit_all("/", file)
    file.visititems(edit_all)


def as_julia(attributes: h5py.AttributeManager, key: str, value: Any) -> None:
    """Write strings of fixed length, which h5py returns as bytes."""
    if isinstance(value, str) or (isinstance(value, np.ndarray) and value.dtype == object):
        texts = [each.encode() for each in np.atleast_1d(value).tolist()]
        n = max(1, *map(len, texts)) if texts else 1
        fixed = np.array(texts, f"S{n}").reshape(np.shape(value))
        attributes.create(key, fixed, dtype=h5py.string_dtype("utf-8", n))


def as_r(attributes: h5py.AttributeManager, key: str, value: Any) -> None:
    """Write each attribute as an array of one, and a list of one as a text."""
    if isinstance(value, str):
        attributes.create(key, np.array([value.encode()]))
    elif isinstance(value, np.ndarray) and value.dtype == object and value.size == 1:
        attributes.create(key, np.bytes_(value[0].encode()))
    elif np.ndim(value) == 0:
        attributes.create(key, np.array([value]))


class TestOtherWriters:
    OBS: ClassVar = {
        "type": pd.Categorical(["a", "b", None, "ü"] * 10, categories=["b", "ü", "a"]),
        "ranked": pd.Categorical(["lo", "hi"] * 20, categories=["lo", "hi"], ordered=True),
        "number": np.arange(40),
        "text": np.array(["x", "yy"] * 20, object),
        "maybe": pd.array([1, None] * 20, dtype="Int64"),
        "flag": pd.array([True, None] * 20, dtype="boolean"),
    }

    @pytest.fixture(params=[0, 1, 6])
    def n_columns(self, request):
        return request.param

    @pytest.fixture(params=[as_julia, as_r])
    def pair(self, request, n_columns, write_h5ad):
        """The same file as anndata writes it and as the other does, and the names of columns."""
        obs = dict(list(self.OBS.items())[:n_columns])
        X, layers = sp.csr_matrix(COUNTS), {"counts": sp.csr_matrix(COUNTS * 2), "dense": COUNTS}
        edit = partial(edit_attributes, edit=request.param)
        return [write_h5ad(X, obs, layers=layers, edit=each) for each in (None, edit)], list(obs)

    def test_attributes_of_any_kind_of_text(self, pair):
        paths, obs = pair
        names = ["X", "layers/counts", "layers/dense"]
        expected, found = (open_collection(path, elements=names, obs=obs) for path in paths)
        for name in names:
            assert np.array_equal(dense(found[:][name]), dense(expected[:][name]))
        for name in obs:
            ours, theirs = (cast("Any", each.obs[name]) for each in (found, expected))
            np.testing.assert_array_equal(ours.values, theirs.values)
            if hasattr(theirs, "categories"):
                assert list(ours.categories) == list(theirs.categories)
        assert list(found.var_names) == list(expected.var_names)
        assert found.sources[0].obs_names() == tuple(obs)

    @pytest.mark.slow
    def test_they_are_shuffled(self, pair, tmp_path):
        tables = list[Any]()
        for path in pair[0]:
            pytest.importorskip("cellfeed.preshuffling").preshuffle(path, tmp_path / path.stem)
            obs = ad.io.read_zarr(tmp_path / path.stem / "dataset_0").obs
            tables.append(obs.drop(columns=["source_file"]))
        pd.testing.assert_frame_equal(*tables)

    def test_that_lack_the_name_of_the_index(self, write_h5ad):
        def edit(file):
            del file["obs"].attrs["_index"]

        path = write_h5ad(COUNTS, edit=edit)
        with pytest.raises(FormatError) as raised:
            open_collection(path)
        assert str(raised.value) == (
            f"{path}: `obs` is not as anndata writes it (/obs lacks an attribute `_index`); write "
            "the file again with anndata"
        )


class TestNames:
    def named(self, names: Any, table: str = "var"):
        def edit(file):
            del file[f"{table}/_index"]
            with ad.settings.override(allow_write_nullable_strings=True):
                ad.io.write_elem(file[table], "_index", names)

        return edit

    @pytest.mark.filterwarnings("ignore:Transforming to str index")
    @pytest.mark.parametrize("dtype", ["i8", "u2", "f8"])
    def test_that_are_numbers_are_text_as_in_anndata(self, write_h5ad, dtype):
        names = np.arange(100, 130).astype(dtype)
        path = write_h5ad(COUNTS, edit=self.named(names))
        expected = list(ad.read_h5ad(path).var_names)
        collection = open_collection(path)
        assert list(collection.var_names) == expected
        text = write_h5ad(COUNTS[:, ::-1].copy(), genes=expected[::-1])
        joined = open_collection([path, text])
        assert np.array_equal(joined[:].X, np.concatenate([COUNTS, COUNTS]))
        chosen = open_collection(path, genes=expected[5:2:-1])
        assert np.array_equal(chosen[:].X, COUNTS[:, 5:2:-1])

    def test_that_are_missing(self, write_h5ad):
        names = pd.array([*(f"gene{i}" for i in range(29)), None], dtype="string")
        paths = [write_h5ad(COUNTS, edit=self.named(names)) for _ in range(2)]
        # The same genes at the same places need no names.
        assert np.array_equal(read_all(paths), np.concatenate([COUNTS, COUNTS]))
        said = rf"^{paths[0]}: 1 gene has no name, but genes are matched by name; write the file"
        both = [paths[0], write_h5ad(COUNTS)]
        with pytest.raises(MismatchError, match=said):
            open_collection(both, join_vars="inner")
        # Nor does it matter where it is not chosen.
        chosen = open_collection(both, genes=["gene3"])
        assert np.array_equal(chosen[:].X, np.concatenate([COUNTS, COUNTS])[:, [3]])
