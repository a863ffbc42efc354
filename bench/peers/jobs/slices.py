"""What a careful user would write by hand: one slice per block, and minibatches of them."""

from collections.abc import Iterator

import numpy as np
import torch
from protocol import Job, Loader, csr_tensor
from scipy.sparse import csr_matrix
from storage import Matrix, random_fetches


def sliced_loader(matrices: list[Matrix], job: Job) -> Loader:
    rng = np.random.default_rng(job.seed)

    def minibatches() -> Iterator[torch.Tensor]:
        block_size = job.settings["block_size"]
        for blocks in random_fetches(matrices, block_size, job.fetch_rows, rng):
            fetched = read_blocks(matrices, blocks)
            order = rng.permutation(fetched.shape[0])
            for start in range(0, order.size, job.batch_size):
                yield csr_tensor(fetched[order[start : start + job.batch_size]])

    return Loader(minibatches, job.settings["fetch_factor"])


def read_blocks(matrices: list[Matrix], blocks: list[tuple[int, int, int]]) -> csr_matrix:
    """Read blocks of rows, with one slice of ``data`` and one of ``indices`` for each."""
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
