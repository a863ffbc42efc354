"""SOMA experiments made of AnnData."""

import warnings
from pathlib import Path

import pytest
import scipy.sparse as sp


def write_experiment(path: Path, adata, measurement="RNA", **options):
    """Write an experiment as tiledbsoma makes one of AnnData."""
    soma = pytest.importorskip("tiledbsoma")
    io = pytest.importorskip("tiledbsoma.io")
    kind = soma.SparseNDArray if sp.issparse(adata.X) else soma.DenseNDArray
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of AnnData's and tiledbsoma's own
        io.from_anndata(str(path), adata, measurement_name=measurement, X_kind=kind, **options)
    return path
