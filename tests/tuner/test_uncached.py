"""Files that leave nothing in the page cache are measured so, and told from others."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tuner.conftest import RECOMMENDED
from tests.tuner.reports import code_to_paste, in_words

from cellfeed import ParameterError, open_collection
from cellfeed.synthetic import write_tahoe_like
from cellfeed_tuner import Configuration, measure
from cellfeed_tuner._recall import data_fingerprint

CONFIGURATION = Configuration(block_size=4, fetch_factor=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plates")
    write_tahoe_like(folder, n_cells=2000, n_genes=500, n_plates=2, n_drugs=4)
    return folder


def opened(folder, *, uncached=True):
    return open_collection(folder, obs=["plate"], uncached=uncached)


def test_is_measured_cold(folder):
    collection = opened(folder)
    measured = measure(collection, CONFIGURATION, batch_size=16, label="plate", seconds=0.1)
    assert measured.cache in ("cold", "unknown")
    assert measured.cells_per_second is not None
    assert not measured.delivery_fault


def test_is_not_measured_warm(folder):
    with pytest.raises(ParameterError, match=r"cache='warm', but .* is opened `uncached`;"):
        measure(opened(folder), CONFIGURATION, batch_size=16, cache="warm", seconds=0.1)


def test_is_not_taken_for_what_was_measured_with_buffered_reads(folder):
    codes = np.zeros(2000, np.int64)
    direct, buffered = (
        data_fingerprint(opened(folder, uncached=uncached), codes) for uncached in (True, False)
    )
    assert direct != buffered
    assert data_fingerprint(opened(folder), codes) == direct


def test_is_said_and_opened_so_again():
    result = replace(RECOMMENDED, dataset=replace(RECOMMENDED.dataset, uncached=True))
    assert ", uncached=True)" in code_to_paste(result, Path("autotune.json"))
    layer = replace(RECOMMENDED, dataset=replace(RECOMMENDED.dataset, elements=("layers/counts",)))
    assert ", elements=['layers/counts'])" in code_to_paste(layer, Path("autotune.json"))
    said = in_words("cache", replace(result, cache="cold"))
    assert said == ["uncached: pages are dropped as they are read"]
