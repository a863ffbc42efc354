"""What is cached on this machine's disk is not requested again."""

import anndata
import numpy as np
import pytest
import scipy.sparse as sp
from tests.servers.web import WebServer

from cellfeed import BlockShuffling, CellDataset, ParameterError, open_collection


@pytest.fixture
def adata():
    random = np.random.default_rng(0)
    values = random.random((400, 50), np.float32)
    return anndata.AnnData(sp.csr_array(values * (values < 0.3)))


@pytest.fixture
def server(tmp_path, adata):
    (tmp_path / "served").mkdir()
    adata.write_h5ad(tmp_path / "served" / "a.h5ad", compression="gzip")
    with WebServer(tmp_path / "served") as server:
        yield server


def gets(server):
    return [each for each in server.requests if each.method == "GET"]


def epoch(collection):
    dataset = CellDataset(collection, BlockShuffling(8), batch_size=50, seed=1, as_torch=False)
    return np.concatenate([each.X.toarray() for each in dataset])


def test_a_second_opening_asks_for_the_version_alone(server):
    first = open_collection(f"{server.url}/a.h5ad")
    assert gets(server)
    server.requests.clear()
    assert len(open_collection(f"{server.url}/a.h5ad")) == len(first)
    assert [each.method for each in server.requests] == ["HEAD"]


def test_a_second_epoch_asks_for_nothing(server, adata):
    collection = open_collection(f"{server.url}/a.h5ad", cache="100MB")
    first = epoch(collection)
    assert gets(server)
    server.requests.clear()
    again = open_collection(f"{server.url}/a.h5ad", cache="100MB")
    np.testing.assert_array_equal(epoch(again), first)
    assert not gets(server)
    np.testing.assert_array_equal(again[:].X.toarray(), adata.X.toarray())


def test_what_was_replaced_is_not_found(server, adata, tmp_path):
    epoch(open_collection(f"{server.url}/a.h5ad", cache="100MB"))
    adata.X.data[:] += 1
    adata.write_h5ad(tmp_path / "b.h5ad", compression="gzip")
    server.replace("a.h5ad", (tmp_path / "b.h5ad").read_bytes())
    again = open_collection(f"{server.url}/a.h5ad", cache="100MB")
    np.testing.assert_array_equal(again[:].X.toarray(), adata.X.toarray())


@pytest.mark.parametrize("cache", ["20 apples", 0, -1])
def test_a_cache_has_a_size(server, cache):
    with pytest.raises(ParameterError, match="cache"):
        open_collection(f"{server.url}/a.h5ad", cache=cache)
