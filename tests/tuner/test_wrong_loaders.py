"""A loader that is wrong is never recommended, however it is wrong."""

import importlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anndata as ad
import mudata as mu
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.storages.test_mudata import without_pulling
from tests.tuner.reports import html_report, html_summary

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellDataset,
    FormatError,
    ParameterError,
    open_collection,
)
from cellfeed.transforms import Log1p, NormalizeTotal
from cellfeed_tuner import AutotuneResult, Configuration, _autotune, autotune, measure
from cellfeed_tuner._measuring._delivery import compare_with_files, sampled_cells

pytestmark = pytest.mark.usefixtures("short_replicates")

HERE = Path(__file__).parent
SHARED = Path(__file__).parents[3] / "shared" / "data"
CONFIGURATION = Configuration(block_size=4, fetch_factor=4)
WRONG = {
    "AnotherOrder": "minibatch 0 of epoch 0 has cell",
    "OtherRows": "minibatch 0 of epoch 0 has cell",
    "ConstantLabel": "has plate p0 for cell",
    "LabelsOfAnotherFile": "minibatch 0 of epoch 0 has plate p",
    "ValuesOfAnotherRow": "read through h5py, has",
    "OneValueOff": "of gene '7' where",
    "ShiftedColumns": "read through h5py, has",
    "OfAnotherDtype": "minibatches have X of float64 where the files have float32",
}
BROKEN = {
    "Hangs": "hung after 30 minibatches: no other came for",
    "Exits": "the process exited with status 3",
    "Leaves": "the process exited with status 4",
    "Crashes": "the process crashed (segmentation fault)",
    "HasAStaleHandle": "[Errno 116] Stale file handle: 'plates/plate0.h5ad'",
}
ALSO_WRONG = {
    "NoLabels": "minibatch 0 of epoch 0 has plate for no cell: the column is absent",
    "RowsInAnotherOrder": "read through h5py, has",
    "FewerGenes": "has 49 genes in place of 50",
    "FewerRowsOfExpression": "has expression of 63 cells for 64",
    "ColumnsBeyondTheLast": "has values of genes beyond the 50 that there are",
    "wrong_labels_of_the_collection": "read through h5py, has p",
}


@pytest.fixture
def wrong_loaders(monkeypatch):
    """The module of wrong loaders, which the measuring process finds too."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("wrong_loaders")


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_recommended(name, small_collection, tmp_path, monkeypatch, wrong_loaders):
    results = list[AutotuneResult]()

    tune = _autotune.tuned

    def tuned(*arguments, **settings):
        loader = getattr(wrong_loaders, name)
        results.append(tune(*arguments, make_dataset=loader, **settings))
        return results[0]

    monkeypatch.setattr(_autotune, "tuned", tuned)
    grid = ["--block-sizes", "4", "--fetch-factors", "4", "--workers", "0", "--budget", "600"]
    arguments = [str(small_collection), "--label", "plate", "--output", str(tmp_path), *grid]
    printed = commands.autotune(*arguments, "--entropy-floor", "0")

    assert printed.exit_code == 1, printed.output
    (result,) = results
    assert result.recommended is None
    assert result.nearest is None
    fault, verdict = result.loader_fault, result.configurations[0].verdict
    assert fault is not None
    assert fault.startswith(str(CONFIGURATION))
    assert WRONG[name] in fault
    assert verdict is not None
    assert verdict.kind == "loader"

    said = " ".join(printed.stdout.split())
    assert said.startswith("THE LOADER DELIVERS WRONG DATA")
    assert " ".join(fault.split()) in said
    assert "from_autotune" not in printed.stdout
    saved = json.loads((tmp_path / "autotune.json").read_text())
    assert saved["recommended"] is None
    assert saved["loader_fault"] == result.loader_fault
    with pytest.raises(FormatError, match="recommend"):
        CellDataset.from_autotune(open_collection(small_collection), tmp_path / "autotune.json")


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_is_named(name, small_collection, tmp_path, monkeypatch, wrong_loaders):
    tune = _autotune.tuned

    def tuned(*arguments, **settings):
        return tune(*arguments, make_dataset=getattr(wrong_loaders, name), **settings)

    monkeypatch.setattr(_autotune, "tuned", tuned)
    grid = ["--block-sizes", "4", "--fetch-factors", "4", "--workers", "0", "--budget", "600"]
    arguments = [str(small_collection), "--label", "plate", "--output", str(tmp_path), *grid]
    printed = commands.autotune(*arguments, "--entropy-floor", "0")
    assert printed.exit_code == 1, printed.output
    said = " ".join(printed.stdout.split())
    assert BROKEN[name] in said
    assert "want of memory" not in said
    assert "A larger --budget" not in said
    assert "slower than the best" not in said
    assert " but ." not in said


def test_the_page_and_a_notebook_say_so_first(result_of):
    result = result_of("wrong loader")
    page = html_report(result, code="CellDataset.from_autotune")
    assert "from_autotune" not in page
    _, first = page.split("<h2>Recommendation</h2>")
    assert first.strip().startswith('<p class="choice alarm">THE LOADER DELIVERS WRONG DATA')
    assert f'<p class="alarm">{result.loader_fault}' in first
    notebook = html_summary(result)
    assert notebook.startswith("<div>\n<p><strong>THE LOADER DELIVERS WRONG DATA")
    assert result.loader_fault in notebook
    assert "from_autotune" not in notebook
    assert "wrong data delivered" in repr(result)
    assert result.loader_fault in repr(result)


def test_a_wrong_loader_and_a_choice_exclude_each_other(result_of):
    wrong, right = result_of("wrong loader"), result_of("recommended")
    with pytest.raises(ParameterError, match="delivers wrong data cannot be recommended"):
        replace(right, loader_fault=wrong.loader_fault)


def test_nothing_of_a_wrong_loader_is_kept_for_later_runs(
    small_collection, wrong_loaders, cache_folder
):
    collection = open_collection(small_collection, obs=["plate"])
    settings: dict[str, Any] = {"block_sizes": [4], "fetch_factors": [4], "workers": [0]}
    loader = wrong_loaders.OneValueOff
    autotune(collection, label="plate", budget=600.0, make_dataset=loader, **settings)
    assert not [each for each in cache_folder.rglob("*") if "tables" not in each.parts]


@pytest.mark.parametrize("name", ALSO_WRONG)
def test_a_measurement_says_what_is_wrong(name, small_collection, wrong_loaders):
    collection = open_collection(small_collection, obs=["plate"])
    loader = getattr(wrong_loaders, name)
    found = measure(collection, CONFIGURATION, label="plate", seconds=0.1, make_dataset=loader)
    assert ALSO_WRONG[name] in found.delivery_fault


def test_entropy_is_that_of_the_labels_that_came(small_collection, wrong_loaders):
    collection = open_collection(small_collection, obs=["plate", "cell_type"])
    found = measure(
        collection, CONFIGURATION, label=["plate", "cell_type"], seconds=0.1,
        make_dataset=wrong_loaders.ConstantLabel,
    )  # fmt: skip
    assert found.entropy_bits["plate"].value == 0.0
    assert found.entropy_bits["cell_type"].value > 1.0
    assert "has plate p0 for cell" in found.delivery_fault


def test_other_parameters_of_the_dataset_are_no_fault(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    found = autotune(
        collection, label="plate", block_sizes=[4], fetch_factors=[4], workers=[0], budget=600.0,
        entropy_floor=0.0, make_dataset=partial(CellDataset, dense=True, dtype="float64"),
    )  # fmt: skip
    assert found.loader_fault is None
    assert found.recommended is not None
    assert found.n_cells_compared > 0


def test_transformed_values_are_no_fault(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    normalized = partial(CellDataset, transform=[NormalizeTotal(), Log1p()])
    found = measure(collection, CONFIGURATION, label="plate", seconds=0.1, make_dataset=normalized)
    assert (found.status, found.delivery_fault) == ("measured", "")


OBS = pd.DataFrame(
    {
        "plate": pd.Categorical(["a", "b", None, "a", "c", "b"] * 20),
        "text": ["x", "y", "z", "x", "x", "y"] * 20,
        "flag": [True, False, True, True, False, False] * 20,
        "number": [0.5, np.nan, 2.0, 3.0, -1.0, 0.5] * 20,
        "count": pd.array([1, 2, None, 4, 5, 6] * 20, dtype="Int64"),
        "maybe": pd.array([True, None, False, True, None, False] * 20, dtype="boolean"),
    },
    index=[f"cell{number}" for number in range(120)],
)
COLUMNS = ["plate", "text", "flag", "number", "count", "maybe"]
RNG = np.random.default_rng(0)


def stored(kind, folder):
    """Write a collection of a kind; return what opens it."""
    counts = RNG.integers(-300, 300, (120, 30)) * (RNG.random((120, 30)) < 0.3)
    adata = ad.AnnData(sp.csr_matrix(counts.astype(np.float32)), obs=OBS)
    adata.raw = ad.AnnData(sp.csr_matrix(np.arange(120 * 40).reshape(120, 40).astype(np.int16)))
    adata.layers["dense"] = RNG.random((120, 30))
    adata.layers["halves"] = RNG.random((120, 30)).astype(np.float16)
    adata.layers["integers"] = sp.csr_matrix(RNG.poisson(1.0, (120, 30)).astype(np.uint8))
    if kind == "modality":
        with without_pulling():
            rna = ad.AnnData(adata.X[::-1], obs=pd.DataFrame({"half": [0.5, 1, 2] * 40}))
            rna.obs_names = OBS.index[::-1]
            mdata = mu.MuData({"all": ad.AnnData(obs=OBS[[]]), "rna": rna})
            mdata.obs = OBS
            mdata.write_h5mu(folder / "cells.h5mu")
        return {"paths": folder, "elements": ["mod/rna/X"]}
    adata.obsm["images"] = RNG.integers(0, 99, (120, 4, 4, 3)).astype(np.uint8)
    adata.obsm["frame"] = pd.DataFrame({"a": RNG.random(120), "b": OBS["count"]}, index=OBS.index)
    if kind.startswith("zarr"):
        with ad.settings.override(zarr_write_format=int(kind[-1])):
            adata.write_zarr(folder / "cells.zarr")
        return {"paths": folder / "cells.zarr"}
    for name in ("one", "two"):
        adata.write_h5ad(folder / f"{name}.h5ad", compression="gzip")
    if kind == "some genes":
        return {"paths": folder, "genes": [str(k) for k in range(29, 2, -1)]}
    names = {"raw": "raw/X", "X": "X", "images": "obsm/images", "frame": "obsm/frame"}
    options = {"elements": [names.get(kind, f"layers/{kind}")]}
    return {"paths": folder, **options}


@pytest.mark.parametrize(
    "kind",
    [
        "X",
        "raw",
        "some genes",
        "dense",
        "halves",
        "integers",
        "images",
        "frame",
        "modality",
        "zarr of version 2",
        "zarr of version 3",
    ],
)
@pytest.mark.parametrize("dtype", [None, "float64", "int16"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # of anndata and zarr, which write
def test_what_is_right_is_found_so_in_all_formats(kind, dtype, tmp_path):
    obs = [*COLUMNS, "rna:half"] if kind == "modality" else COLUMNS
    compare_all(open_collection(**stored(kind, tmp_path), obs=obs), dtype)


def compare_all(collection, dtype=None):
    """Compare a minibatch with the files, and the same with each thing wrong in turn."""
    dataset = CellDataset(collection, BlockShuffling(4), 16, 2, seed=0, dtype=dtype)
    minibatch = next(iter(dataset))
    cells = sampled_cells(minibatch, list(collection.obs), seed=0)
    assert sorted(cell.row for cell in cells) == sorted(minibatch.rows.tolist())
    found = compare_with_files(collection, {CONFIGURATION: cells}, most_seconds=60)
    assert (found.n_cells, dict(found.faults)) == (16, {})
    cell = cells[3]
    expression = np.array(cell.values)
    expression[expression.size // 2] += 1
    wrong = [replace(cell, values=expression), replace(cell, row=cell.row ^ 1)]
    wrong += [
        replace(cell, labels={name: other(column, cell.labels[name])})
        for name, column in collection.obs.items()
    ]
    for each in wrong:
        found = compare_with_files(collection, {CONFIGURATION: [each]})
        assert found.faults[CONFIGURATION].startswith(f"cell {each.row} has "), each


def other(column, value):
    """Another label than a minibatch has."""
    if isinstance(column, CategoricalColumn):
        return (value + 2) % (len(column.categories) + 1) - 1
    return 0.25 if np.isnan(value) else np.nan


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not beside this clone")
@pytest.mark.parametrize("name", ["scgen_valid.h5ad", "pbmc68k_reduced.h5ad"])
@pytest.mark.filterwarnings("ignore")  # of anndata, that files are old
def test_files_of_any_age_are_read_once_more(name):
    columns = ad.read_h5ad(SHARED / name, backed="r").obs_keys()
    compare_all(open_collection(SHARED / name, obs=columns))
