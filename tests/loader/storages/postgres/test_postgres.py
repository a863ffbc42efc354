"""Collections in PostgreSQL hold what the h5ad has that they were loaded from."""

import multiprocessing
import pickle
import re
import warnings
from dataclasses import replace
from typing import Any

import anndata as ad
import numpy as np
import pytest
from tests.loader.matrices import adata_of, rows_of
from tests.loader.preshuffling.copies import assert_preshuffled
from tests.loader.sources.cells import (
    ELEMENTS,
    N_CELLS,
    OBS,
    assert_same_epochs,
    assert_selected,
    make_adata,
)
from tests.loader.sources.suites import Suite

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

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def stored(tmp_path_factory, postgres_server):
    """A URL, the h5ad, and what is in it."""
    adata = make_adata()
    path = tmp_path_factory.mktemp("postgres") / "cells.h5ad"
    adata.write_h5ad(path)
    return postgres_server.load(path, "cells", elements=ELEMENTS), path, adata


@pytest.fixture
def options(postgres_server):
    return postgres_server.options


@pytest.mark.smoke
def test_the_same_minibatches_as_from_the_h5ad(stored, options):
    url, h5ad, _ = stored
    both = [
        open_collection(url, obs=OBS, elements=ELEMENTS, storage_options=options),
        open_collection(h5ad, obs=OBS, elements=ELEMENTS),
    ]
    assert_same_epochs(both)
    for name in ELEMENTS:
        assert both[0].elements[name].dtype == both[1].elements[name].dtype


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


@pytest.mark.process
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
    password, options = postgres_server.password, postgres_server.options
    source = PostgresSource(url, storage_options=options)
    collection = open_collection(url, obs=["plate"], storage_options=options)
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=16, seed=0)
    for each in (collection, pickle.loads(pickle.dumps(collection))):
        assert np.array_equal(each[[9, 1]].X.toarray(), adata.X[[9, 1]].toarray())
    shown: list[Any] = [source, source.location, source.__dict__, source.elements["X"].__dict__]
    shown += [collection, collection.describe().to_string(), collection.locations, dataset]
    shown += [dataset.state_dict()]
    for wrong, given in ((f"{url}2", options), (url, {"password": f"{password}x"})):
        with pytest.raises((RemoteError, PathError)) as raised:
            open_collection(wrong, storage_options=given)
        shown.append(raised.value)
        assert "\n" not in str(raised.value)
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
    said = r"there is no collection 'other'; give \?collection=.*cell"
    with pytest.raises(PathError, match=said):
        open_collection(f"{postgres_server.url}?collection=other", storage_options=options)
    with pytest.raises(FormatError, match=r"has no `layers/other`; its elements are: `X`, `lay"):
        open_collection(stored[0], elements=["layers/other"], storage_options=options)
    with pytest.raises(RemoteError, match=r'invalid connection option "connections"'):
        open_collection(stored[0], storage_options=options | {"connections": 2})


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.usefixtures("short_replicates")
def test_autotune_and_preshuffle(stored, options, tmp_path, monkeypatch):
    cellfeed_tuner = pytest.importorskip("cellfeed_tuner")
    monkeypatch.setenv("CELLFEED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PGPASSWORD", options["password"])
    url, _, adata = stored
    collection = open_collection(url, obs=["donor"], storage_options=options)
    small: dict[str, Any] = {"block_sizes": [4], "fetch_factors": [2], "workers": [0]}
    result = cellfeed_tuner.autotune(
        collection, label="donor", batch_size=16, entropy_floor=0.5, budget=300, **small
    )
    assert result.loader_fault is None
    assert result.recommended is not None
    assert result.cache == "remote"
    assert_preshuffled(url, adata, tmp_path)


def test_a_host_in_the_query(postgres_server, tmp_path):
    adata = ad.AnnData(np.eye(3, dtype=np.float32))
    adata.write_h5ad(tmp_path / "cells.h5ad")
    query = f"host=127.0.0.1&port={postgres_server.port}&user=postgres"
    url = f"PostgreSQL:///postgres?{query}&application_name=a%2Bb"
    loaded = load_database(
        tmp_path / "cells.h5ad", url, "hosts", database_options=postgres_server.options
    )
    assert loaded == f"{url}&collection=hosts"
    collection = open_collection(loaded, storage_options=postgres_server.options)
    assert np.array_equal(collection[:].X, adata.X)
    assert str(collection.locations[0]) == loaded


# What is refused is said as it is, with what helps


@pytest.fixture
def small(postgres_server, tmp_path, request):
    """The name of a collection, its URL, and its file."""
    name, path = request.node.name, tmp_path / "cells.h5ad"
    ad.AnnData(np.eye(5, dtype=np.float32)).write_h5ad(path)
    return name, postgres_server.load(path, name), path


def said_by(error, ask):
    with pytest.raises(error) as raised:
        ask()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_user_without_select(small, postgres_server):
    name, url, _ = small
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


def test_a_table_that_was_dropped(small, postgres_server):
    name, url, _ = small
    collection = open_collection(url, storage_options=postgres_server.options)
    postgres_server.ask(f"DROP TABLE {name}.packed")
    said = said_by(RemoteError, lambda: collection[:])
    assert re.search(r'"\w+.packed" does not exist.*\); load the collection again$', said)


def test_wide_rows_are_requested_in_smaller_parts(small, postgres_server):
    source = PostgresSource(small[1], storage_options=postgres_server.options)
    element = source.elements["X"]
    for row_bytes, sizes in ((1 << 19, [2, 2, 1]), (1 << 30, [1] * 5), (1, [5])):
        element.expected_row_bytes = row_bytes
        pending: Any = element.expect(np.array([[0, 5]]))
        assert [len(each.result()) for each in pending.parts] == sizes
        rows: Any = element.read_rows(np.array([[0, 5]]))
        assert np.array_equal(rows, np.eye(5))
    postgres_server.ask(f'DROP TABLE "{small[0]}".packed')  # parts of what was expected are there
    some: Any = element.read_rows(np.array([[1, 2], [3, 5]]))
    assert np.array_equal(some, np.eye(5)[[1, 3, 4]])


@pytest.mark.slow
class TestPostgres(Suite):
    dtypes = ("<f2", "<f4", "<f8", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "|b1")
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 6

    def storable(self, case):  # a value that is there twice is added up when it is loaded
        return replace(case, columns="in any order") if case.columns == "some twice" else case

    @pytest.fixture
    def write(self, new_path, postgres_server):
        def write(case):
            adata, path = adata_of(case), new_path(".h5ad")
            name = f"{path.parent.name} {path.stem}"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of AnnData's own
                adata.write_h5ad(path)
            url = postgres_server.load(path, name, elements=[case.element])
            source = PostgresSource(url, storage_options=postgres_server.options)
            source.elements = {case.element: source.elements[case.element]}
            return source

        return write
