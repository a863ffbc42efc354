"""Matrices of 10x Genomics, written with h5py as Cell Ranger writes them."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import scipy.sparse as sp

GZIP = {"compression": "gzip", "shuffle": True}


def text(given: Iterable[str]) -> Any:
    """Return text of fixed length, or of variable length if it is not ASCII."""
    values = [*given]
    if all(each.isascii() for each in values):
        return np.array([each.encode() for each in values], "S" if values else "S1")
    return np.array(values, h5py.string_dtype())


def write_tenx(
    path: Path,
    X: Any,
    *,
    barcodes: Sequence[str],
    features: pd.DataFrame,
    libraries: Sequence[str] = (),
    chunk: int = 1000,
    options: Mapping[str, Any] = GZIP,
) -> Path:
    """Write a matrix.

    Parameters
    ----------
    X
        Cells by features, `scipy.sparse.csr_array`; its arrays are written as they are.
    features
        Indexed by name, with the columns of scanpy's var: ``gene_ids``, ``feature_types``,
        ``genome`` and any others.
    libraries
        Names of libraries, by GEM well.
    options
        Filters of the arrays of the matrix.
    """
    with h5py.File(path, "a") as file:
        group = file.create_group("matrix")
        if libraries:
            file.attrs["library_ids"] = text(libraries)
        group["barcodes"] = text(barcodes)
        group["shape"] = np.array(X.shape[::-1], np.int32)
        for name in ("data", "indices", "indptr"):
            values = getattr(X, name)
            chunks = {"chunks": (chunk,), "maxshape": (None,)}
            group.create_dataset(name, data=values, **chunks, **options)
        tables = group.create_group("features")
        tables["name"] = text(features.index)
        tables["_all_tag_keys"] = text(["genome"])
        for column, values in features.items():
            own = {"gene_ids": "id", "feature_types": "feature_type"}.get(str(column), str(column))
            tables[own] = text(values)
    return path


def features(n_genes: int, n_antibodies: int = 0, genome: str = "GRCh38") -> pd.DataFrame:
    """Return genes, two with the same name, and antibodies after them."""
    names = [f"gene {k}" for k in range(n_genes)]
    if n_genes > 1:
        names[-1] = names[0]
    proteins = [f"CD{k}" for k in range(n_antibodies)]
    return pd.DataFrame(
        {
            "gene_ids": [*(f"ENSG{k:08}" for k in range(n_genes)), *proteins],
            "feature_types": ["Gene Expression"] * n_genes + ["Antibody Capture"] * n_antibodies,
            "genome": [genome] * n_genes + [""] * n_antibodies,
            "pattern": [""] * n_genes + ["5P(BC)"] * n_antibodies,
        },
        index=names + proteins,
    )


def counts(n_cells: int, n_features: int, seed: int = 0, density: float = 0.2) -> Any:
    """Return counts, int32 with int64 indices, as Cell Ranger writes them."""
    random = np.random.default_rng(seed)
    dense = random.poisson(density, (n_cells, n_features)).astype(np.int32)
    X = sp.csr_array(dense)
    X.indices, X.indptr = X.indices.astype(np.int64), X.indptr.astype(np.int64)
    return X


def barcodes(n: int, well: int = 1, seed: int = 0) -> list[str]:
    """Return distinct barcodes, in the order in which Cell Ranger writes them."""
    random = np.random.default_rng(seed)
    numbers = np.sort(random.choice(4**8, n, replace=False))
    bases = np.array(list("ACGT"))
    digits = numbers[:, None] // 4 ** np.arange(8)[::-1] % 4
    return [f"{''.join(each)}-{well}" for each in bases[digits].tolist()]
