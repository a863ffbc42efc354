"""The same rows as from local files, whatever server they lie on."""

import re
import warnings
from functools import partial
from pathlib import Path

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
        {"plate": pd.Categorical([f"p{k}"] * N_CELLS), "depth": random.random(N_CELLS)},
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
    with WebServer(folder) as server:
        yield server.url


ELEMENTS = ["X", "layers/counts", "obsm/X_pca"]
OBS = ["plate", "depth"]
opened = partial(open_collection, obs=OBS, elements=ELEMENTS)
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
    there = opened([f"{web}/{name}" for name in names])
    here = opened([folder / name for name in names])
    assert len(there) == len(here)
    assert_same(there, here, np.random.default_rng(0).permutation(len(here))[:200])


@pytest.mark.parametrize("names", KINDS, ids=["h5ad", "zarr", "dense"])
def test_an_epoch_is_the_same_also_where_blocks_begin_where_chunks_do(folder, web, names):
    for align in ("chunks", None):
        found = []
        for where in (web, folder):
            collection = open_collection([f"{where}/{name}" for name in names])
            strategy = BlockShuffling(8, align=align).bound_to(collection)
            assert (strategy.align is None) == (align is None)
            dataset = CellDataset(collection, strategy, 32, 4, seed=0)
            found.append([(each.rows.tolist(), dense(each.X).tolist()) for each in dataset])
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def uploaded(folder, s3_server):
    """Also stores of any name, as annbatch has them in a store."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(folder))
            s3_server.put(path, f"same rows/{name}")
            store, _, within = name.partition("/")
            if within:
                s3_server.put(path, f"same rows/parts of {store[:2]}/dataset_0/{within}")


@pytest.mark.server
@pytest.mark.parametrize(
    "pattern",
    [pytest.param("p*.h5ad", marks=pytest.mark.smoke), "z*.zarr", "**/p?.h5ad", "p[01].h5ad"],
)
def test_of_an_object_store(folder, uploaded, s3_server, pattern):
    url = f"s3://{s3_server.bucket}/same rows/{pattern}"
    there = opened(url, storage_options=s3_server.options)
    here = opened(str(folder / pattern))
    assert [each.name for each in there.locations] == [each.name for each in here.locations]
    assert_same(there, here, np.random.default_rng(0).permutation(len(here))[:200])
    shown = repr((there, there.sources, there.locations))
    assert s3_server.options["secret_access_key"] not in shown


@pytest.mark.server
@pytest.mark.parametrize("store", ["z0", "z1"])
def test_a_store_of_any_name(folder, uploaded, s3_server, store):
    url = f"s3://{s3_server.bucket}/same rows/parts of {store}/dataset_0"
    there = opened(url, storage_options=s3_server.options)
    here = opened(folder / f"{store}.zarr")
    assert_same(there, here, np.arange(len(here)))


# What opening reads is recorded, and not requested again


@pytest.fixture
def server(folder):
    """One of which nothing is cached."""
    with WebServer(folder) as server:
        yield server


def gets(server):
    return [each for each in server.requests if each.method == "GET"]


def test_a_second_opening_asks_for_the_version_alone(server):
    first = open_collection(f"{server.url}/p0.h5ad")
    assert gets(server)
    server.requests.clear()
    assert len(open_collection(f"{server.url}/p0.h5ad")) == len(first)
    assert [each.method for each in server.requests] == ["HEAD"]


def test_what_was_replaced_is_not_found(tmp_path):
    plate(0).write_h5ad(tmp_path / "p0.h5ad")
    with WebServer(tmp_path) as server:
        url = f"{server.url}/p0.h5ad"
        open_collection(url)
        adata = plate(8)
        adata.write_h5ad(tmp_path / "new.h5ad", compression="gzip")
        server.replace("p0.h5ad", (tmp_path / "new.h5ad").read_bytes())
        again = open_collection(url)
        np.testing.assert_array_equal(again[:].X.toarray(), adata.X.toarray())


# docs/how-to/remote.md runs as it stands

TEXT = (Path(__file__).parents[4] / "docs" / "how-to" / "remote.md").read_text()


@pytest.mark.docs
@pytest.mark.server
def test_the_example(tmp_path, s3_server):
    values = np.random.default_rng(0).random((300, 20), np.float32)
    obs = pd.DataFrame({"plate": ["a"] * 300}, index=[str(row) for row in range(300)])
    for name in "ab":
        anndata.AnnData(values, obs=obs).write_h5ad(tmp_path / f"{name}.h5ad")
        s3_server.put(tmp_path / f"{name}.h5ad", f"plates of docs/{name}.h5ad")
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    code = code.replace("s3://bucket/plates/", f"s3://{s3_server.bucket}/plates of docs/")
    code = re.sub(r"storage_options=\{.*?\}", "storage_options=OPTIONS", code)
    found = {"OPTIONS": s3_server.options}
    exec(compile(code, "docs/how-to/remote.md", "exec"), found)
    rows = np.concatenate([each.rows for each in found["dataset"]])
    assert sorted(rows.tolist()) == list(range(600))
