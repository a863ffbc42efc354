"""Loading goes on where it was killed, and says what is wrong."""

import signal
import subprocess
import sys
import time
import warnings
from urllib.parse import quote

import anndata as ad
import numpy as np
import pandas as pd
import psutil
import pytest
import scipy.sparse as sp
from tests import commands
from tests.warm import python as warm

from cellfeed import (
    FormatError,
    MismatchError,
    ParameterError,
    PostgresSource,
    RemoteError,
    load_database,
    open_collection,
)
from cellfeed._convert import _load_database as loading

N_CELLS, N_GENES = 700, 30


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
                "id": np.arange(n, dtype=np.int16),
                "x" * 70: random.random(n).astype(np.float32),
                "count": pd.array([7 if each % 5 else pd.NA for each in range(n)], dtype="Int64"),
                "passed": pd.array([each % 3 > 0 or pd.NA for each in range(n)], dtype="boolean"),
                "large": np.full(n, 2**64 - 1, np.uint64),
                "size": pd.Categorical(random.integers(1, 4, n)),
            },
            index=[f"{k} {number}" for number in range(n)],
        )
        adata = ad.AnnData(X, obs=obs, var=pd.DataFrame(index=[f"g{j}" for j in range(N_GENES)]))
        paths.append(tmp_path / f"{k}.h5ad")
        adata.write_h5ad(paths[-1])
        cells.append(adata)
    return paths, cells


@pytest.fixture
def load(postgres_server, request):
    def load(paths, **options):
        options = {"database_options": postgres_server.options} | options
        return load_database(paths, postgres_server.url, request.node.name, **options)

    return load


def check(url, options, cells):
    collection = open_collection(url, obs=["source_row", "id"], storage_options=options)
    assert np.array_equal(collection[:].X.toarray(), sp.vstack([a.X for a in cells]).toarray())
    numbers = np.concatenate([np.arange(a.n_obs) for a in cells])
    assert np.array_equal(collection.obs["source_row"].values, numbers)
    assert np.array_equal(collection.obs["id"].values, numbers)


def test_obs_of_every_kind(files, load, postgres_server):
    paths, cells = files
    told = []
    done = load(paths, on_progress=lambda *numbers: told.append(numbers))
    assert (done.n_cells, done.n_parts, done.n_parts_written) == (N_CELLS, 1, 1)
    assert told == [(N_CELLS, N_CELLS)]
    check(done.url, postgres_server.options, cells)
    source = PostgresSource(done.url, storage_options=postgres_server.options)
    expected = pd.concat([each.obs for each in cells])
    found = source.read_obs_rows(list(expected), np.arange(N_CELLS))
    assert found.index.tolist() == expected.index.tolist()
    for name in expected:
        some, others = (each[name].astype(object) for each in (found, expected))
        pd.testing.assert_series_equal(some, others)
        assert str(found[name].dtype) == str(expected[name].dtype) or name == "plate"
    assert list(found["size"].cat.categories) == [1, 2, 3]
    assert source.obs_names()[-2:] == ["source_file", "source_row"]
    some = PostgresSource(
        done.url,
        where="source_file = '1.h5ad' AND obs_2 < 0.5 AND size = 2",
        storage_options=postgres_server.options,
    )
    own = cells[1].obs
    assert some.n_rows == np.count_nonzero((own["x" * 70] < 0.5) & (own["size"] == 2))


def test_parts_by_several_processes(files, load, postgres_server, monkeypatch):
    monkeypatch.setattr(loading, "_MOST_CELLS", 64)
    paths, cells = files
    done = load(paths, processes=3)
    assert (done.n_parts, done.n_parts_written) == (11, 11)
    check(done.url, postgres_server.options, cells)
    assert load(paths).n_parts_written == 0


KILLED = """
import sys, time
from cellfeed import load_database
from cellfeed._convert import _load_database as loading
loading._MOST_CELLS = 64
if __name__ == "__main__":
    def tell(done, total):
        print(done, flush=True)
        while done >= 3 * 64:
            time.sleep(1)
    paths, url, name, processes = sys.argv[1:3], *sys.argv[3:]
    load_database(paths, url, name, processes=int(processes), on_progress=tell)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_load_that_is_killed_goes_on(
    files, load, postgres_server, request, monkeypatch, tmp_path, processes
):
    monkeypatch.setattr(loading, "_MOST_CELLS", 64)
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths, cells = files
    name = request.node.name
    arguments = [*paths, postgres_server.url, name, processes]
    command = [sys.executable, str(script), *map(str, arguments)]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        for _ in range(3):
            assert int(killed.stdout.readline()) % 64 == 0
        writing = psutil.Process(killed.pid).children(recursive=True)
        killed.send_signal(signal.SIGKILL)
    assert len(writing) >= (processes if processes > 1 else 0)
    latest = time.monotonic() + 600
    while any(map(is_alive, writing)):  # none outlives the one that was killed
        assert time.monotonic() < latest
        time.sleep(0.05)
    url = f"{postgres_server.url}?collection={quote(name)}"
    n_there = postgres_server.ask(f'SELECT count(*) FROM "{name}".cells')[0][0]
    assert n_there >= 3 * 64
    with pytest.raises(FormatError, match="is incomplete"):
        open_collection(url, storage_options=postgres_server.options)
    done = load_when_free(load, paths)
    assert done.n_parts_written <= done.n_parts - 3
    check(url, postgres_server.options, cells)
    assert done.url == url


INTERRUPTED = """
import signal, sys
if __name__ != "__main__":  # a writing process, which imports this script first
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
from cellfeed import load_database
from cellfeed._convert import _load_database as loading
loading._MOST_CELLS = 64
if __name__ == "__main__":
    *paths, url, name = sys.argv[1:]
    print(load_database(paths, url, name, processes=2).n_parts_written)
"""


def test_writing_processes_leave_ctrl_c_to_the_one_that_waits(
    files, postgres_server, request, monkeypatch, tmp_path
):
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    arguments = [*files[0], postgres_server.url, request.node.name]
    done = warm.run([sys.executable, str(script), *map(str, arguments)])
    assert (done.returncode, done.stdout, done.stderr) == (0, "11\n", "")


def is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def load_when_free(load, paths):
    """Load as soon as the server has noticed that the process before is gone."""
    latest = time.monotonic() + 600
    while True:
        try:
            return load(paths)
        except ParameterError as error:
            if "is being loaded by another process" not in str(error) or time.monotonic() > latest:
                raise
        time.sleep(0.05)


def test_something_else_of_this_name(files, load, postgres_server, request):
    paths, _ = files
    load(paths[0])
    with pytest.raises(ParameterError, match="was begun with other files, elements or obs col"):
        load(paths)
    with pytest.raises(ParameterError, match="was begun with other files, elements or obs col"):
        load(paths[0], obs=["plate"])
    postgres_server.ask("CREATE SCHEMA theirs")
    with pytest.raises(ParameterError, match="the schema theirs exists, but is not a collection"):
        load_database(
            paths, postgres_server.url, "theirs", database_options=postgres_server.options
        )
    for name in ("", "pg_mine", "x" * 64):
        with pytest.raises(ParameterError, match="`name` must have 1 to 63 bytes"):
            load_database(
                paths, postgres_server.url, name, database_options=postgres_server.options
            )
    with pytest.raises(ParameterError, match="`obs` names 'tissue', but the columns are: plate"):
        load(paths, obs=["tissue"])


def test_only_some_obs(files, load, postgres_server):
    done = load(files[0][0], obs=["size", "plate"])
    source = PostgresSource(done.url, storage_options=postgres_server.options)
    assert source.obs_names() == ["size", "plate"]


def test_obs_that_cannot_be_read_is_left_out(load, postgres_server):
    when = pd.Timestamp("2020-01-01")
    obs = pd.DataFrame({"plate": "p", "when": when, "source_file": "f"}, index=list("abc"))
    adata = ad.AnnData(np.eye(3, dtype=np.float32), obs=obs)
    done = load(adata, obs=["plate"])
    source = PostgresSource(done.url, storage_options=postgres_server.options)
    assert source.obs_names() == ["plate"]
    assert source.read_obs(["plate"])["plate"].tolist() == ["p"] * 3
    with pytest.raises(ParameterError, match=r"columns are: plate, when, source_file$"):
        load(adata, obs=["tissue"])


def test_percent_signs_in_names(load, postgres_server, tmp_path):
    X = np.eye(3, dtype=np.float32)
    obs = pd.DataFrame({"% mito": [0.5, 20.0, 30.0]}, index=list("abc"))
    layers = {"50%s": 2 * X}
    adata = ad.AnnData(X, obs=obs, layers=layers, var=pd.DataFrame(index=list("%xy")))
    adata.write_h5ad(tmp_path / "cells.h5ad")
    elements = ["X", "layers/50%s"]
    options = postgres_server.options
    url = load_database(
        tmp_path / "cells.h5ad", postgres_server.url, "100%s", elements=elements,
        database_options=options,
    ).url  # fmt: skip
    source = PostgresSource(url, where='"% mito"::int % 20 > 5', storage_options=options)
    collection = open_collection(source, elements=elements, obs=["% mito"])
    assert np.array_equal(collection[:]["layers/50%s"], 2 * X[2:])
    assert np.array_equal(np.asarray(collection.obs["% mito"].values), [30.0])
    assert source.read_obs_rows(["% mito"], np.zeros(1, np.int64)).index.tolist() == ["c"]
    assert collection.elements["X"].column_names.tolist() == list("%xy")


@pytest.mark.parametrize("name", [["a\0b", "c", "d"], pd.Categorical(["a\0b"] * 3)])
def test_text_that_postgresql_cannot_have(tmp_path, load, name):
    obs = pd.DataFrame({"name": name}, index=list("xyz"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's own
        ad.AnnData(np.eye(3, dtype=np.float32), obs=obs).write_zarr(tmp_path / "nul.zarr")
    with pytest.raises(FormatError, match=r"cannot store .*; correct it in the files") as raised:
        load(tmp_path / "nul.zarr")
    assert "\n" not in str(raised.value)


def test_the_command(files, postgres_server, request, monkeypatch):
    paths, _ = files
    name = request.node.name
    command = ["load-database", *map(str, paths), postgres_server.url, "--name", name]
    refused = commands.cellfeed(*command)
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"Error: {postgres_server.url}: cannot be read (")
    assert refused.stderr.count("\n") == 1
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    done = commands.cellfeed(*command, "--obs", "plate,size")
    assert done.exit_code == 0, done.stderr
    head = f"{postgres_server.url}?collection={name}: 700 cells in 1 part (1 written), "
    assert done.stdout.startswith(head)
    missing = commands.cellfeed(*command[:1], "nowhere.h5ad", *command[3:])
    assert (missing.exit_code, missing.stdout) == (2, "")
    no_database = commands.cellfeed(*command[:3], "cells.db", "--name", name)
    assert no_database.exit_code == 2
    assert "is not a database; give postgresql://user@host/database" in no_database.stderr


def test_a_server_that_is_not_there(files):
    with pytest.raises(RemoteError, match="cannot be read"):
        load_database(files[0], "postgresql://nobody@127.0.0.1:1/db", "cells")


def test_a_gene_without_a_name(write_h5ad, load, postgres_server, request):
    def edit(file):
        del file["var/_index"]
        with ad.settings.override(allow_write_nullable_strings=True):
            ad.io.write_elem(file, "var/_index", pd.array(["a", None, "c"], dtype="string"))

    path = write_h5ad(np.eye(3, dtype=np.float32), edit=edit)
    said = rf"^{path}: 1 gene has no name, but genes are matched by name; write the file again with"
    with pytest.raises(MismatchError, match=said):
        load(path)
    schema = f'"{request.node.name}"'
    assert postgres_server.ask(f"SELECT to_regnamespace('{schema}')") == [(None,)]
