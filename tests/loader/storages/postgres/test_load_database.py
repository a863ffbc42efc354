"""Loading goes on where it was stopped, never with other cells, and says what is wrong."""

import subprocess
import sys
import warnings
from urllib.parse import quote

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr
from tests import commands
from tests.warm import python as warm

from cellfeed import (
    FormatError,
    HuggingFaceSource,
    MismatchError,
    ParameterError,
    PostgresSource,
    SomaSource,
    load_database,
    open_collection,
)

of_server = pytest.mark.server
N_CELLS, N_GENES = 700, 30
MOST_CELLS = 8192  # of a part
N_MANY = 2 * MOST_CELLS + 9
OTHER = "was begun with other files, elements or obs columns"


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


def stop(*_):
    raise StoppedError


@of_server
def test_obs_of_every_kind(files, load, postgres_server):
    paths, cells = files
    told = []
    done = load(paths, on_progress=lambda *numbers: told.append(numbers))
    assert (done.n_cells, done.n_parts, done.n_parts_written) == (N_CELLS, 1, 1)
    assert told == [(N_CELLS, N_CELLS)]
    collection = read(done.url, postgres_server, obs=["source_row", "id"])
    assert np.array_equal(collection[:].X.toarray(), sp.vstack([a.X for a in cells]).toarray())
    for name in ("source_row", "id"):
        assert np.array_equal(collection.obs[name].values, [*range(400), *range(300)])
    source = PostgresSource(done.url, storage_options=postgres_server.options)
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
        done.url,
        where="source_file = '1.h5ad' AND obs_2 < 0.5 AND size = 2",
        storage_options=postgres_server.options,
    )
    own = cells[1].obs
    assert some.n_rows == np.count_nonzero((own["x" * 70] < 0.5) & (own["size"] == 2))


# Stopped, killed, and resumed


@of_server
def test_a_load_that_is_stopped_goes_on(many, load, postgres_server):
    path, X = many
    told = []

    with pytest.raises(StoppedError):
        load(path, on_progress=stop)
    done = load(path, on_progress=lambda *numbers: told.append(numbers))
    assert (done.n_parts, done.n_parts_written) == (3, 2)
    assert told == [(2 * MOST_CELLS, N_MANY), (N_MANY, N_MANY)]
    collection = read(done.url, postgres_server, obs_names=True)
    assert (collection[:].X != X).nnz == 0
    last = collection.obs_names(np.array([N_MANY - 1, MOST_CELLS]))
    assert last.tolist() == [f"cell{N_MANY - 1}", f"cell{MOST_CELLS}"]
    assert load(path).n_parts_written == 0


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
def test_a_load_that_is_killed_goes_on(many, load, postgres_server, request, monkeypatch):
    monkeypatch.setenv("PGPASSWORD", postgres_server.password)
    (path, X), name = many, request.node.name
    command = [sys.executable, "-c", KILLED, *map(str, (path, postgres_server.url, name))]
    with warm.Popen(command, stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        assert int(killed.stdout.readline()) == MOST_CELLS
        killed.kill()
    url = f"{postgres_server.url}?collection={quote(name)}"
    with pytest.raises(FormatError, match="is incomplete"):
        read(url, postgres_server)
    done = load(path)
    assert (done.n_parts_written, done.url) == (2, url)
    assert (read(url, postgres_server)[:].X != X).nnz == 0


@of_server
def test_one_process_at_a_time_loads(files, load):
    def load_too(*_):
        with pytest.raises(ParameterError, match="is being loaded by another process; wait for it"):
            load(files[0])

    assert load(files[0], on_progress=load_too).n_parts_written == 1


# Only with the same cells


@pytest.fixture
def adata():
    X = sp.csr_matrix(np.random.default_rng(0).poisson(0.4, (200, 20)).astype(np.float32))
    obs = pd.DataFrame({"half": pd.Categorical(np.repeat(["l", "r"], 100))})
    return ad.AnnData(X, obs=obs.set_index(obs.index.astype(str)))


@of_server
@pytest.mark.parametrize("is_stopped", [False, True])
def test_cells_in_memory(adata, load, postgres_server, request, is_stopped):
    if is_stopped:
        with pytest.raises(StoppedError):
            load(adata, on_progress=stop)
    else:
        load(adata)
    adata.X = adata.X * 2
    said = r"its cells cannot be identified; .* DROP SCHEMA .*\.h5ad"
    with pytest.raises(ParameterError, match=said) as raised:
        load(adata)
    assert "\n" not in str(raised.value)
    postgres_server.ask(f'DROP SCHEMA "{request.node.name}" CASCADE')
    found = read(load(adata).url, postgres_server)[:].X
    assert np.array_equal(found.toarray(), adata.X.toarray())


@of_server
def test_obs_of_a_backed_object_is_in_memory(adata, load, tmp_path):
    adata.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    load(backed)
    backed.obs["half"] = backed.obs["half"].to_numpy()[::-1]
    with pytest.raises(ParameterError, match="its cells cannot be identified"):
        load(backed)
    backed.file.close()


def zarr_store(adata, load, folder, server):
    path = folder / "cells.zarr"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's own
        adata.write_zarr(path)
    yield path
    data = zarr.open_array(path / "X/data")
    data[:] = 2 * np.asarray(data[:])
    yield path


def condition_in_sql(adata, load, folder, server):
    url = load(adata, "whole").url
    for half in "lr":
        yield PostgresSource(url, where=f"half = '{half}'", storage_options=server.options)


def obs_query(adata, load, folder, server):
    pytest.importorskip("tiledbsoma")
    from tests.loader.storages.soma.written import write_experiment  # noqa: PLC0415 - it imports an extra

    experiment = write_experiment(folder / "experiment", adata)
    for half in "lr":
        yield SomaSource(experiment, obs_query=f"half == '{half}'")


def order_of_rows_and_genes(adata, load, folder, server):
    datasets = pytest.importorskip("datasets")
    columns = {"genes": [[1, 2], [1], [2]], "expressions": [[3.0, 4.0], [5.0], [6.0]]}
    datasets.Dataset.from_dict(columns).save_to_disk(folder / "saved")
    saved = datasets.load_from_disk(folder / "saved")
    for rows, gene_ids in (([2, 0], [1, 2]), ([0, 2], [1, 2]), ([2, 0], [2, 1])):
        table = pd.DataFrame({"token": gene_ids}, index=[f"gene{each}" for each in gene_ids])
        yield HuggingFaceSource(saved.select(rows), gene_table=table, tokens="token")


@of_server
@pytest.mark.parametrize(
    "sources", [zarr_store, condition_in_sql, obs_query, order_of_rows_and_genes]
)
def test_other_cells_are_refused(adata, load, tmp_path, postgres_server, sources):
    given = sources(adata, load, tmp_path, postgres_server)
    first = next(given)
    assert load(first).n_parts_written == 1
    assert load(first).n_parts_written == 0
    n_refused = 0
    for n_refused, other in enumerate(given, 1):  # noqa: B007
        with pytest.raises(ParameterError, match=OTHER):
            load(other)
    assert n_refused


@of_server
def test_something_else_of_this_name(files, load, postgres_server):
    paths, _ = files
    load(paths[0])
    for given, options in ((paths, {}), (paths[0], {"obs": ["plate"]})):
        with pytest.raises(ParameterError, match=OTHER):
            load(given, **options)
    postgres_server.ask("CREATE SCHEMA theirs")
    with pytest.raises(ParameterError, match="the schema theirs exists, but is not a collection"):
        load(paths, "theirs")
    for name in ("", "pg_mine", "x" * 64):
        with pytest.raises(ParameterError, match="`name` must have 1 to 63 bytes"):
            load(paths, name)
    with pytest.raises(ParameterError, match="`obs` names 'tissue', but the columns are: plate"):
        load(paths, obs=["tissue"])


# Names, text and columns


@of_server
def test_only_some_obs(load, postgres_server):
    """In the order that was asked for, and others may have what cannot be read."""
    when = pd.Timestamp("2020-01-01")
    obs = {"plate": "p", "when": when, "source_file": "f", "size": [1, 2, 3]}
    adata = ad.AnnData(np.eye(3, dtype=np.float32), obs=pd.DataFrame(obs, index=list("abc")))
    done = load(adata, obs=["size", "plate"])
    source = PostgresSource(done.url, storage_options=postgres_server.options)
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
    url = load(tmp_path / "cells.h5ad", "100%s", elements=elements).url
    source = PostgresSource(url, where='"% mito"::int % 20 > 5', storage_options=options)
    collection = open_collection(source, elements=elements, obs=["% mito"])
    assert np.array_equal(collection[:]["layers/50%s"], 2 * X[2:])
    assert np.array_equal(np.asarray(collection.obs["% mito"].values), [30.0])
    assert source.read_obs_rows(["% mito"], np.zeros(1, np.int64)).index.tolist() == ["c"]
    assert collection.elements["X"].column_names.tolist() == list("%xy")


@of_server
@pytest.mark.parametrize("name", [["a\0b", "c", "d"], pd.Categorical(["a\0b"] * 3)])
def test_text_that_postgresql_cannot_have(tmp_path, load, name):
    obs = pd.DataFrame({"name": name}, index=list("xyz"))
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


# The command


@of_server
@pytest.mark.smoke
def test_the_command(files, postgres_server, request, monkeypatch):
    paths, cells = files
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
    collection = open_collection(f"{postgres_server.url}?collection={name}", obs=["size"])
    assert np.array_equal(collection[[699, 3]].X.toarray()[1], cells[0].X[3].toarray()[0])
    missing = commands.cellfeed(*command[:1], "nowhere.h5ad", *command[3:])
    assert (missing.exit_code, missing.stdout) == (2, "")


def test_without_a_server(files):
    no_database = commands.cellfeed("load-database", files[0][0], "cells.db", "--name", "cells")
    assert no_database.exit_code == 2
    assert "is not a database; give postgresql://user@host/database" in no_database.stderr
