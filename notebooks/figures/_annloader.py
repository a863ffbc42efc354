"""anndata's own AnnLoader, to compare throughputs with.

`bench/peers` opens it in its own job, whose memory is AnnLoader's and not this package's.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection

from cellfeed import Collection
from cellfeed_tuner import Configuration, Measurement, Tunable, measure
from cellfeed_tuner._measuring._page_cache import CacheState

__all__ = ["measure_annloader", "open_annloader"]


def measure_annloader(
    collection: Collection,
    *,
    shuffle: bool = True,
    batch_size: int = 64,
    cache: CacheState = "cold",
    seconds: float = 5.0,
    seed: int = 0,
) -> Measurement:
    """Measure the throughput of anndata's AnnLoader, over backed files, in its own process.

    Minibatches are CSR if X is sparse. Each one is a fetch.

    Parameters
    ----------
    collection
        A collection of ``.h5ad`` files, whose X is read.
    shuffle
        Whether every cell is drawn at random; otherwise cells come in storage order.
    batch_size, cache, seconds
        As in `measure`.
    seed
        Determines which rows are read.
    """
    loader = _AnnLoader(collection.files, batch_size=batch_size, shuffle=shuffle, seed=seed)
    return measure(loader, Configuration(), cache=cache, seconds=seconds, seed=seed)


class _AnnLoader(Tunable):
    """AnnLoader, which has no settings."""

    def __init__(self, files: Sequence[Path], *, batch_size: int, shuffle: bool, seed: int) -> None:
        self.files, self.batch_size = files, batch_size
        self._shuffle, self._seed = shuffle, seed

    def open(self, configuration: Configuration) -> Any:  # noqa: ARG002
        """Return the loader; X is read on access."""
        opened = open_annloader(
            self.files, batch_size=self.batch_size, shuffle=self._shuffle, seed=self._seed
        )
        return _Read(opened)


class _Read:
    """The X of each minibatch, read on access."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return (each.X for each in self._loader)


def open_annloader(
    paths: Sequence[Path | str], *, batch_size: int, shuffle: bool, seed: int
) -> Any:
    """Open an AnnLoader of whole minibatches over an AnnCollection of backed files.

    Parameters
    ----------
    paths
        The ``.h5ad`` files.
    batch_size
        Cells of a minibatch.
    shuffle
        Whether every cell is drawn at random.
    seed
        Seeds NumPy's and PyTorch's generators of this process, which AnnLoader draws from.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from anndata.experimental import AnnLoader  # noqa: PLC0415 - warns when it is imported

        np.random.seed(seed)  # noqa: NPY002 - where its sampler draws from
        torch.manual_seed(seed)
        collection = AnnCollection(
            [anndata.read_h5ad(path, backed="r") for path in paths],
            join_vars="inner",
            harmonize_dtypes=False,
            convert={"X": _csr_if_sparse},
        )
        return AnnLoader(collection, batch_size=batch_size, shuffle=shuffle, drop_last=True)


def _csr_if_sparse(array: Any) -> Any:
    """Keep CSR as it is; AnnLoader would make it dense."""
    if not isinstance(array, sp.csr_matrix | sp.csr_array):
        return array
    indptr, indices, data = map(torch.from_numpy, (array.indptr, array.indices, array.data))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            indptr, indices, data, size=tuple(array.shape), check_invariants=False
        )
