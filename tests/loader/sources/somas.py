"""SOMA experiments made of AnnData."""

import warnings
from pathlib import Path

import pytest


def write_experiment(path: Path, adata, measurement="RNA"):
    """Write an experiment as tiledbsoma makes one of AnnData."""
    io = pytest.importorskip("tiledbsoma.io")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's and tiledbsoma's own
        io.from_anndata(str(path), adata, measurement_name=measurement)
    return path
