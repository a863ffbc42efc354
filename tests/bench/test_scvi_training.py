"""Each loader that is here trains the default SCVI, and is measured."""

import importlib
import importlib.util
from typing import Any

import pytest

from cellfeed.synthetic import write_tahoe_like

pytest.importorskip("scvi", reason="scvi-tools is not installed: cellfeed[scvi]")
training: Any = importlib.import_module("bench.compare.scvi")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.docs, pytest.mark.slow]


@pytest.fixture(scope="module")
def plates(tmp_path_factory):
    paths = write_tahoe_like(tmp_path_factory.mktemp("scvi"), n_cells=300, n_genes=50)
    training.add_layer(0, paths)
    return paths


@pytest.mark.parametrize("entry", training.ENTRIES)
def test_an_epoch(plates, tmp_path, entry):
    store = tmp_path / "store.zarr"
    if entry == "annbatch":
        if importlib.util.find_spec("annbatch") is None:
            pytest.skip("annbatch is not installed")
        assert training.build(0, plates, store)["MB on disk"] > 0
    found = training.train(0, entry, plates, store)
    assert found["cells/s"] > 0
    assert 0 < found["% between steps"] < 100
