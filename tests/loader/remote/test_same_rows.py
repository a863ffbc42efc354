"""The same rows as from local files, whatever server they lie on."""

import warnings

import anndata
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.loader.matrices import dense
from tests.servers.web import WebServer

from cellfeed import BlockShuffling, CellDataset, open_collection

N_CELLS, N_GENES = 300, 40


def plate(k, *, is_dense=False):
    random = np.random.default_rng(k)
    found = random.random((N_CELLS, N_GENES), np.float32)
    values = sp.csr_array(found * (found < 0.3))
    obs = pd.DataFrame(
        {
            "plate": pd.Categorical([f"p{k}"] * N_CELLS),
            "depth": random.random(N_CELLS),
        },
        index=[f"{k}-{row}" for row in range(N_CELLS)],
    )
    return anndata.AnnData(
        values.toarray() if is_dense else values,
        obs=obs,
        layers={"counts": (values * 10)},
        obsm={"X_pca": random.random((N_CELLS, 5))},
    )


def write_zarr(path, adata):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that version 3 will be the default
        adata.write_zarr(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    for k in range(3):
        plate(k).write_h5ad(folder / f"p{k}.h5ad", compression="gzip")
        with anndata.settings.override(zarr_write_format=2 + k % 2):
            write_zarr(folder / f"z{k}.zarr", plate(k))
    plate(7, is_dense=True).write_h5ad(folder / "dense.h5ad", compression="lzf")
    return folder


@pytest.fixture(scope="module")
def web(folder):
    with WebServer.in_process(folder) as url:
        yield url


ELEMENTS = ["X", "layers/counts", "obsm/X_pca"]
OBS = ["plate", "depth"]
KINDS = [["p0.h5ad", "p1.h5ad", "p2.h5ad"], ["z0.zarr", "z1.zarr"], ["dense.h5ad"]]


def assert_same(there, here, rows):
    a, b = there[rows], here[rows]
    for name in ELEMENTS:
        one, other = (each[name] for each in (a, b))
        np.testing.assert_array_equal(dense(one), dense(other))
    for name in OBS:
        np.testing.assert_array_equal(a.obs[name], b.obs[name])
    np.testing.assert_array_equal(there.var_names, here.var_names)


@pytest.mark.parametrize("names", KINDS, ids=["h5ad", "zarr", "dense"])
def test_of_a_web_server(folder, web, names):
    there = open_collection([f"{web}/{name}" for name in names], obs=OBS, elements=ELEMENTS)
    here = open_collection([folder / name for name in names], obs=OBS, elements=ELEMENTS)
    assert len(there) == len(here)
    assert_same(there, here, np.random.default_rng(0).permutation(len(here))[:200])


@pytest.mark.parametrize("names", KINDS, ids=["h5ad", "zarr", "dense"])
def test_blocks_begin_where_chunks_do(folder, web, names):
    found = []
    for where in (web, folder):
        collection = open_collection([f"{where}/{name}" for name in names])
        strategy = BlockShuffling(8, align="chunks").bound_to(collection)
        assert strategy.align is not None
        dataset = CellDataset(collection, strategy, 32, 2, seed=0)
        found.append([(each.rows.tolist(), dense(each.X).tolist()) for each in dataset])
    assert found[0] == found[1]


@pytest.mark.parametrize("pattern", ["p*.h5ad", "z*.zarr", "**/p?.h5ad", "p[01].h5ad"])
def test_of_an_object_store(folder, s3_server, pattern):
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            s3_server.put(path, f"same rows/{path.relative_to(folder)}")
    there = open_collection(
        f"s3://{s3_server.bucket}/same rows/{pattern}",
        obs=OBS,
        elements=ELEMENTS,
        storage_options=s3_server.options,
    )
    local = str(folder / pattern)
    here = open_collection(local, obs=OBS, elements=ELEMENTS)
    assert [each.name for each in there.locations] == [each.name for each in here.locations]
    assert_same(there, here, np.random.default_rng(0).permutation(len(here))[:200])
    assert s3_server.options["secret_access_key"] not in repr(
        (there, there.sources, there.locations)
    )


@pytest.mark.parametrize("store", ["z0.zarr", "z1.zarr"])
def test_a_store_of_any_name(folder, s3_server, store):
    """As annbatch writes them: ``dataset_0`` and so on, in a store."""
    for path in sorted((folder / store).rglob("*")):
        if path.is_file():
            s3_server.put(path, f"{store}_parts/dataset_0/{path.relative_to(folder / store)}")
    there, here = (
        open_collection(path, obs=OBS, elements=ELEMENTS, storage_options=options)
        for path, options in (
            (f"s3://{s3_server.bucket}/{store}_parts/dataset_0", s3_server.options),
            (folder / store, None),
        )
    )
    assert_same(there, here, np.arange(len(here)))


def test_an_epoch_is_the_same(folder, web):
    def epoch(root):
        collection = open_collection([f"{root}/p{k}.h5ad" for k in range(3)], obs=["plate"])
        dataset = CellDataset(
            collection, BlockShuffling(8), batch_size=32, fetch_factor=4, seed=3, as_torch=False
        )
        return [(each.rows, each.X.toarray()) for each in dataset]

    for (rows, values), (other_rows, others) in zip(epoch(web), epoch(folder), strict=True):
        np.testing.assert_array_equal(rows, other_rows)
        np.testing.assert_array_equal(values, others)
