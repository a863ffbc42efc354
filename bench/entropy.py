"""Minibatch label entropy: replayed over labels, and expected from their frequencies."""

import numpy as np

from cellfeed.synthetic import plate_sizes
from cellfeed_tuner import label_entropy, theory

BATCH_SIZE = 64
N_CELLS, N_REPLAYED = 10_000_000, 200_000


class GridCell:
    """Replay one cell of the grid over plate labels, as ``autotune`` does for each."""

    params = ([1, 16, 256], [1, 64])
    param_names = ("block_size", "fetch_factor")

    def setup(self, *_):
        self.counts = plate_sizes(N_CELLS)
        self.labels = np.repeat(np.arange(self.counts.size, dtype=np.int8), self.counts)

    def time_replay(self, block_size, fetch_factor):
        self.replay(block_size, fetch_factor)

    def peakmem_replay(self, block_size, fetch_factor):
        self.replay(block_size, fetch_factor)

    def track_deficit(self, block_size, fetch_factor):
        random = theory.random_entropy_bits(self.counts, BATCH_SIZE)
        return random - self.replay(block_size, fetch_factor)

    track_deficit.unit = "bits below random sampling"

    def replay(self, block_size, fetch_factor):
        (cell,) = label_entropy(
            self.labels,
            batch_size=BATCH_SIZE,
            block_sizes=[block_size],
            fetch_factors=[fetch_factor],
            n_rows=N_REPLAYED,
            seed=0,
        )
        return cell.bits.value


class Expectation:
    """The exact expectation for homogeneous blocks."""

    params = ([1, 16, 1024], [1, 1024])
    param_names = ("block_size", "fetch_factor")

    def setup(self, *_):
        self.counts = plate_sizes(N_CELLS)

    def time_expected_entropy(self, block_size, fetch_factor):
        theory.expected_entropy_bits(self.counts, BATCH_SIZE, block_size, fetch_factor)

    def peakmem_expected_entropy(self, block_size, fetch_factor):
        self.time_expected_entropy(block_size, fetch_factor)
