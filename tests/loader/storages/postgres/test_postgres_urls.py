"""URLs of databases are read as libpq reads them, and no password in one is ever shown."""

import traceback

import pytest
from tests.loader.sources.cells import said_without

from cellfeed import PathError, RemoteError, load_database, open_collection
from cellfeed.sources import Location

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://u:p?{SECRET}@h/d",
        f"postgresql://u:p#{SECRET}@h/d",
        f"postgresql://u:p/{SECRET}@h/d",
        f"postgresql://u:{SECRET}?@h/d",
        f"postgresql://u:p?{SECRET}=@h/d?collection=c",
    ],
)
def test_a_password_that_is_not_quoted(url):
    with pytest.raises(PathError, match=r"urllib\.parse\.quote") as raised:
        open_collection(url)
    shown = "".join(traceback.format_exception(raised.value, chain=True))
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)
    assert SECRET not in shown
    assert raised.value.__cause__ is raised.value.__context__ is None


def test_a_url_without_slashes():
    with pytest.raises(PathError, match="must begin with postgresql://") as raised:
        open_collection(f"postgresql:u:{SECRET}@h/d")
    assert SECRET not in str(raised.value)


@pytest.mark.parametrize(
    "password", [f"p[{SECRET}", f"[{SECRET}]", f"p@{SECRET}", f"\u2100{SECRET}"]
)
def test_other_characters_in_a_password(password):
    location = Location.of(f"postgres://u:{password}@h:5432/d?collection=c")
    assert repr(location) == "Location(text='postgres://u@h:5432/d?collection=c')"
    assert location.options.values == {"password": password}
    assert Location.of("postgres://h/d?password=a+b").options.values == {"password": "a+b"}


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
