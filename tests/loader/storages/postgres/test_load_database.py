"""What is loaded is all there or not at all, and what is wrong is said."""

import re
import subprocess
import sys
import warnings
from typing import Any
from urllib.parse import quote

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests.warm import python as warm

from cellfeed import (
    FormatError,
    MismatchError,
    ParameterError,
    PathError,
    PostgresSource,
    RemoteError,
    load_database,
    open_collection,
)

of_server = pytest.mark.server
N_CELLS, N_GENES = 700, 30
MOST_CELLS = 8192  # of a part
N_MANY = 2 * MOST_CELLS + 9


@pytest.fixture
def files(tmp_path):
    """Two files, whose obs is of every kind."""
    random = np.random.default_rng(0)
    paths, cells = [], []
    for k, n in enumerate((400, 300)):
        X = sp.csr_matrix(random.poisson(0.4, (n, N_GENES)).astype(np.float32))
        X.data[::7] += 0.5  # so that some rows are not of integers
        obs = pd.DataFrame(
            {
                "plate": pd.Categorical([f"p{k}"] * n),
                "number": np.arange(n, dtype=np.int16),
                "share": random.random(n).astype(np.float32),
                "count": pd.array([7 if each % 5 else pd.NA for each in range(n)], dtype="Int64"),
                "passed": pd.array([each % 3 > 0 or pd.NA for each in range(n)], dtype="boolean"),
                "large": np.full(n, 2**64 - 1, np.uint64),
                "size": pd.Categorical(random.integers(1, 4, n)),
                "barcode": [f"{number:04}'\\t%" for number in range(n)],
            },
            index=[f"{k} {number}" for number in range(n)],
        )
        adata = ad.AnnData(X, obs=obs, var=pd.DataFrame(index=[f"g{j}" for j in range(N_GENES)]))
        paths.append(tmp_path / f"{k}.h5ad")
        adata.write_h5ad(paths[-1])
        cells.append(adata)
    return paths, cells


@pytest.fixture(scope="module")
def many(write_h5ad):
    """A file of three parts."""
    X = sp.random(N_MANY, 3, 0.3, "csr", np.float32, np.random.default_rng(0))
    return write_h5ad(X, {"half": np.repeat(["l", "r"], [N_MANY // 2, N_MANY - N_MANY // 2])}), X


@pytest.fixture
def load(postgres_server, request):
    def load(paths, name=request.node.name, **options):
        options = {"database_options": postgres_server.options} | options
        return load_database(paths, postgres_server.url, name, **options)

    return load


def read(url, server, **options):
    return open_collection(url, storage_options=server.options, **options)


class StoppedError(Exception):
    pass


@of_server
def test_obs_of_every_kind(files, load, postgres_server):
    paths, cells = files
    told = []
    url = load(paths, on_progress=lambda *numbers: told.append(numbers))
    assert told == [(N_CELLS, N_CELLS)]
    collection = read(url, postgres_server, obs=["source_row", "number"])
    assert np.array_equal(collection[:].X.toarray(), sp.vstack([a.X for a in cells]).toarray())
    for name in ("source_row", "number"):
        assert np.array_equal(collection.obs[name].values, [*range(400), *range(300)])
    source = PostgresSource(url, storage_options=postgres_server.options)
    expected = pd.concat([each.obs for each in cells])
    found = source.read_obs_rows(list(expected), np.arange(N_CELLS))
    assert found.index.tolist() == expected.index.tolist()
    assert source.read_obs_rows([], np.array([2, 7])).index.tolist() == ["0 2", "0 7"]
    whole = source.read_obs(list(expected))
    for name in expected:
        some, others = (each[name].astype(object) for each in (found, expected))
        pd.testing.assert_series_equal(some, others, check_index_type=False)
        assert whole[name].isna().tolist() == others.isna().tolist()
        assert whole[name].dropna().tolist() == others.dropna().tolist()
        same = str(found[name].dtype) == str(expected[name].dtype)
        assert same or name in ("plate", "barcode")
    assert list(found["size"].cat.categories) == [1, 2, 3]
    assert found["barcode"].dtype == "string"
    assert source.obs_names()[-2:] == ["source_file", "source_row"]
    some = PostgresSource(
        url,
        where="source_file = '1.h5ad' AND share < 0.5 AND size = 2",
        storage_options=postgres_server.options,
    )
    own = cells[1].obs
    assert some.n_rows == np.count_nonzero((own["share"] < 0.5) & (own["size"] == 2))


# All or nothing


@of_server
def test_a_load_of_several_parts(many, load, postgres_server):
    path, X = many
    told = []
    url = load(path, on_progress=lambda *numbers: told.append(numbers))
    assert told == [(k, N_MANY) for k in (MOST_CELLS, 2 * MOST_CELLS, N_MANY)]
    collection = read(url, postgres_server, obs_names=True)
    assert (collection[:].X != X).nnz == 0
    last = collection.obs_names(np.array([N_MANY - 1, MOST_CELLS]))
    assert last.tolist() == [f"cell{N_MANY - 1}", f"cell{MOST_CELLS}"]


@of_server
def test_a_load_that_is_stopped_leaves_nothing(many, load, postgres_server, request):
    def stop(*_):
        asked.append(postgres_server.ask(query))
        raise StoppedError

    path, X = many
    query, asked = f"SELECT to_regnamespace('{request.node.name}')", list[Any]()
    with pytest.raises(StoppedError):
        load(path, on_progress=stop)
    assert [*asked, postgres_server.ask(query)] == [[(None,)]] * 2
    assert (read(load(path), postgres_server)[:].X != X).nnz == 0


KILLED = """
import sys, time
from cellfeed import load_database
def tell(done, total):
    print(done, flush=True)
    time.sleep(600)
path, url, name = sys.argv[1:]
load_database(path, url, name, on_progress=tell)
"""


@of_server
@pytest.mark.process
@pytest.mark.slow
def test_a_load_that_is_killed_leaves_nothing(many, load, postgres_server, request, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    (path, X), name = many, request.node.name
    command = [sys.executable, "-c", KILLED, *map(str, (path, postgres_server.url, name))]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert int(killed.stdout.readline()) == MOST_CELLS
        killed.kill()
    with pytest.raises(PathError, match="there is no collection"):
        read(f"{postgres_server.url}?collection={quote(name)}", postgres_server)
    assert (read(load(path), postgres_server)[:].X != X).nnz == 0


@of_server
def test_a_connection_that_is_lost(many, load, postgres_server):
    def drop(*_):
        postgres_server.ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'lost'"
        )

    options = postgres_server.options | {"application_name": "lost"}
    with pytest.raises(RemoteError, match=r"cannot be read \(.*\); check server") as raised:
        load(many[0], on_progress=drop, database_options=options)
    assert "\n" not in str(raised.value)


@of_server
def test_a_name_that_is_taken(files, load, postgres_server, request):
    paths, _ = files
    said = r'there is a schema .*, or another process is writing it; give .* DROP SCHEMA ".*" CASC'

    def load_too(*_):
        with pytest.raises(ParameterError, match=said) as raised:
            load(paths[0])
        assert "\n" not in str(raised.value)

    load(paths[0], on_progress=load_too)
    load_too()
    postgres_server.ask(f'DROP SCHEMA "{request.node.name}" CASCADE')
    assert len(read(load(paths[1]), postgres_server)) == 300
    for name in ("", "pg_mine", "x" * 64):
        with pytest.raises(ParameterError, match="`name` must have 1 to 63 bytes"):
            load(paths, name)
    with pytest.raises(ParameterError, match="`obs` names 'tissue', but the columns are: plate"):
        load(paths, obs=["tissue"])


# Names, text and columns


@of_server
@pytest.mark.parametrize("name", ["id", "name", "x" * 64, "ü" * 32])
def test_names_that_postgresql_cannot_have(load, postgres_server, name):
    obs = pd.DataFrame({name: [1, 2, 3], "plate": "p"}, index=list("abc"))
    adata = ad.AnnData(np.eye(3, dtype=np.float32), obs=obs)
    with pytest.raises(ParameterError, match=rf"the column '{name}' cannot .*; leave it out, or"):
        load(adata, "names")
    url = load(adata, f"without {len(name)}", obs=["plate"])
    assert len(read(url, postgres_server)) == 3


@of_server
def test_only_some_obs(load, postgres_server):
    """In the order that was asked for, and others may have what cannot be read."""
    when = pd.Timestamp("2020-01-01")
    obs = {"plate": "p", "when": when, "source_file": "f", "size": [1, 2, 3]}
    adata = ad.AnnData(np.eye(3, dtype=np.float32), obs=pd.DataFrame(obs, index=list("abc")))
    url = load(adata, obs=["size", "plate"])
    source = PostgresSource(url, storage_options=postgres_server.options)
    assert source.obs_names() == ["size", "plate"]
    assert source.read_obs(["plate"])["plate"].tolist() == ["p"] * 3
    with pytest.raises(ParameterError, match=r"columns are: plate, when, source_file, size$"):
        load(adata, obs=["tissue"])


@of_server
def test_percent_signs_in_names(load, postgres_server, tmp_path):
    X = np.eye(3, dtype=np.float32)
    obs = pd.DataFrame({"% mito": [0.5, 20.0, 30.0]}, index=list("abc"))
    layers = {"50%s": 2 * X}
    adata = ad.AnnData(X, obs=obs, layers=layers, var=pd.DataFrame(index=list("%xy")))
    adata.write_h5ad(tmp_path / "cells.h5ad")
    elements, options = ["X", "layers/50%s"], postgres_server.options
    url = load(tmp_path / "cells.h5ad", "100%s", elements=elements)
    source = PostgresSource(url, where='"% mito"::int % 20 > 5', storage_options=options)
    collection = open_collection(source, elements=elements, obs=["% mito"])
    assert np.array_equal(collection[:]["layers/50%s"], 2 * X[2:])
    assert np.array_equal(np.asarray(collection.obs["% mito"].values), [30.0])
    assert source.read_obs_rows(["% mito"], np.zeros(1, np.int64)).index.tolist() == ["c"]
    assert collection.elements["X"].column_names.tolist() == list("%xy")


@of_server
@pytest.mark.parametrize("text", [["a\0b", "c", "d"], pd.Categorical(["a\0b"] * 3)])
def test_text_that_postgresql_cannot_have(tmp_path, load, text):
    obs = pd.DataFrame({"text": text}, index=list("xyz"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's own
        ad.AnnData(np.eye(3, dtype=np.float32), obs=obs).write_zarr(tmp_path / "nul.zarr")
    with pytest.raises(FormatError, match=r"cannot store .*; correct it in the files") as raised:
        load(tmp_path / "nul.zarr")
    assert "\n" not in str(raised.value)


@of_server
def test_a_gene_without_a_name(write_h5ad, load, postgres_server, request):
    def edit(file):
        del file["var/_index"]
        with ad.settings.override(allow_write_nullable_strings=True):
            ad.io.write_elem(file["var"], "_index", pd.array(["a", None, "c"], dtype="string"))

    path = write_h5ad(np.eye(3, dtype=np.float32), edit=edit)
    said = rf"^{path}: 1 gene has no name, but genes are matched by name; write the file again with"
    with pytest.raises(MismatchError, match=said):
        load(path)
    schema = f'"{request.node.name}"'
    assert postgres_server.ask(f"SELECT to_regnamespace('{schema}')") == [(None,)]


@of_server
@pytest.mark.smoke
def test_the_password_of_the_environment(files, postgres_server, request, monkeypatch):
    paths, cells = files
    name, url = request.node.name, postgres_server.url
    with pytest.raises(RemoteError, match=f"^{re.escape(url)}: cannot be read "):
        load_database(paths, url, name)
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    loaded = load_database(paths, url, name, obs=["plate", "size"])
    assert loaded == f"{url}?collection={name}"
    collection = open_collection(loaded, obs=["size"])
    assert len(collection) == N_CELLS
    assert np.array_equal(collection[[699, 3]].X.toarray()[1], cells[0].X[3].toarray()[0])


def test_without_a_server(files):
    said = "is not a database; give postgresql://user@host/database"
    with pytest.raises(ParameterError, match=said):
        load_database(files[0][0], "cells.db", "cells")
