"""What cells of this collection would cost in a store such as ``cellfeed preshuffle`` writes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numcodecs import blosc
from numpy.typing import NDArray

from cellfeed import CellDataset, Collection, Minibatch
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._measuring._selected import Selected

__all__ = ["StoreRequest", "StoreSample", "sample_store"]

_MOST_BYTES = 16 << 20
_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSample:
    """What a cell takes: one thread's time to encode, the longest to decode, bytes in storage."""

    encode_seconds: float
    decode_seconds: float
    stored_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """A sample of a few minibatches."""

    configuration: Configuration
    batch_size: int
    seed: int

    def run(self, subject: Collection | Selected, report: Callable[[object], None]) -> None:
        """Report the `StoreSample` of one fetch."""
        selected, configuration = Selected.of(subject), self.configuration
        others: dict[str, Any] = configuration.others
        dataset = CellDataset(
            selected.collection,
            selected.blocks(configuration.block_size, others.pop("align", None)),
            self.batch_size,
            configuration.fetch_factor,
            seed=self.seed,
            **others,
        )
        minibatches = list(islice(dataset, configuration.fetch_factor))
        report(sample_store(minibatches, selected.collection.n_vars))


def sample_store(minibatches: Sequence[Minibatch], n_vars: int) -> StoreSample:
    """Encode and decode some minibatches as the store does: Blosc, LZ4, bytes shuffled."""
    blosc.use_threads = False  # as the loader, which has threads of its own
    codec = blosc.Blosc(cname="lz4", clevel=3, shuffle=blosc.SHUFFLE)
    pieces, n_cells = list[NDArray[Any]](), 0
    for minibatch in minibatches:
        if sum(piece.nbytes for piece in pieces) > _MOST_BYTES:
            break
        pieces += _arrays(minibatch, n_vars)
        n_cells += len(minibatch)
    start = time.perf_counter()
    encoded = [codec.encode(piece) for piece in pieces]
    encode, decode = time.perf_counter() - start, 0.0
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for each in encoded:
            codec.decode(each)
        decode = max(decode, time.perf_counter() - start)
    return StoreSample(
        encode_seconds=encode / n_cells,
        decode_seconds=decode / n_cells,
        stored_bytes=sum(map(len, encoded)) / n_cells,
    )


def _arrays(minibatch: Minibatch, n_vars: int) -> list[NDArray[Any]]:
    matrix = minibatch.X
    if matrix.layout != torch.sparse_csr:
        return [matrix.numpy()]
    columns = matrix.col_indices().numpy().astype(np.min_scalar_type(max(n_vars - 1, 0)))
    return [columns, np.ascontiguousarray(matrix.values().numpy())]
