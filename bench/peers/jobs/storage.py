"""The sparse matrices of a collection, opened to be read by hand, and random blocks of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


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

    groups = [h5py.File(plate, "r")["X"] for plate in plates]
    return [
        Matrix(group["data"], group["indices"], group["indptr"][:], int(group.attrs["shape"][1]))
        for group in groups
    ]


def open_store(store: str) -> list[Matrix]:
    """Open ``X`` of each dataset of a shuffled zarr store."""
    import zarr  # noqa: PLC0415 - the environment of the plates needs none

    groups = [zarr.open_group(path, mode="r")["X"] for path in store_parts(store)]
    return [
        Matrix(group["data"], group["indices"], group["indptr"][:], int(group.attrs["shape"][1]))
        for group in groups
    ]


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
