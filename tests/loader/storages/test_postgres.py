"""Collections in PostgreSQL hold what the h5ad has that they were loaded from."""

import multiprocessing
import pickle
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from tests.loader.matrices import rows_of
from tests.loader.storages.cells import (
    ELEMENTS,
    N_CELLS,
    OBS,
    assert_same_epochs,
    assert_selected,
    assert_tuned_and_preshuffled,
    make_adata,
    said_without,
)

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    PostgresSource,
    RemoteError,
    load_database,
    open_collection,
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory, postgres_server):
    """A URL, the h5ad, and what is in it."""
    adata = make_adata()
    adata.obs["barcode"] = [f"{k:04}'\\t%" for k in range(N_CELLS)]
    path = tmp_path_factory.mktemp("postgres") / "cells.h5ad"
    adata.write_h5ad(path)
    options = postgres_server.options
    done = load_database(
        path, postgres_server.url, "cells", elements=ELEMENTS, database_options=options
    )
    return done.url, path, adata


@pytest.fixture
def options(postgres_server):
    return postgres_server.options


def test_the_same_minibatches_as_from_the_h5ad(stored, options):
    url, h5ad, _ = stored
    both = [
        open_collection(url, obs=OBS, elements=ELEMENTS, storage_options=options),
        open_collection(h5ad, obs=OBS, elements=ELEMENTS),
    ]
    assert_same_epochs(both)
    for name in ELEMENTS:
        assert both[0].elements[name].dtype == both[1].elements[name].dtype


def test_obs_as_pandas_has_it(stored, options):
    url, _, adata = stored
    source = PostgresSource(url, storage_options=options)
    assert source.obs_names() == list(adata.obs)
    table = source.read_obs([*OBS, "barcode"])
    for name in OBS:
        pd.testing.assert_series_equal(table[name], adata.obs[name].reset_index(drop=True))
    assert table["barcode"].tolist() == adata.obs["barcode"].tolist()
    rows = np.array([0, 2, 7])
    some = source.read_obs_rows([*OBS, "barcode"], rows)
    assert some.index.tolist() == adata.obs.index[rows].tolist()
    assert some["barcode"].dtype == "string"
    assert some["barcode"].tolist() == adata.obs["barcode"].iloc[rows].tolist()
    assert source.read_obs_rows([], rows).index.tolist() == some.index.tolist()


@pytest.mark.parametrize(
    ("where", "in_pandas"),
    [
        ("plate = 'p1'", "plate == 'p1'"),
        ("n_counts % 2 = 1 AND donor <> 'donor 3'", "n_counts % 2 == 1 and donor != 'donor 3'"),
        ("dosage IS NULL -- no dosage", "dosage.isna()"),
    ],
)
def test_a_condition_in_sql(stored, options, where, in_pandas):
    url, _, adata = stored
    source = PostgresSource(url, where=where, storage_options=options)
    collection = open_collection(source, obs=OBS, elements=["X", "layers/counts", "obsm/X_pca"])
    assert_selected(collection, adata, np.flatnonzero(adata.obs.eval(in_pandas)))
    whole = PostgresSource(url, storage_options=options)
    assert source.version() != whole.version()
    assert whole.version() == PostgresSource(url, storage_options=options).version()
    assert (source.selection(), whole.selection()) == (where, "")


def test_sources_beside_paths(stored, options):
    url, h5ad, adata = stored
    source = PostgresSource(url, where="plate = 'p1'", storage_options=options)
    collection = open_collection([h5ad, source])
    rows = np.flatnonzero(adata.obs["plate"] == "p1")
    assert len(collection) == N_CELLS + rows.size
    found = collection[[N_CELLS + 1, 1]].X.toarray()
    assert np.array_equal(found, adata.X[[rows[1], 1]].toarray())
    with pytest.raises(FormatError, match=r"has no `layers/other`; its elements are: `X`, `lay"):
        open_collection(source, elements=["layers/other"])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers(stored, options, method):
    url, _, adata = stored
    collection = open_collection(url, obs=["plate"], storage_options=options)
    collection[:5]  # so that there are connections of this process
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=16, fetch_factor=2, seed=0)
    context = multiprocessing.get_context(method)
    loader = dataset.loader(num_workers=2, multiprocessing_context=context)
    assert sorted(rows_of(loader, adata.X.toarray())) == list(range(N_CELLS))
    assert np.array_equal(collection[:5].X.toarray(), adata.X[:5].toarray())


SAID = "postgresql://postgres@"


def test_credentials_are_never_shown(stored, postgres_server):
    url, _, adata = stored
    password = postgres_server.password
    full = url.replace("postgres@", f"postgres:{password}@")
    source = PostgresSource(full)
    collection = open_collection(f"{url}&password={password}", obs=["plate"])
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=16, seed=0)
    for each in (open_collection(full), pickle.loads(pickle.dumps(collection))):
        assert np.array_equal(each[[9, 1]].X.toarray(), adata.X[[9, 1]].toarray())
    shown: list[Any] = [source, source.location, source.__dict__, source.elements["X"].__dict__]
    shown += [collection, collection.describe().to_string(), collection.locations, dataset]
    shown += [dataset.state_dict()]
    for wrong in (f"{full}2", full.replace(password, f"{password}x"), f"{full}&hostaddr=nowhere"):
        with pytest.raises((RemoteError, PathError)) as raised:
            open_collection(wrong)
        shown.append(raised.value)
        assert "\n" not in str(raised.value)
    with pytest.raises(PathError, match="perhaps in its user or password; quote these") as raised:
        open_collection(url.replace("postgres@", f"postgres:a/{password}@"))
    shown.append(raised.value)
    assert SAID in repr(source)
    for each in shown:
        assert password not in f"{each!r} {each}"


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("plate = 'p9'", "no cell fulfils where="),
        (
            "tissue = 'lung'",
            'is not a valid SQL condition .*"tissue" does not exist.*; the columns are: id, .*p',
        ),
        ("plate =", "is not a valid SQL condition .*syntax error"),
        ("n_counts > 'many'", "is not a valid SQL condition"),
        (
            "true); DROP TABLE cells.cells; SELECT (true",
            "is not a valid SQL condition|cannot be read",
        ),
    ],
)
def test_no_condition(stored, options, where, said):
    pattern = f"^{re.escape(stored[0])}: .*{said}"
    with pytest.raises((ParameterError, RemoteError), match=pattern) as raised:
        PostgresSource(stored[0], where=where, storage_options=options)
    assert "\n" not in str(raised.value)
    assert PostgresSource(stored[0], storage_options=options).n_rows == N_CELLS


def test_no_collection(stored, postgres_server, options):
    with pytest.raises(
        PathError, match=r"there is no collection 'other'; give \?collection=.*cell"
    ):
        open_collection(f"{postgres_server.url}?collection=other", storage_options=options)
    with pytest.raises(ParameterError, match=r"`connections >= 1` must hold"):
        open_collection(stored[0], storage_options=options | {"connections": 0})


def test_without_psycopg(stored):
    expected = "reading PostgreSQL requires psycopg; install it: pip install 'cellfeed[postgres]'"
    assert said_without("psycopg", stored[0]) == f"{stored[0]}: {expected}\n"


@pytest.mark.usefixtures("short_replicates")
def test_autotune_and_preshuffle(stored, options, tmp_path, monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    url, _, adata = stored
    collection = open_collection(url, obs=["donor"], storage_options=options)
    monkeypatch.setenv("PGPASSWORD", options["password"])
    result = assert_tuned_and_preshuffled(url, collection, adata, tmp_path)
    assert result.cache == "remote"
