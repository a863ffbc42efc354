"""Minibatch label entropy: replayed over labels, and expected from their frequencies."""

import numpy as np

from bench._profile import _Measured, parameters
from cellfeed.synthetic import plate_sizes
from cellfeed_tuner import label_entropy, theory

BATCH_SIZE = 64
N_CELLS, N_REPLAYED = 10_000_000, 100_000


class GridCell(_Measured):
    """Replay one cell of the grid over plate labels, as ``autotune`` does for each."""

    params = (
        parameters(quick=[16, 256], full=[1, 4, 64, 1024]),
        parameters(quick=[1, 64], full=[4, 16, 256]),
    )
    param_names = ("block_size", "fetch_factor")

    def setup(self, *_):
        self.counts = plate_sizes(N_CELLS)
        self.labels = np.repeat(np.arange(self.counts.size, dtype=np.int8), self.counts)

    def track_deficit(self, block_size, fetch_factor):
        random = theory.random_entropy_bits(self.counts, BATCH_SIZE)
        return random - self.run(block_size, fetch_factor)

    track_deficit.unit = "bits below random sampling"

    def run(self, block_size, fetch_factor):
        (cell,) = label_entropy(
            self.labels,
            batch_size=BATCH_SIZE,
            block_sizes=[block_size],
            fetch_factors=[fetch_factor],
            n_rows=N_REPLAYED,
            seed=0,
        )
        return cell.bits.value


class Expectation(_Measured):
    """The exact expectation for homogeneous blocks."""

    params = (
        parameters(quick=[1, 16], full=[4, 64, 256, 1024]),
        parameters(quick=[1, 1024], full=[4, 16, 64, 256]),
    )
    param_names = ("block_size", "fetch_factor")

    def setup(self, *_):
        self.counts = plate_sizes(N_CELLS)

    def track_expected_deficit(self, block_size, fetch_factor):
        random = theory.random_entropy_bits(self.counts, BATCH_SIZE)
        return random - self.run(block_size, fetch_factor)

    track_expected_deficit.unit = "bits below random sampling"

    def run(self, block_size, fetch_factor):
        return theory.expected_entropy_bits(self.counts, BATCH_SIZE, block_size, fetch_factor)
