"""Matrices to write, and what is delivered to compare with them."""

from collections.abc import Iterable
from typing import Any

import anndata as ad
import h5py
import numpy as np
import scipy.sparse as sp


def random_csr(shape: tuple[int, int], density: float, rng: np.random.Generator, dtype: Any) -> Any:
    nonzero = rng.random(shape) < density
    return sp.csr_array(np.where(nonzero, rng.random(shape), 0).astype(dtype))


def replace(file: h5py.File, name: str, values: Any, **options: Any) -> None:
    """Write an element of a file anew, with its attributes as they were."""
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, data=values, **options)
    file[name].attrs.update(attributes)


def adata_of(case: Any) -> ad.AnnData:
    """A `StoredCase`, its matrix where its element is."""
    adata = ad.AnnData(case.matrix if case.element == "X" else None, obs=case.obs, var=case.var)
    if case.element == "layers/counts":
        adata.layers["counts"] = case.matrix
    if case.element == "raw/X":
        adata.raw = ad.AnnData(case.matrix, obs=case.obs, var=case.var)
    return adata


def dense(values: Any) -> np.ndarray:
    """What a tensor, a sparse matrix or an array holds."""
    for convert in ("to_dense", "toarray"):
        values = getattr(values, convert, lambda same=values: same)()
    return np.asarray(values)


def rows_of(minibatches: Iterable[Any], expected: np.ndarray) -> list[int]:
    """The rows of some minibatches, whose values are compared with those of a dense matrix."""
    found = list[int]()
    for minibatch in minibatches:
        rows = np.asarray(minibatch.rows)
        assert np.array_equal(dense(minibatch.X), expected[rows])
        found += rows.tolist()
    return found
