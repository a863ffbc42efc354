"""The rows of an epoch by a strategy alone, and how often each of them comes."""

import numpy as np

from cellfeed import SamplingStrategy


def epoch_of(strategy: SamplingStrategy, n_rows: int, key: int = 0) -> np.ndarray:
    positions = np.arange(strategy.n_positions(n_rows))
    return strategy.epoch_order(n_rows=n_rows, epoch_key=key)(positions)


def counts_of(strategy: SamplingStrategy, n_rows: int, key: int = 0) -> np.ndarray:
    return np.bincount(epoch_of(strategy, n_rows, key), minlength=n_rows)


def totals_of(strategy: SamplingStrategy, n_rows: int, n_epochs: int) -> np.ndarray:
    epochs = [epoch_of(strategy, n_rows, key) for key in range(n_epochs)]
    return np.bincount(np.concatenate(epochs), minlength=n_rows)
