"""URLs of databases are read as libpq reads them, and no password in one is ever shown."""

import re
import traceback

import anndata as ad
import numpy as np
import pytest

from cellfeed import PathError, load_database, open_collection
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


def test_a_host_in_the_query(postgres_server, tmp_path):
    adata = ad.AnnData(np.eye(3, dtype=np.float32))
    adata.write_h5ad(tmp_path / "cells.h5ad")
    query = f"host=127.0.0.1&port={postgres_server.port}&user=postgres"
    url = f"PostgreSQL:///postgres?{query}&application_name=a%2Bb"
    done = load_database(
        tmp_path / "cells.h5ad", url, "hosts", database_options=postgres_server.options
    )
    assert done.url == f"{url}&collection=hosts"
    with_password = f"{done.url}&password={postgres_server.password}"
    for each, options in ((done.url, postgres_server.options), (with_password, None)):
        collection = open_collection(each, storage_options=options)
        assert np.array_equal(collection[:].X, adata.X)
        assert re.fullmatch(r"PostgreSQL:///postgres\?[^@]*", str(collection.locations[0]))
