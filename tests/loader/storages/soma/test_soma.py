"""Experiments of TileDB-SOMA hold what the h5ad has that they were made from."""

import pickle
import re
import shutil
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader.matrices import adata_of, dense
from tests.loader.preshuffling.copies import assert_preshuffled
from tests.loader.sources.cells import (
    ELEMENTS,
    N_CELLS,
    OBS,
    assert_same_epochs,
    assert_selected,
    labels_of,
    make_adata,
    said_without,
)
from tests.loader.sources.suites import Suite
from tests.loader.storages.soma.written import write_experiment

from cellfeed import (
    BlockShuffling,
    CellDataset,
    FormatError,
    ParameterError,
    PathError,
    SomaSource,
    open_collection,
)

pytest.importorskip("tiledbsoma")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soma")
    adata = make_adata()
    adata.write_h5ad(folder / "cells.h5ad")
    return write_experiment(folder / "experiment", adata), folder / "cells.h5ad", adata


def test_the_same_minibatches_as_from_the_h5ad(stored):
    experiment, h5ad, _ = stored
    both = [open_collection(path, obs=OBS, elements=ELEMENTS) for path in (experiment, h5ad)]
    assert_same_epochs(both)


@pytest.mark.parametrize(
    ("query", "in_pandas"),
    [
        ("plate == 'p1'", "plate == 'p1'"),
        ("n_counts > 12 and donor != 'donor 3'", "n_counts > 12 and donor != 'donor 3'"),
    ],
)
def test_an_obs_query(stored, query, in_pandas):
    experiment, _, adata = stored
    rows = np.flatnonzero(adata.obs.eval(in_pandas))
    source, whole = SomaSource(experiment, obs_query=query), SomaSource(experiment)
    assert source.selection() != whole.selection() == SomaSource(experiment).selection()
    collection = open_collection(source, obs=OBS, elements=["X", "layers/counts", "obsm/X_pca"])
    assert_selected(collection, adata, rows)
    order = np.random.default_rng(0).permutation(rows.size)
    assert collection.obs_names(order).tolist() == adata.obs_names[rows[order]].tolist()


def test_soma_joinids_of_a_query(stored):
    experiment, _, adata = stored
    source = SomaSource(experiment, obs_query="plate == 'p1'")
    rows = np.flatnonzero(adata.obs["plate"] == "p1")
    collection = open_collection(source, obs=["soma_joinid", "donor"])
    for minibatch in CellDataset(collection, BlockShuffling(4), 16, 2, seed=0):
        joinids = minibatch.obs["soma_joinid"].numpy()
        assert np.array_equal(joinids, rows[minibatch.rows.numpy()])
        assert np.array_equal(dense(minibatch.X), adata.X[joinids].toarray())
    assert np.array_equal(collection.where("soma_joinid >= 10"), np.flatnonzero(rows >= 10))
    whole = open_collection(experiment, obs=["soma_joinid"])
    assert np.array_equal(whole.obs["soma_joinid"].values, np.arange(N_CELLS))


def test_sources_beside_paths(stored):
    experiment, h5ad, adata = stored
    source = SomaSource(experiment, layer="counts", obs_query="plate == 'p1'")
    collection = open_collection([h5ad, source])
    rows = np.flatnonzero(adata.obs["plate"] == "p1")
    assert len(collection) == N_CELLS + rows.size
    assert np.array_equal(
        collection[[N_CELLS + 1, 1]].X.toarray(),
        np.vstack([2 * adata.X[rows[1]].toarray(), adata.X[1].toarray()]),
    )
    assert list(source.elements) == ["X", "layers/counts", "layers/data", "raw/X", "obsm/X_pca"]
    with pytest.raises(FormatError, match=r"has no `layers/other`; its elements are: `X`, `lay"):
        open_collection(source, elements=["layers/other"])


def test_workers_are_not_forked(stored):
    """There are threads of TileDB in this process; the suite reads in workers."""
    collection = open_collection(stored[0], obs=["plate"])
    collection[:5]
    dataset = CellDataset(collection, BlockShuffling(4), batch_size=16, fetch_factor=2, seed=0)
    loader = dataset.loader(num_workers=2)
    assert loader.multiprocessing_context.get_start_method() == "forkserver"


def test_what_is_written_meanwhile_is_not_seen(tmp_path):
    """Not by a process that opens the experiment anew, either."""
    soma, arrow = pytest.importorskip("tiledbsoma"), pytest.importorskip("pyarrow")
    adata = make_adata()
    where = str(write_experiment(tmp_path / "changing", adata))
    opened = open_collection(SomaSource(where))
    kept = pickle.dumps(opened)
    time.sleep(0.01)  # timestamps are in ms
    with soma.open(f"{where}/ms/RNA/X/data", "w") as values:
        rows = np.arange(N_CELLS)
        table = {"soma_dim_0": rows, "soma_dim_1": 0 * rows, "soma_data": 99 + 0 * rows}
        schema = arrow.schema([(name, values.schema.field(name).type) for name in table])
        values.write(arrow.table(table, schema=schema))
    for each in (opened, pickle.loads(kept)):
        np.testing.assert_array_equal(each[:].X.toarray(), adata.X.toarray())
    assert (open_collection(where)[:].X.toarray()[:, 0] == 99).all()


def test_pickled(stored):
    experiment, _, adata = stored
    source = SomaSource(experiment, tiledb_config={"vfs.s3.aws_secret_access_key": "hidden"})
    collection = open_collection(source)
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(collection))
        assert np.array_equal(copy[[9, 1]].X.toarray(), adata.X[[9, 1]].toarray())
        collection[:3]
    assert "hidden" not in f"{source!r} {collection!r} {collection.describe()}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"measurement": "ATAC"}, "has no measurement 'ATAC'; give .* one of: 'RNA', 'raw'"),
        ({"layer": "log"}, "has no layer 'log'; give `layer=`.* one of: 'counts', 'data'"),
        ({"obs_query": "plate == 'p9' and n_counts < 0"}, "no cell fulfils obs_query="),
        ({"obs_query": "tissue == 'lung'"}, "is not a valid value_filter .*; its obs.*: .*plate"),
        ({"obs_query": "plate =="}, "is not a valid value_filter"),
    ],
)
def test_what_is_not_there(stored, options, said):
    with pytest.raises(ParameterError, match=f"^{re.escape(str(stored[0]))}: .*{said}") as raised:
        SomaSource(stored[0], **options)
    assert "\n" not in str(raised.value)


def test_no_experiment(stored, tmp_path):
    with pytest.raises(PathError, match=r"nowhere: there is no SOMA experiment; check the path$"):
        SomaSource(tmp_path / "nowhere")
    with pytest.raises(FormatError, match=r"is a SOMA Measurement, not an experiment; give"):
        open_collection(stored[0] / "ms" / "RNA")
    with pytest.raises(FormatError, match=r"cannot open it .*; check the URI and `tiledb_config`"):
        SomaSource(stored[0], tiledb_config={"sm.memory_budget": "much"})
    with pytest.raises(PathError, match=r"no storage opens .*; `SomaSource\(uri\)` opens it$"):
        open_collection("tiledb://account/experiment")


def test_an_experiment_that_lacks_a_part(stored, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(stored[0], damaged)
    shutil.rmtree(damaged / "obs")
    with pytest.raises(FormatError) as missing:
        open_collection(damaged)
    assert str(missing.value).startswith(f"{damaged}: ")
    assert "\n" not in str(missing.value)


def test_without_tiledbsoma(stored, monkeypatch):
    expected = "reading TileDB-SOMA requires tiledbsoma; install it: pip install 'cellfeed[soma]'"
    assert said_without("tiledbsoma", stored[0], monkeypatch) == f"{stored[0]}: {expected}"


def test_preshuffled(stored, tmp_path):
    assert_preshuffled(stored[0], stored[2], tmp_path)


@pytest.mark.parametrize(
    ("cell_index", "gene_index"),  # which do not depend on each other
    [(None, None), ("cell", "symbol"), ("gene_id", "gene_id"), ("obs_id", "gene_name")],
)
def test_names_are_the_index_of_the_h5ad(tmp_path, cell_index, gene_index):
    """Also beside a column that is called as an index often is; such columns are columns."""
    adata = make_adata()[:20, :5].copy()
    del adata.raw
    adata.obs.index.name, adata.var.index.name = cell_index, gene_index
    labels = [name for name in ("gene_id", "feature_id", "var_id") if name != cell_index]
    for name in labels:
        adata.obs[name] = [f"{name} {k % 3}" for k in range(20)]
    for name in {"gene_id", "feature_id", "obs_id"} - {gene_index}:
        adata.var[name] = [f"{name} {k}" for k in range(5)]
    adata.write_h5ad(tmp_path / "cells.h5ad")
    io = pytest.importorskip("tiledbsoma.io")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's and tiledbsoma's own
        uri = str(tmp_path / "experiment")
        io.from_h5ad(uri, str(tmp_path / "cells.h5ad"), measurement_name="RNA")
    source = SomaSource(uri)
    assert source.obs_names() == [*adata.obs, "soma_joinid"]
    assert source.read_obs_rows(["plate"], np.array([1, 4])).index.tolist() == ["cell 1", "cell 4"]
    var = source.read_var()
    assert var.index.tolist() == adata.var_names.tolist()
    assert set(var) == set(adata.var)
    collection = open_collection([uri, tmp_path / "cells.h5ad"], obs=labels)
    assert collection.var_names.tolist() == adata.var_names.tolist()
    for name in labels:
        found = labels_of(collection, name, collection[:].obs[name])
        assert found == 2 * adata.obs[name].tolist()


class TestSoma(Suite):
    dtypes = ("<f4", "<f8", "|u1", "<i2", "<i8")
    elements = ("X", "layers/counts", "raw/X")
    max_examples = 5

    def is_decoded_here(self, case):
        return bool(case.row_lengths.sum()) if case.layout == "csr" else None

    def storable(self, case):  # no arrays without columns, no value twice, and no dense raw
        return replace(
            case,
            n_vars=max(1, case.n_vars),
            columns="in any order" if case.columns == "some twice" else case.columns,
            layout="csr" if case.element == "raw/X" else case.layout,
        )

    def stored(self, path, case):
        adata = adata_of(case)
        if adata.X is None:  # there must be one
            other = sp.csr_matrix(case.matrix.shape, dtype=np.float32)
            adata.X = other if case.layout == "csr" else other.toarray()
        return write_experiment(path, adata)
