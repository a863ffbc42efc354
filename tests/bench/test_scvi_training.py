"""Each loader that is here trains the default SCVI, and is measured."""

import importlib
import importlib.util
from typing import Any

import pytest

pytest.importorskip("scvi", reason="scvi-tools is not installed: cellfeed[scvi]")
compare: Any = importlib.import_module("bench.scvi.compare")
training: Any = importlib.import_module("bench.scvi.training")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.docs, pytest.mark.slow]


@pytest.fixture(scope="module")
def plates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scvi") / "plates"
    training.write(folder, 300, 50)
    return folder


@pytest.mark.parametrize("entry", compare.ENTRIES)
def test_an_epoch(plates, tmp_path, entry):
    if entry == "annbatch":
        if importlib.util.find_spec("annbatch") is None:
            pytest.skip("annbatch is not installed")
        training.build(plates, tmp_path / "store.zarr")
    found = training.train(entry, plates, tmp_path / "store.zarr")
    assert found["cells/s"] > 0
    assert 0 < found["% between steps"] < 100
