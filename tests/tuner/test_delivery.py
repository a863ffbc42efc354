"""A wrong loader is never recommended: rows are compared with the plan, cells with the files."""

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
from tests.loader.sources.test_mudata import without_pulling
from tests.tuner.measured_here import measure_here
from tests.tuner.reports import html_report, html_summary

from cellfeed import (
    BlockShuffling,
    CategoricalColumn,
    CellDataset,
    EpochPlan,
    FormatError,
    ParameterError,
    open_collection,
)
from cellfeed.transforms import Log1p, NormalizeTotal
from cellfeed_tuner import AutotuneResult, Configuration, autotune, measure
from cellfeed_tuner._measuring._delivery import (
    compare_with_files,
    delivery_fault,
    planned_round,
    sampled_cells,
)
from cellfeed_tuner._measuring._measurement import measure_with
from cellfeed_tuner._measuring._process import MeasuringProcess
from cellfeed_tuner._measuring._timing import TimingRequest

HERE = Path(__file__).parent
SHARED = Path(__file__).parents[3] / "shared" / "data"
CONFIGURATION = Configuration(block_size=4, fetch_factor=4)
ONE: dict[str, Any] = {"block_sizes": [4], "fetch_factors": [4], "workers": [0]}
WRONG = {
    "AnotherOrder": "minibatch 0 of epoch 0 has cell",
    "OtherRows": "minibatch 0 of epoch 0 has cell",
    "AnotherEpoch": "minibatch 0 of epoch 0 has cell",
    "EndsEarly": "minibatch 5 of epoch 0 has 0 cells in place of 64",
    "ConstantLabel": "has plate p0 for cell",
    "LabelsOfAnotherFile": "minibatch 0 of epoch 0 has plate p",
    "ValuesOfAnotherRow": "read through h5py, has",
    "OneValueOff": "of gene '7' where",
    "ShiftedColumns": "read through h5py, has",
    "OfAnotherDtype": "minibatches have X of float64 where the files have float32",
    "NoLabels": "minibatch 0 of epoch 0 has plate for no cell: the column is absent",
    "RowsInAnotherOrder": "read through h5py, has",
    "FewerGenes": "has 49 genes in place of 50",
    "FewerRowsOfExpression": "has expression of 63 cells for 64",
    "ColumnsBeyondTheLast": "has values of genes beyond the 50 that there are",
    "wrong_labels_of_the_collection": "read through h5py, has p",
}
BROKEN = {
    "Hangs": "hung after 30 minibatches: no other came for",
    "Exits": "the process exited with status 3",
    "Leaves": "the process exited with status 4",
    "Crashes": "the process crashed (segmentation fault)",
    "HasAStaleHandle": "[Errno 116] Stale file handle: 'plates/plate0.h5ad'",
}


@pytest.fixture
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


class TestPlan:
    """Every row is compared, and each way to fail is told."""

    @staticmethod
    def plan_of(configuration, **changes):
        sizes: dict[str, Any] = {"n_rows": 4500, "batch_size": 32, "seed": 0, "epoch": 5}
        return EpochPlan(
            strategy=BlockShuffling(configuration.block_size),
            fetch_factor=configuration.fetch_factor,
            **sizes | changes,
        )

    @staticmethod
    def planned(configuration, n_rounds, plan):
        """All minibatches of so many rounds, over as many epochs as that takes."""
        per_epoch = configuration.rounds_per_epoch(plan)
        rounds = list[Any]()
        for number in range(n_rounds):
            of_epoch = replace(plan, epoch=plan.epoch + number // per_epoch)
            rounds.append(planned_round(of_epoch, configuration, number % per_epoch))
        return list(np.concatenate(rounds))

    @pytest.mark.parametrize(
        "workers", [0, *(pytest.param(n, marks=pytest.mark.process) for n in (1, 2))]
    )
    def test_the_order_is_that_of_a_loader_with_workers(self, collection, workers):
        configuration = Configuration(block_size=16, fetch_factor=4, num_workers=workers)
        dataset = CellDataset(collection, BlockShuffling(16), 32, 4, seed=0)
        dataset.set_epoch(5)
        plan = dataset.plan(epoch=5)
        n = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
        came = [minibatch.rows.numpy() for minibatch in dataset.loader(workers)][:n]
        assert len(came) == n
        assert delivery_fault(came, configuration, plan) == ""

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("block_size", [1, 16, 300])
    def test_what_is_planned_is_no_fault_over_several_epochs(self, workers, block_size):
        configuration = Configuration(block_size=block_size, fetch_factor=16, num_workers=workers)
        plan = self.plan_of(configuration)
        n_rounds = 3 * configuration.rounds_per_epoch(plan)
        came = self.planned(configuration, n_rounds, plan)
        assert delivery_fault(came, configuration, plan) == ""
        for other in ({"seed": 1}, {"epoch": 6}):
            another = self.planned(configuration, 2, self.plan_of(configuration, **other))
            assert delivery_fault(another, configuration, plan) != ""

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            (lambda a, b: [b, a], "has cell"),
            (
                lambda a, b: [np.where(np.arange(32) == 3, 4444, a), b],
                "has cell 4444 where the plan",
            ),
            (lambda a, b: [a[:-1], b], "has 31 cells in place of 32"),
            (lambda a, _: [a[:0]], "has 0 cells in place of 32"),
        ],
    )
    @pytest.mark.parametrize("workers", [0, 2])
    def test_anything_else_is_told_with_its_place(self, change, said, workers):
        configuration = Configuration(block_size=16, fetch_factor=16, num_workers=workers)
        plan = self.plan_of(configuration)
        came = self.planned(configuration, 6 if workers else 12, plan)
        changed = change(*came[70:72])
        came[70:] = [*changed, *came[72:]] if len(changed) > 1 else changed
        found = delivery_fault(came, configuration, plan)
        per_epoch = configuration.rounds_per_epoch(plan) * configuration.minibatches_per_round
        epochs, minibatch = divmod(70, per_epoch)
        assert found.startswith(f"minibatch {minibatch} of epoch {5 + epochs} ")
        assert said in found


@pytest.fixture
def wrong_loaders(monkeypatch):
    """The module of wrong loaders, which the measuring process finds too."""
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("wrong_loaders")


@pytest.fixture
def command(small_collection, tmp_path, monkeypatch, wrong_loaders):
    """Run the command with a wrong loader; what it prints, as if on one line."""
    tune = importlib.import_module("cellfeed_tuner._autotune").tuned

    def run(name):
        def tuned(*arguments, **settings):
            return tune(*arguments, make_dataset=getattr(wrong_loaders, name), **settings)

        monkeypatch.setattr("cellfeed_tuner._autotune.tuned", tuned)
        grid = ["--block-sizes", "4", "--fetch-factors", "4", "--workers", "0", "--budget", "600"]
        arguments = [small_collection, "--label", "plate", "--output", tmp_path, *grid]
        ran = commands.autotune(*arguments, "--entropy-floor", "0")
        assert ran.exit_code == 1, ran.output
        return " ".join(ran.stdout.split())

    return run


class TestHere:
    @pytest.fixture(autouse=True)
    def here(self, monkeypatch):
        measure_here(monkeypatch)

    @pytest.mark.parametrize("name", WRONG)
    def test_a_measurement_says_what_is_wrong(self, name, collection, wrong_loaders):
        loader = getattr(wrong_loaders, name)
        found = measure(collection, CONFIGURATION, label="plate", seconds=0.01, make_dataset=loader)
        assert WRONG[name] in found.delivery_fault

    def test_entropy_is_that_of_the_labels_that_came(self, collection, wrong_loaders):
        loader, labels = wrong_loaders.ConstantLabel, ["plate", "cell_type"]
        found = measure(collection, CONFIGURATION, label=labels, seconds=0.01, make_dataset=loader)
        assert found.entropy_bits["plate"].value == 0.0
        assert found.entropy_bits["cell_type"].value > 1.0

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["OtherRows", "OneValueOff"])
    def test_nothing_is_recommended_and_kept(
        self, name, command, collection, tmp_path, cache_folder
    ):
        """Neither where rows differ from the plan, nor where values differ from the files."""
        said, path = command(name), tmp_path / "autotune.json"
        result = AutotuneResult.load(path)
        assert (result.recommended, result.nearest) == (None, None)
        fault, (verdict, *_) = result.loader_fault, result.configurations[0].verdicts
        assert fault is not None
        assert json.loads(path.read_text())["loader_fault"] == fault
        assert fault.startswith(str(CONFIGURATION))
        assert WRONG[name] in fault
        assert verdict.kind == "loader"
        assert said.startswith("THE LOADER DELIVERS WRONG DATA")
        assert " ".join(fault.split()) in said
        assert "from_autotune" not in said
        with pytest.raises(FormatError, match="recommend"):
            CellDataset.from_autotune(collection, path)
        assert not list(cache_folder.rglob("*.journal"))

    def test_other_parameters_of_the_dataset_are_no_fault(self, collection):
        dense = partial(CellDataset, dense=True, dtype="float64")
        found = autotune(
            collection, label="plate", budget=600.0, entropy_floor=0.0, make_dataset=dense, **ONE
        )
        assert found.loader_fault is None
        assert found.recommended is not None
        assert found.n_cells_compared > 0
        normalized = partial(CellDataset, transform=[NormalizeTotal(), Log1p()])
        one = measure(
            collection, CONFIGURATION, label="plate", seconds=0.01, make_dataset=normalized
        )
        assert (one.status, one.delivery_fault) == ("timed", "")


@pytest.mark.process
class TestBroken:
    @pytest.fixture
    def process(self, collection, wrong_loaders):
        with MeasuringProcess(collection) as process:
            process.start()
            yield process

    @pytest.mark.parametrize("name", BROKEN)
    def test_what_breaks_is_named(self, name, process, wrong_loaders):
        request = TimingRequest(
            configuration=CONFIGURATION, batch_size=64, labels=(), cache="warm", seed=0,
            least_rounds=60, make_dataset=getattr(wrong_loaders, name),
        )  # fmt: skip
        found = measure_with(process, request, limit_seconds=8.0 if name == "Hangs" else 600.0)
        assert BROKEN[name] in found.failure

    def test_the_report_says_so(self, command):
        said = command("Exits")
        assert BROKEN["Exits"] in said
        for wrong in ("want of memory", "A larger --budget", "slower than the best", " but ."):
            assert wrong not in said


def test_the_page_and_a_notebook_say_so_first(result_of):
    result = result_of("wrong loader")
    page = html_report(result, code="CellDataset.from_autotune")
    _, first = page.split("<h2>Recommendation</h2>")
    assert first.strip().startswith('<p class="choice alarm">THE LOADER DELIVERS WRONG DATA')
    assert f'<p class="alarm">{result.loader_fault}' in first
    notebook = html_summary(result)
    assert notebook.startswith("<div>\n<p><strong>THE LOADER DELIVERS WRONG DATA")
    assert result.loader_fault in notebook
    assert "from_autotune" not in page + notebook
    assert "delivers wrong data" in repr(result)
    assert result.loader_fault in repr(result)
    with pytest.raises(ParameterError, match="delivers wrong data cannot be recommended"):
        replace(result_of("recommended"), loader_fault=result.loader_fault)


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


def stored(kind, folder):
    """Write a collection of a kind, and open it."""
    rng, obs = np.random.default_rng(0), list[Any](OBS)
    matrix = rng.integers(-300, 300, (120, 30)) * (rng.random((120, 30)) < 0.3)
    adata = ad.AnnData(sp.csr_matrix(matrix.astype(np.float32)), obs=OBS)
    if kind == "modality":
        with without_pulling():
            rna = ad.AnnData(adata.X[::-1], obs=OBS[[]].iloc[::-1])
            mdata = mu.MuData({"all": ad.AnnData(obs=OBS[[]]), "rna": rna})
            mdata.obs = OBS
            mdata.write_h5mu(folder / "cells.h5mu")
        return open_collection(folder, elements=["mod/rna/X"], obs=obs)
    adata.raw = ad.AnnData(sp.csr_matrix(np.arange(120 * 40).reshape(120, 40).astype(np.int16)))
    adata.layers["dense"] = rng.random((120, 30))
    adata.layers["halves"] = rng.random((120, 30)).astype(np.float16)
    adata.layers["integers"] = sp.csr_matrix(rng.poisson(1.0, (120, 30)).astype(np.uint8))
    adata.obsm["images"] = rng.integers(0, 99, (120, 4, 4, 3)).astype(np.uint8)
    if kind.startswith("zarr"):
        with ad.settings.override(zarr_write_format=int(kind[-1])):
            adata.write_zarr(folder / "cells.zarr")
        return open_collection(folder / "cells.zarr", obs=obs)
    for name in ("one", "two"):
        adata.write_h5ad(folder / f"{name}.h5ad", compression="gzip")
    if kind == "some genes":
        return open_collection(folder, genes=[str(k) for k in range(29, 2, -1)], obs=obs)
    return open_collection(folder, elements=[kind], obs=obs)


@pytest.mark.parametrize(
    "kind",
    [
        "X",
        "raw/X",
        "some genes",
        "layers/dense",
        "layers/halves",
        "layers/integers",
        "obsm/images",
        "modality",
        pytest.param("zarr of version 2", marks=pytest.mark.slow),
        pytest.param("zarr of version 3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of anndata and zarr, which write
def test_what_is_right_is_found_so_in_all_formats(kind, tmp_path):
    collection = stored(kind, tmp_path)
    for dtype in (None, "float64", "int16"):
        compare_all(collection, dtype)


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
