"""anndata's own AnnLoader, to hold throughputs against.

`bench/peers` opens it in a job of its own, whose memory is AnnLoader's and not this package's.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import scipy.sparse as sp
import torch
from anndata.experimental import AnnCollection

from cellfeed import Collection
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._measuring._measure import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    Measurement,
    measure_alone,
)
from cellfeed_tuner._measuring._timing import Delivery, Dropping, Round, Started

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
    """Measure the throughput of anndata's AnnLoader, over backed files, in a process of its own.

    Minibatches are CSR where X is sparse. Each is a fetch by itself.

    Parameters
    ----------
    collection
        What is read: ``.h5ad`` files, of which X is read.
    shuffle
        Whether every cell is drawn at random; else in the order of storage.
    batch_size, cache, seconds
        As in `measure`.
    seed
        Fixes which rows are read.
    """
    request = _Request(
        shuffle=shuffle, batch_size=batch_size, cache=cache, seconds=seconds, seed=seed
    )
    return measure_alone(collection, request)


def open_annloader(
    paths: Sequence[Path | str], *, batch_size: int, shuffle: bool, seed: int
) -> Any:
    """Open an AnnLoader over an AnnCollection of backed files.

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
        return AnnLoader(collection, batch_size=batch_size, shuffle=shuffle)


def _csr_if_sparse(array: Any) -> Any:
    """Keep what is CSR so; AnnLoader makes it dense otherwise."""
    if not isinstance(array, sp.csr_matrix | sp.csr_array):
        return array
    indptr, indices, data = map(torch.from_numpy, (array.indptr, array.indices, array.data))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(
            indptr, indices, data, size=tuple(array.shape), check_invariants=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What a measuring process is to do; see `measure_annloader`."""

    shuffle: bool
    batch_size: int
    cache: CacheState
    seconds: float
    seed: int

    @property
    def configuration(self) -> Configuration:
        """Each minibatch is read by itself."""
        return Configuration(block_size=1, fetch_factor=1)

    def run(self, collection: Collection, report: Callable[[object], None]) -> None:
        """Time minibatches until there are enough."""
        make_cold = Dropping(collection, self.cache)
        loader = open_annloader(
            collection.paths, batch_size=self.batch_size, shuffle=self.shuffle, seed=self.seed
        )
        deadline = time.perf_counter() + self.seconds
        make_cold()
        begin = time.perf_counter()
        for number, cells in enumerate(_whole_minibatches(loader, self.batch_size)):
            _ = cells.X
            make_cold()
            end = time.perf_counter()
            if number == 0:
                report(Started(0.0, end - begin, 0))
            report(Round(end - begin, number > 0, end - begin, None))
            late = end > deadline and number >= LEAST_ROUNDS
            if late or number == MOST_ROUNDS:
                break
            begin = end
        report(Delivery(""))


def _whole_minibatches(loader: Any, batch_size: int) -> Iterator[Any]:
    """Yield minibatches, epoch after epoch."""
    while True:
        yield from (cells for cells in loader if len(cells) == batch_size)
