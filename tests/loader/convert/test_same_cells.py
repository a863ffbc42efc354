"""What was begun with some cells never goes on with others."""

import warnings

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import zarr

from cellfeed import (
    HuggingFaceSource,
    ParameterError,
    PostgresSource,
    SomaSource,
    load_database,
    open_collection,
)
from cellfeed._convert import _load_database as loading

N_CELLS = 200


@pytest.fixture
def adata():
    random = np.random.default_rng(0)
    X = sp.csr_matrix(random.poisson(0.4, (N_CELLS, 20)).astype(np.float32))
    obs = pd.DataFrame(
        {"half": pd.Categorical(np.repeat(["l", "r"], N_CELLS // 2))},
        index=[f"c{k}" for k in range(N_CELLS)],
    )
    return ad.AnnData(X, obs=obs)


@pytest.fixture
def load(postgres_server, request):
    def load(cells, name=request.node.name, **options):
        return load_database(
            cells,
            postgres_server.url,
            name,
            database_options=postgres_server.options,
            **options,
        )

    return load


class StoppedError(Exception):
    pass


def stop(*_):
    raise StoppedError


OTHER = "was begun with other files, elements or obs columns"


@pytest.mark.parametrize("is_stopped", [False, True])
def test_cells_in_memory(adata, load, postgres_server, request, monkeypatch, is_stopped):
    monkeypatch.setattr(loading, "_MOST_CELLS", 64)
    if is_stopped:
        with pytest.raises(StoppedError):
            load(adata, on_progress=stop)
    else:
        load(adata)
    adata.X = adata.X * 2
    with pytest.raises(
        ParameterError, match=r"its cells cannot be identified; .* DROP SCHEMA .*\.h5ad"
    ) as raised:
        load(adata)
    assert "\n" not in str(raised.value)
    postgres_server.ask(f'DROP SCHEMA "{request.node.name}" CASCADE')
    done = load(adata)
    found = open_collection(done.url, storage_options=postgres_server.options)[:].X
    assert np.array_equal(found.toarray(), adata.X.toarray())


def test_obs_of_a_backed_object_is_in_memory(adata, load, tmp_path):
    adata.write_h5ad(tmp_path / "cells.h5ad")
    backed = ad.read_h5ad(tmp_path / "cells.h5ad", backed="r")
    load(backed)
    backed.obs["half"] = backed.obs["half"].to_numpy()[::-1]
    with pytest.raises(ParameterError, match="its cells cannot be identified"):
        load(backed)
    backed.file.close()


def test_files_in_a_folder(adata, load, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's own
        adata.write_zarr(tmp_path / "cells.zarr")
    assert load(tmp_path / "cells.zarr").n_parts_written == 1
    assert load(tmp_path / "cells.zarr").n_parts_written == 0
    data = zarr.open_array(tmp_path / "cells.zarr/X/data")
    data[:] = 2 * np.asarray(data[:])
    with pytest.raises(ParameterError, match=OTHER):
        load(tmp_path / "cells.zarr")


def test_a_condition_in_sql(adata, load, postgres_server):
    url = load(adata, "whole").url
    halves = [
        PostgresSource(url, where=where, storage_options=postgres_server.options)
        for where in ("half = 'l'", "half = 'r'")
    ]
    assert load(halves[0]).n_parts_written == 1
    assert load(halves[0]).n_parts_written == 0
    with pytest.raises(ParameterError, match=OTHER):
        load(halves[1])


def test_an_obs_query(adata, load, tmp_path):
    pytest.importorskip("tiledbsoma")
    from tests.loader.storages.somas import write_experiment  # noqa: PLC0415 - it imports an extra

    experiment = write_experiment(tmp_path / "experiment", adata)
    halves = [SomaSource(experiment, obs_query=f"half == '{half}'") for half in "lr"]
    assert load(halves[0]).n_parts_written == 1
    assert load(halves[0]).n_parts_written == 0
    with pytest.raises(ParameterError, match=OTHER):
        load(halves[1])


def test_rows_and_genes_in_another_order(load, tmp_path):
    datasets = pytest.importorskip("datasets")
    columns = {"genes": [[1, 2], [1], [2]], "expressions": [[3.0, 4.0], [5.0], [6.0]]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    load(HuggingFaceSource(saved.select([2, 0]), gene_ids=[1, 2]))
    assert load(HuggingFaceSource(saved.select([2, 0]), gene_ids=[1, 2])).n_parts_written == 0
    for rows, gene_ids in (([0, 2], [1, 2]), ([2, 0], [2, 1])):
        with pytest.raises(ParameterError, match=OTHER):
            load(HuggingFaceSource(saved.select(rows), gene_ids=gene_ids))
