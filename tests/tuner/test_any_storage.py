"""What is registered is tuned, too: cells at a URL, of which there is no file on this machine.

So are files of 10x Genomics, by their libraries.
"""

import json
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.storages.arriving import Arriving, Rows
from tests.loader.storages.tenx import barcodes, counts, features, write_tenx

from cellfeed.sources import Storage, register

pytestmark = pytest.mark.usefixtures("short_replicates")


def open_cells(location, elements):
    counts = np.random.default_rng(0).poisson(0.3, (2000, 30)).astype(np.float32)
    obs = pd.DataFrame({"plate": np.repeat(["a", "b", "c", "d"], 500)})
    return [Arriving(location, {"X": Rows(sp.csr_array(counts), range(30))}, obs)]


def test_a_url(tmp_path, monkeypatch):
    # So that the measuring process finds the source, as it does one that is installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    register(Storage(name="tuned", open=open_cells, schemes=("test-tuned",)))
    arguments = ["test-tuned://host/cells", "--label", "plate", "--output", str(tmp_path)]
    arguments += ["--block-sizes", "4,16", "--fetch-factors", "2", "--workers", "0"]
    ran = commands.autotune(*arguments, "--budget", "600", "--entropy-floor", "0.5")
    assert ran.exit_code == 0, ran.output
    assert "open_collection('test-tuned://host/cells', obs=['plate'])" in ran.stdout
    result = json.loads((tmp_path / "autotune.json").read_text())
    assert result["dataset"]["paths"] == ["test-tuned://host/cells"]
    assert result["machine"]["storage"] == []
    assert result["cache"] == "unknown"
    assert result["recommended"] is not None


def test_the_output_of_cell_ranger(tmp_path):
    paths = []
    for k, library in enumerate(["control", "treated"]):
        path = tmp_path / f"{library}.h5"
        X = counts(900, 60, k)
        write_tenx(path, X, barcodes=barcodes(900), features=features(60), libraries=[library])
        paths.append(str(path))
    arguments = [*paths, "--label", "library", "--output", str(tmp_path / "tuned")]
    arguments += ["--block-sizes", "4,16", "--fetch-factors", "2", "--workers", "0"]
    ran = commands.autotune(*arguments, "--budget", "600", "--entropy-floor", "0.5")
    assert ran.exit_code == 0, ran.output
    assert "obs=['library']" in ran.stdout
    result = json.loads((tmp_path / "tuned" / "autotune.json").read_text())
    assert result["dataset"]["paths"] == paths
    assert result["recommended"] is not None
