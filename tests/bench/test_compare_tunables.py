"""Other loaders deliver what they say, and the command tunes those that are installed."""

import json

import anndata as ad
import numpy as np
import pytest
from bench import _harness as harness
from bench.compare import tunables
from bench.compare.tunables import AnnLoader, OfPlates, PlainDataLoader, ScDataset, TileDBSOMAML
from tests.loader.storages.soma.written import write_experiment

from cellfeed.synthetic import write_tahoe_like
from cellfeed_tuner import Configuration, measure

pytestmark = [pytest.mark.docs, pytest.mark.process]

N_CELLS, BATCH_SIZE = 640, 16


@pytest.fixture(scope="module")
def plates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    write_tahoe_like(folder, n_cells=N_CELLS, n_genes=40, n_plates=2)
    return sorted(folder.glob("*.h5ad"))


@pytest.fixture(scope="module")
def experiment(tmp_path_factory, plates):
    pytest.importorskip("tiledbsoma")
    adata = ad.concat([ad.read_h5ad(path) for path in plates], index_unique="-")
    folder = tmp_path_factory.mktemp("soma")
    return write_experiment(folder / "experiment", adata)


def loader_of(kind: type[OfPlates], plates, **settings) -> OfPlates:
    if missing := kind.missing():
        pytest.skip(f"{' and '.join(missing)} is not installed")
    return kind(plates, "plate", batch_size=BATCH_SIZE, **settings)


def delivered(loader, **settings):
    """How often each label comes in an epoch of whole minibatches."""
    labels = [
        np.asarray(loader.labels_of(each)["plate"])
        for each in loader.open(Configuration(**settings))
    ]
    assert {each.shape for each in labels} == {(BATCH_SIZE,)}
    return np.sort(np.unique(np.concatenate(labels), return_counts=True)[1]).tolist()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (PlainDataLoader, {}),
        (AnnLoader, {}),
        (ScDataset, {"block_size": 4, "fetch_factor": 4}),
    ],
)
def test_each_delivers_all_cells_with_their_labels(kind, settings, plates):
    loader = loader_of(kind, plates)
    counts = np.sort(np.bincount(loader.labels["plate"])).tolist()
    assert delivered(loader, **settings) == counts
    found = measure(loader, Configuration(**settings), seconds=0.1)
    assert found.failure == ""
    assert found.entropy_bits["plate"].value > 0


@pytest.mark.parametrize("settings", [(1, 1), (64, 2), (16, 8)])
def test_the_plan_of_scdataset_mixes_as_what_it_delivers(settings, plates):
    loader = loader_of(ScDataset, plates)
    configuration = Configuration(block_size=settings[0], fetch_factor=settings[1])
    planned = loader.planned_rows(configuration, 1000)
    assert planned is not None
    codes = loader.labels["plate"]
    came = [np.asarray(labels) for _, labels in loader.open(configuration)]
    values, counts = (found for found in np.unique(np.stack(came), return_counts=True))
    assert planned.shape == (len(came), BATCH_SIZE)
    assert values.size == codes.max() + 1
    assert sorted(counts) == sorted(np.bincount(codes[planned].ravel()))
    purity = [(each == each[0]).mean() for each in came]
    of_plan = [(each == each[0]).mean() for each in codes[planned]]
    assert np.mean(of_plan) == pytest.approx(np.mean(purity), abs=0.15)


def test_so_does_soma(plates, experiment):
    loader = loader_of(TileDBSOMAML, plates, store=experiment)
    counts = np.sort(np.bincount(loader.labels["plate"])).tolist()
    found = delivered(loader, block_size=16, fetch_factor=4)
    assert sum(found) <= N_CELLS
    assert found == pytest.approx(counts, abs=BATCH_SIZE)


def test_a_label_that_does_not_exist_is_one_line(plates, capsys):
    data = f"--data={plates[0].parent}"
    harness.main(tunables.cases, [data, "--label=nope", "--loaders=DataLoader"], **tunables.OPTIONS)
    told = capsys.readouterr().out
    assert told.startswith(f"DataLoader: {plates[0]}: has no obs column 'nope'; it has ")


@pytest.mark.usefixtures("short_replicates")
def test_the_command_has_a_row_for_each_loader_and_says_what_is_left_out(plates, capsys, tmp_path):
    out = tmp_path / "found.json"
    arguments = [
        *(f"--data={plates[0].parent}", "--batch=16", "--budget=600", f"--out={out}"),
        *("--entropy-floor=0.5", "--loaders=cellfeed,DataLoader,annbatch"),
    ]
    harness.main(tunables.cases, arguments, **tunables.OPTIONS)
    told = capsys.readouterr().out
    assert "annbatch is left out, " in told
    (table,) = json.loads(out.read_text())["tables"]
    assert sorted(table["ways"]) == ["DataLoader", "cellfeed"]
    for (figures,) in table["ways"].values():
        assert figures["low"] <= figures["cells/s"] <= figures["high"]
        assert figures["peak MB"] > 0
