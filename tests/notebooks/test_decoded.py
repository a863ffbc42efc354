"""What has to be decompressed, against a count of the files' chunks."""

import h5py
import numpy as np
import pytest
from notebooks.figures import decoded_bytes_per_cell

from cellfeed import BlockShuffling, EpochPlan, ParameterError, Streaming, open_collection

N_CELLS, BATCH_SIZE = 4_500, 32


def plan_of(strategy, fetch_factor):
    return EpochPlan(
        strategy=strategy, n_rows=N_CELLS, batch_size=BATCH_SIZE, fetch_factor=fetch_factor
    )


def bytes_of_chunks(folder, plan, n_fetches):
    """Chunks up to the last element of a row in them, once for each fetch."""
    total = 0
    starts = np.arange(0, N_CELLS, 1_500)
    for number in range(n_fetches):
        rows = plan.delivered_rows(number, 1).ravel()
        for start, path in zip(starts, sorted(folder.glob("*.h5ad")), strict=True):
            here = rows[(rows >= start) & (rows < start + 1_500)] - start
            with h5py.File(path) as file:
                indptr = file["X/indptr"][:]
                elements = [np.arange(indptr[row], indptr[row + 1]) for row in here]
                for name in ("data", "indices"):
                    dataset = file["X"][name]
                    wanted = np.unique(np.concatenate([*elements, []]))
                    chunks, last = np.unique(wanted[::-1] // dataset.chunks[0], return_index=True)
                    ends = wanted[::-1][last] - chunks * dataset.chunks[0] + 1
                    total += int(ends.sum()) * dataset.dtype.itemsize
    return total


@pytest.mark.parametrize(
    ("strategy", "fetch_factor"),
    [(Streaming(), 1), (Streaming(), 8), (BlockShuffling(1), 2), (BlockShuffling(64), 4)],
)
def test_every_chunk_that_a_fetch_touches_counts_once(small_collection, strategy, fetch_factor):
    plan = plan_of(strategy, fetch_factor)
    found = decoded_bytes_per_cell(open_collection(small_collection), plan, n_cells=1_024)
    n_fetches = 1_024 // plan.fetch_size
    assert found == bytes_of_chunks(small_collection, plan, n_fetches) / 1_024


def test_an_epoch_without_a_whole_fetch_is_refused(small_collection):
    with pytest.raises(ParameterError, match="a fetch needs 6,400 cells, but there are 4,500"):
        decoded_bytes_per_cell(open_collection(small_collection), plan_of(Streaming(), 200))
