"""What PostgreSQL refuses is said as it is, with what helps."""

import re

import anndata as ad
import numpy as np
import pytest
from tests import commands

from cellfeed import ParameterError, PathError, RemoteError, load_database, open_collection


@pytest.fixture
def stored(postgres_server, tmp_path, request):
    """The name of a collection, its URL, and its file."""
    name, path = request.node.name, tmp_path / "cells.h5ad"
    ad.AnnData(np.eye(5, dtype=np.float32)).write_h5ad(path)
    done = load_database(path, postgres_server.url, name, database_options=postgres_server.options)
    return name, done.url, path


def said_by(error, ask):
    with pytest.raises(error) as raised:
        ask()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_user_without_select(stored, postgres_server):
    name, url, _ = stored
    postgres_server.ask(f"CREATE ROLE {name} LOGIN PASSWORD 'own'")
    own = url.replace("postgres@", f"{name}@")

    def ask():
        return open_collection(own, storage_options={"password": "own"})[:]

    def ask_without_name():
        short = own.partition("?")[0]
        return open_collection(short, storage_options={"password": "own"})[:]

    remedy = r"; GRANT that to the user$"
    said = said_by(RemoteError, ask)
    assert re.search(rf"\(permission denied for schema {name} .*\){remedy}", said)
    assert "give ?collection=NAME, one of: none" in said_by(PathError, ask_without_name)
    postgres_server.ask(f"GRANT USAGE ON SCHEMA {name} TO {name}")
    said = said_by(RemoteError, ask)
    assert re.search(rf"\(permission denied for table cellfeed\){remedy}", said)
    postgres_server.ask(f"GRANT SELECT ON {name}.cellfeed TO {name}")
    said = said_by(RemoteError, ask)
    assert re.search(rf"cells 0 to 4 .*permission denied for table packed\){remedy}", said)
    postgres_server.ask(f"GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO {name}")
    assert np.array_equal(ask().X, np.eye(5))
    assert np.array_equal(ask_without_name().X, np.eye(5))


def test_a_table_that_was_dropped(stored, postgres_server):
    name, url, _ = stored
    collection = open_collection(url, storage_options=postgres_server.options)
    postgres_server.ask(f"DROP TABLE {name}.packed")
    said = said_by(RemoteError, lambda: collection[:])
    assert re.search(r'"\w+.packed" does not exist.*\); load the collection again$', said)


def test_a_server_that_cannot_be_reached(stored):
    path = stored[2]
    url = "postgresql://nobody@127.0.0.1:1/db"
    remedy = "; check that the server runs, and"
    said = said_by(RemoteError, lambda: load_database(path, url, "cells"))
    assert said.endswith(f"{remedy} `database_options`")
    found = commands.cellfeed("load-database", path, url, "--name", "cells")
    assert found.stderr == f"Error: {said}\n"
    said = said_by(RemoteError, lambda: open_collection(url))
    assert said.endswith(f"{remedy} `storage_options`")


@pytest.mark.parametrize(
    ("option", "value"),
    [("connections", "many"), ("connections", np.inf), ("retry_seconds", None)],
)
def test_options_that_are_no_numbers(stored, postgres_server, option, value):
    options = postgres_server.options | {option: value}
    said = said_by(ParameterError, lambda: open_collection(stored[1], storage_options=options))
    assert said == f"`{option}` must be a number, but got {option}={value!r}"
