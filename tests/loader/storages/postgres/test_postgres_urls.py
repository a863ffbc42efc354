"""A password in the URL of a database is refused, and not shown."""

import traceback

import pytest
from tests.loader.sources.cells import said_without

from cellfeed import PathError, RemoteError, load_database, open_collection
from cellfeed.sources import Location

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:{SECRET}@h/d",
        f"PostgreSQL://u:p@{SECRET}@h:5432/d?collection=c",
        f"postgres://u:[{SECRET}]@h/d",
        f"postgresql:u:{SECRET}@h/d",
        f"postgresql://h/d?collection=c&password={SECRET}",
        f"postgresql://u@h/d?sslpassword={SECRET}",
        f"postgresql://u:p?{SECRET}@h/d",
        f"postgresql://u:p#{SECRET}@h/d",
        f"postgresql://u:p/{SECRET}@h/d",
        f"postgresql://u:{SECRET}?@h/d",
        f"postgresql://u:p?{SECRET}=@h/d?collection=c",
    ],
)
def test_a_password(url):
    with pytest.raises(PathError, match=r"must not contain a password; give it in") as raised:
        open_collection(url)
    shown = "".join(traceback.format_exception(raised.value, chain=True))
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert SECRET not in shown
    assert raised.value.__cause__ is raised.value.__context__ is None


@pytest.mark.parametrize(
    "url", ["postgresql://u@h:5432/d?collection=a@b", "postgres://h/d?host=a", "postgresql:///d"]
)
def test_other_urls_stay_as_they_are(url):
    assert str(Location.of(url)) == url


def test_a_server_that_is_not_there(plates):
    url, remedy = (
        "postgresql://nobody@127.0.0.1:1/db",
        "; check server, user, password, name of the database, and",
    )
    for option, ask in (
        ("database_options", lambda: load_database(plates, url, "cells")),
        ("storage_options", lambda: open_collection(url)),
    ):
        with pytest.raises(RemoteError, match=r"^postgres.*cannot be read \(") as raised:
            ask()
        assert str(raised.value).endswith(f"{remedy} `{option}`")
        assert "\n" not in str(raised.value)


def test_without_psycopg(monkeypatch):
    expected = "reading PostgreSQL requires psycopg; install it: pip install 'cellfeed[postgres]'"
    url = "postgresql://h/d?collection=c"
    assert said_without("psycopg", url, monkeypatch) == f"{url}: {expected}"
