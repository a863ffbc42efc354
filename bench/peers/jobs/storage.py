"""The sparse matrices of a collection, read by hand: random blocks, one slice for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import Job, Loader, csr_tensor


@dataclass(frozen=True)
class Matrix:
    """A CSR matrix on disk.

    Attributes
    ----------
    data, indices
        Arrays that stay on disk: h5py datasets or zarr arrays.
    indptr
        Row pointer, in memory.
    n_columns
        Genes.
    """

    data: Any
    indices: Any
    indptr: np.ndarray
    n_columns: int

    @property
    def n_rows(self) -> int:
        """Cells."""
        return self.indptr.size - 1


def open_plates(plates: list[str]) -> list[Matrix]:
    """Open ``X`` of each plate."""
    import h5py  # noqa: PLC0415 - the environment of a zarr store needs none

    return [_matrix(h5py.File(plate, "r")["X"]) for plate in plates]


def open_store(store: str) -> list[Matrix]:
    """Open ``X`` of each dataset of a shuffled zarr store."""
    import zarr  # noqa: PLC0415 - the environment of the plates needs none

    return [_matrix(zarr.open_group(path, mode="r")["X"]) for path in store_parts(store)]


def _matrix(group: Any) -> Matrix:
    shape = group.attrs["shape"]
    return Matrix(group["data"], group["indices"], group["indptr"][:], int(shape[1]))


def store_parts(store: str) -> list[Path]:
    """Return the folders of a store's datasets."""
    return sorted(Path(store).glob("dataset_*"))


def random_fetches(
    matrices: list[Matrix], block_size: int, fetch_rows: int, rng: np.random.Generator
) -> Iterator[list[tuple[int, int, int]]]:
    """Divide an epoch into fetches of random blocks, in storage order.

    Yields
    ------
    list of (matrix, start, stop)
        Rows from start to stop of a matrix; a block ends where its matrix ends.
    """
    blocks = np.concatenate(
        [
            [(number, start) for start in range(0, matrix.n_rows, block_size)]
            for number, matrix in enumerate(matrices)
        ]
    )
    order = rng.permutation(len(blocks))
    blocks_per_fetch = max(1, fetch_rows // block_size)
    for first in range(0, len(blocks), blocks_per_fetch):
        chosen = np.sort(order[first : first + blocks_per_fetch])
        yield [
            (number, start, min(start + block_size, matrices[number].n_rows))
            for number, start in blocks[chosen].tolist()
        ]


def sliced(matrices: list[Matrix], job: Job) -> Loader:
    """Return what a careful user would write: one slice per block, and minibatches of them."""
    rng = np.random.default_rng(job.seed)

    def minibatches() -> Iterator[torch.Tensor]:
        block_size = job.settings["block_size"]
        for blocks in random_fetches(matrices, block_size, job.fetch_rows, rng):
            fetched = _read_blocks(matrices, blocks)
            order = rng.permutation(fetched.shape[0])
            for start in range(0, order.size, job.batch_size):
                yield csr_tensor(fetched[order[start : start + job.batch_size]])

    return Loader(minibatches, job.settings["fetch_factor"])


def _read_blocks(matrices: list[Matrix], blocks: list[tuple[int, int, int]]) -> Any:
    """Read blocks of rows, with one slice of ``data`` and one of ``indices`` for each, as CSR."""
    from scipy.sparse import csr_matrix  # noqa: PLC0415 - loaders need not import it

    data, indices, lengths = [], [], []
    for number, start, stop in blocks:
        matrix = matrices[number]
        first, last = int(matrix.indptr[start]), int(matrix.indptr[stop])
        data.append(matrix.data[first:last])
        indices.append(matrix.indices[first:last])
        lengths.append(np.diff(matrix.indptr[start : stop + 1]))
    indptr = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    shape = (indptr.size - 1, matrices[0].n_columns)
    return csr_matrix((np.concatenate(data), np.concatenate(indices), indptr), shape=shape)
