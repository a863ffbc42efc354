"""obsm arrays of any number of dimensions, data frames, and arrays with very many columns."""

import itertools
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from tests.loader.collection.stored import write as write_adata

from cellfeed import (
    BlockShuffling,
    CellDataset,
    Cells,
    FormatError,
    MismatchError,
    ParameterError,
    open_collection,
)

N_COLUMNS = 72_000_000
IN_PROCESS_AND_WITH_WORKERS = [0, pytest.param(2, marks=pytest.mark.process)]


@pytest.fixture(scope="module")
def write(tmp_path_factory) -> Callable[..., Path]:
    """Write a file with these obsm entries."""
    folder, numbers = tmp_path_factory.mktemp("obsm"), itertools.count()

    def write_(*, n_vars: int = 3, suffix: str = "h5ad", **obsm: Any) -> Path:
        n_cells = next(iter(obsm.values())).shape[0]
        names = [f"cell{k}" for k in range(n_cells)]
        X = np.arange(n_cells * n_vars, dtype=np.float32).reshape(n_cells, n_vars)
        adata = ad.AnnData(X)
        adata.obs_names, adata.var_names = names, [f"gene{k}" for k in range(n_vars)]
        for name, values in obsm.items():
            if isinstance(values, pd.DataFrame):
                values.index = adata.obs_names
            adata.obsm[name] = values
        number = next(numbers)
        path = folder / f"{number:05}.{suffix}"
        return write_adata(adata, path, "gzip" if number % 4 > 1 else None)

    return write_


def numbers(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


class TestImages:
    @pytest.mark.parametrize("num_workers", IN_PROCESS_AND_WITH_WORKERS)
    def test_come_in_their_shape(self, write, num_workers):
        image = numbers((30, 4, 4, 3), "uint8")

        def inverted(cells: Cells) -> Cells:
            return Cells({"inverted": 255 - cells.X}, cells.obs, cells.rows)

        paths = [write(image=image[:12]), write(image=image[12:], suffix="zarr")]
        collection = open_collection(paths, elements=["obsm/image", "X"])
        assert collection.mean_row_bytes() == 48 + 12
        assert collection.elements["obsm/image"].row_shape == (4, 4, 3)
        assert collection.elements["obsm/image"].n_columns == 48
        assert np.array_equal(collection[[0, 29, 0]].to_scipy().X, image[[0, 29, 0]])
        plain = CellDataset(collection, BlockShuffling(4), 8, seed=0)
        changed = CellDataset(collection, BlockShuffling(4), 8, seed=0, fetch_transform=inverted)
        seen = list[int]()
        for minibatch, other in zip(plain.loader(num_workers), changed, strict=True):
            seen += minibatch.rows.tolist()
            assert minibatch.X.dtype == torch.uint8
            assert np.array_equal(minibatch.X.numpy(), image[minibatch.rows.numpy()])
            assert np.array_equal(other.X.numpy(), 255 - image[other.rows.numpy()])
        assert sorted(seen) == list(range(30))

    def test_of_another_shape_in_another_file_are_refused(self, write):
        first, second = write(image=numbers((2, 4, 4))), write(image=numbers((3, 16)))
        expected = f"^{second}: `obsm/image` has 16 columns, but 4 x 4 columns in {first}; write"
        with pytest.raises(MismatchError, match=expected):
            open_collection([first, second], elements=["obsm/image"])

    def test_as_a_layer_have_the_genes_of_the_file(self, write, tmp_path):
        alleles = numbers((5, 3, 2))
        path = write(image=alleles)
        with h5py.File(path, "r+") as file:  # anndata has ceased to write such layers
            file.move("obsm/image", "layers/alleles")
        collection = open_collection([path], elements=["layers/alleles", "X"])
        assert collection.var_names.tolist() == ["gene0", "gene1", "gene2"]
        assert np.array_equal(collection[[4, 1]].X, alleles[[4, 1]])
        expected = f"^{path}: `layers/alleles` has 3 dimensions, which requires all"
        with pytest.raises(MismatchError, match=expected):
            open_collection(path, elements=["layers/alleles"], genes=["gene2"])
        preshuffle = pytest.importorskip("cellfeed.preshuffling").preshuffle
        told = r"two dimensions, cells x genes, .* has 3; read it"
        with pytest.raises(ParameterError, match=told):
            preshuffle(path, tmp_path / "out.zarr", elements=["layers/alleles"])

    def test_of_one_dimension_are_one_column(self, write):
        path = write(score=numbers((6, 1)))
        with h5py.File(path, "r+") as file:
            del file["obsm/score"]
            file["obsm/score"] = numbers((6,))
        cells = open_collection(path, elements=["obsm/score"])[[5, 0]]
        assert cells.X.tolist() == [[5], [0]]


def test_data_frames_are_refused(write):
    path = write(table=pd.DataFrame({"a": [1.0], "b": [2.0]}))
    said = rf"^{path}: `obsm/table` is neither dense nor CSR .* `adata.obsm\[name\] = frame"
    with pytest.raises(FormatError, match=said):
        open_collection(path, elements=["obsm/table"])


class TestVeryManyColumns:
    """72 million, as bins of a genome are, of which few are not zero."""

    @pytest.fixture(params=["<i4", "<i8"])
    def wide(self, request, tmp_path) -> tuple[list[Path], sp.csr_matrix]:
        rng, parts, paths = np.random.default_rng(0), [], []
        for k in range(2):
            columns = np.sort(rng.choice(N_COLUMNS, (30, 4)), axis=1)
            data = rng.integers(1, 9, 120).astype("float32")
            part = sp.csr_matrix(
                (data, columns.ravel(), np.arange(0, 121, 4)), shape=(30, N_COLUMNS)
            )
            adata = ad.AnnData(obs=pd.DataFrame(index=[f"cell{n}" for n in range(30)]))
            adata.obsm["bins"] = part
            paths.append(tmp_path / f"{k}.h5ad")
            adata.write_h5ad(paths[-1])
            with h5py.File(paths[-1], "r+") as file:
                # X, with the same elements and genes whose names were never written.
                file["X"] = file["obsm/bins"] if k else h5py.SoftLink("/obsm/bins")
                for name in ("indices", "indptr"):
                    values = file[f"obsm/bins/{name}"][...].astype(request.param)
                    del file[f"obsm/bins/{name}"]
                    file[f"obsm/bins/{name}"] = values
                del file["var/_index"]
                file.create_dataset(
                    "var/_index", (N_COLUMNS,), h5py.string_dtype(), chunks=(1 << 20,)
                )
            parts.append(part)
        return paths, sp.vstack(parts).tocsr()

    @pytest.mark.parametrize("element", ["obsm/bins", "X"])
    def test_cost_by_their_non_zeros(self, wide, element):
        paths, expected = wide
        if element == "X":  # names of several files are compared
            paths, expected = paths[:1], expected[:30]
        tracemalloc.start()
        try:
            collection = open_collection(paths, elements=[element])
            cells = collection[:]
            dataset = CellDataset(collection, BlockShuffling(4), 8, fetch_factor=2, seed=0)
            seen = 0
            for minibatch in dataset:
                rows, X = minibatch.rows.numpy(), minibatch.X
                seen += rows.size
                assert X.shape == (rows.size, N_COLUMNS)
                assert np.array_equal(X.col_indices(), expected[rows].indices)
                assert np.array_equal(X.values(), expected[rows].data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert seen == len(collection) == expected.shape[0]
        assert (expected != cells.X).nnz == 0
        assert peak < 8 << 20  # a byte a column would be 72 MB


def test_names_of_columns_are_read_anew_in_other_processes(write):
    paths = [write(n_vars=5_000, image=numbers((2, 2))) for _ in range(2)]
    collection = open_collection(paths)
    names = collection.var_names
    assert collection.var_names is names
    travelling = pickle.dumps(collection)
    assert len(travelling) < 5_000  # a byte a gene
    assert pickle.loads(travelling).var_names.tolist() == names.tolist()


def test_columns_above_the_largest_int32(tmp_path):
    path, last = tmp_path / "wide.h5ad", 3_000_000_000
    adata = ad.AnnData(obs=pd.DataFrame(index=["a", "b"]))
    adata.obsm["bins"] = sp.csr_matrix(np.eye(2, dtype=np.float32))
    adata.write_h5ad(path)
    with h5py.File(path, "r+") as file:
        del file["obsm/bins/indices"]
        file["obsm/bins/indices"] = np.array([7, last - 1])
        file["obsm/bins"].attrs["shape"] = [2, last]
    told = rf"^{path}: `obsm/bins` has 3,000,000,000 columns, .* fewer than 2\^31; leave it out$"
    with pytest.raises(FormatError, match=told):
        open_collection(path, elements=["obsm/bins"])
