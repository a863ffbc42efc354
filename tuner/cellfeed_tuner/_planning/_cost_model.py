"""What a configuration costs: a sum of terms that are not negative, fitted to a few samples."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from cellfeed_tuner._configuration import Configuration

__all__ = ["CostModel", "Geometry", "Observation", "distinct"]

# Where the number of files or chunks is unknown: pieces that the blocks of a fetch may share.
_UNKNOWN_PIECES = (16.0, 256.0)
# Relative error of the terms where the discrepancy below takes up the rest.
_MISFIT = 0.1
# A priori, each term may be this share of the cost of a sample, or less by up to these decades.
_PRIOR_SHARE = 0.5
# How many times the cheapest cell's cost a price of 1 stands for, of what workers add to each
# cell. In recorded grids, a first worker adds 0.2 to 5 times that cost.
_MOST_ADDED = 4.0
# By how much a price may depart from what its prior is in one draw, relative to that.
_PRIOR_SPREAD = 2.0
# Standard deviation of the logarithm by which configurations depart from the sum: what it usually
# is, and for how many samples that counts.
_USUAL_DISCREPANCY, _USUAL_COUNTS = 0.15, 4
# Steps of a factor of four over which a departure fades.
_REACH = 1.5
# The share of a departure's variance that only what is close by has in common: it fades over a
# factor of 1.4, so that on a grid no neighbour has it.
_ALONE, _CLOSE = 0.5, 0.5
_NO_PRICE = 0.01
# Fits take the time of a draw; of more draws than this, several share their prices, and differ in
# how configurations depart from them.
_MOST_FITS = 64
# Of the cheapest sample: no configuration is expected to cost less.
_NEXT_TO_NOTHING = 1e-6
_JITTER = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a collection lies in storage, as far as that is known.

    Parameters
    ----------
    n_cells
        Rows of the collection.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole; may be below 1.
    n_files
        Files that it is made of.
    """

    n_cells: int | None = None
    rows_per_chunk: float | None = None
    n_files: int | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one configuration's cost.

    Parameters
    ----------
    seconds_per_cell
        Mean of its samples.
    error
        Standard error of that mean, relative to it.
    """

    seconds_per_cell: float
    error: float


def distinct(
    pieces: float | None, blocks: NDArray[np.float64], touched: NDArray[np.float64] | float = 1.0
) -> NDArray[np.float64]:
    """Return how many different pieces of storage random blocks touch, on average.

    ``P (1 - (1 - t / P)^B)`` for B blocks that each touch t of P pieces; ``B t`` if there is no
    end of pieces.

    Examples
    --------
    >>> distinct(2, np.array([1.0, 2.0])).tolist(), distinct(None, np.array([3.0])).tolist()
    ([1.0, 1.5], [3.0])
    """
    if pieces is None:
        return blocks * touched
    return pieces * -np.expm1(blocks * np.log1p(-np.minimum(touched / pieces, 1 - _JITTER)))


class CostModel:
    """Seconds per cell over a set of configurations, with what is not known of them.

    A fetch of n = m f cells consists of B = max(1, n / b) blocks of rows that lie together. Its
    cost is a sum of terms, each a price that is not negative times a count: the fetch itself (1);
    the different files and chunks that its blocks touch (see `distinct`; a block of b rows
    touches ``1 + (b - 1) / c`` chunks of c rows); blocks, each a seek; and cells, where the price
    per minibatch is included, as minibatches are of one size. Workers divide a part of every
    term; another part, such as a disk's, is not divided by them. Transfer between processes costs
    a price per cell, and so does each worker, for standing in the way of the others.

    Prices are fitted by least squares on relative errors. To know what is not known, they are
    fitted many times, to samples and to prior prices that are both drawn at random (randomise,
    then optimise). By what the sum does not express, the logarithms of neighbours depart
    together: a Gaussian process over the logarithms of the settings, whose size the samples
    decide. So there is no more confidence far from what was measured than there should be.

    Parameters
    ----------
    configurations
        What is to be predicted.
    batch_size
        Cells of a minibatch.
    geometry
        What is known of the storage.
    """

    def __init__(
        self, configurations: Sequence[Configuration], batch_size: int, geometry: Geometry
    ) -> None:
        self.configurations = tuple(configurations)
        self._place = {each: number for number, each in enumerate(configurations)}
        self._terms, self._decades, self._by_workers = _terms(configurations, batch_size, geometry)
        self._covariance = _covariance(configurations)

    def draw(
        self,
        observations: Mapping[Configuration, Observation],
        n_draws: int,
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:
        """Return what the costs may be, given what was measured.

        Parameters
        ----------
        observations
            What was measured; may be empty.
        n_draws
            How many equally likely worlds to return.
        rng
            Where chance comes from.

        Returns
        -------
        Natural logarithms of seconds per cell, shape (n_draws, n_configurations). Without any
        observation their scale means nothing.
        """
        rows = np.array([self._place[each] for each in observations], dtype=np.int64)
        seen = np.log([each.seconds_per_cell for each in observations.values()])
        errors = np.array([each.error for each in observations.values()])
        terms = self._terms / self._unit(rows, seen)
        n_fits = min(n_draws, _MOST_FITS)
        prices = _prices(terms[rows], self._decades, seen, errors, n_fits, rng)
        prices = prices[np.arange(n_draws) % n_fits]
        # Where no term of a configuration has a price, it costs next to nothing.
        least = _NEXT_TO_NOTHING * (np.exp(seen.min()) if seen.size else 1.0)
        means = np.log(np.maximum(prices @ terms.T, least))
        n_prices = np.count_nonzero(prices > _NO_PRICE, axis=1).mean()
        return self._with_discrepancy(means, rows, seen, errors, n_prices, rng)

    def _unit(self, rows: NDArray[np.int64], seen: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return by what to divide each term, so that one prior serves all prices.

        A price of 1 then explains all of the cost of that sample in which its term weighs most.
        """
        if not rows.size:
            means: NDArray[np.float64] = self._terms.mean(axis=0)
            return means
        own = self._terms[rows]
        weights = (own / np.exp(seen)[:, None]).max(axis=0)
        # A term that no sample has is held against the cheapest. So is what workers add to each
        # cell: it is the same in fetches of any size, so that a sample with workers that is slow
        # for another reason says nothing of it.
        counts = np.where(weights > 0, own.max(axis=0), self._terms.max(axis=0))
        counts = np.where(self._by_workers, counts / _MOST_ADDED, counts)
        is_held = (weights > 0) & ~self._by_workers
        unit: NDArray[np.float64] = np.where(is_held, weights, counts / np.exp(seen.min()))
        return unit

    def _with_discrepancy(
        self,
        means: NDArray[np.float64],
        rows: NDArray[np.int64],
        seen: NDArray[np.float64],
        errors: NDArray[np.float64],
        n_prices: float,
        rng: np.random.Generator,
    ) -> NDArray[np.float64]:
        n = len(self._place)
        unit = np.linalg.cholesky(self._covariance + 1e-6 * np.eye(n))
        departures = rng.standard_normal((len(means), n)) @ unit.T
        if not rows.size:
            return means + _USUAL_DISCREPANCY * departures
        near = self._covariance[np.ix_(rows, rows)]
        residuals = seen - means[:, rows]
        size = _discrepancy(residuals.mean(axis=0), n_prices)
        known = size**2 * near + np.diag(errors**2 + _JITTER)
        # A prior draw, corrected by what it misses of the samples, is a posterior draw.
        departures = size * departures
        missed = residuals - departures[:, rows] + errors * rng.standard_normal(residuals.shape)
        gain = size**2 * self._covariance[:, rows]
        draws: NDArray[np.float64] = means + departures + missed @ np.linalg.solve(known, gain.T)
        return draws


def _terms(
    configurations: Sequence[Configuration], batch_size: int, geometry: Geometry
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Return what each price is paid for, and by how many decades it may be less than most.

    Returns
    -------
    Counts per cell, shape (n_configurations, n_terms); decades, shape (n_terms,); and which prices
    are what workers add to each cell, shape (n_terms,).
    """
    block = np.array([each.block_size for each in configurations], dtype=np.float64)
    workers = np.array([each.num_workers for each in configurations], dtype=np.float64)
    cells = batch_size * np.array([each.fetch_factor for each in configurations], dtype=np.float64)
    blocks = np.maximum(1.0, cells / block)
    rows = np.minimum(block, cells)
    # Cells and their places are paid for everywhere; what else may cost next to nothing.
    counts, rare = [np.ones_like(cells), blocks, cells], [2.0, 1.0, 1.0]
    if geometry.n_files is not None and geometry.n_files > 1:
        counts.append(distinct(geometry.n_files, blocks))
        rare.append(2.0)
    if geometry.rows_per_chunk is not None:
        chunks = geometry.n_cells and max(1.0, geometry.n_cells / geometry.rows_per_chunk)
        touched = 1 + np.maximum(0.0, rows - 1) / geometry.rows_per_chunk
        counts.append(distinct(chunks or None, blocks, touched))
        rare.append(1.0)
    else:
        counts.extend(distinct(pieces, blocks) for pieces in _UNKNOWN_PIECES)
        rare.extend(3.0 for _ in _UNKNOWN_PIECES)
    per_cell = np.column_stack(counts) / cells[:, None]
    divided = per_cell / np.maximum(1.0, workers)[:, None]
    if np.ptp(workers) == 0:
        return divided, np.array(rare), np.zeros(len(rare), dtype=np.bool_)
    by_workers = [workers > 0, workers]  # transfer, and standing in each other's way
    decades = [*rare, *(each + 1 for each in rare), 2.0, 2.0]
    terms = np.column_stack([divided, per_cell, *by_workers])
    return terms, np.array(decades), np.arange(terms.shape[1]) >= 2 * len(rare)


def _covariance(configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """Return how alike configurations depart from a sum of terms, 0 to 1."""
    places = np.array(
        [
            (
                np.log2(each.block_size),
                np.log2(each.fetch_factor),
                2 * np.log2(1 + each.num_workers),
            )
            for each in configurations
        ]
    ).reshape(-1, 3)
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    apart = distances / (2 * _REACH)
    together: NDArray[np.float64] = (1 + apart) * np.exp(-apart)
    close_by: NDArray[np.float64] = np.exp(-((distances / _CLOSE) ** 2))
    return (1 - _ALONE) * together + _ALONE * close_by


def _prices(
    terms: NDArray[np.float64],
    decades: NDArray[np.float64],
    seen: NDArray[np.float64],
    errors: NDArray[np.float64],
    n_draws: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return prices that are not negative, shape (n_draws, n_terms)."""
    n_terms = terms.shape[1]
    prior = _PRIOR_SHARE * 10 ** (-decades * rng.random((n_draws, n_terms)))
    if not seen.size:
        return prior
    spread = np.hypot(errors, _MISFIT)
    noisy = np.exp(spread * rng.standard_normal((n_draws, seen.size)))
    # Relative errors: every row is divided by what was seen.
    relative = terms / (np.exp(seen) * spread)[:, None]
    # What is fitted is how many times its prior each price is; beforehand that is about 1.
    tied = np.broadcast_to(np.eye(n_terms) / _PRIOR_SPREAD, (n_draws, n_terms, n_terms))
    left = np.concatenate([relative * prior[:, None], tied], axis=1)
    right = np.column_stack([noisy / spread, np.full_like(prior, 1 / _PRIOR_SPREAD)])
    times: NDArray[np.float64] = np.array(
        [nnls(*equations)[0] for equations in zip(left, right, strict=True)]
    )
    return prior * times


def _discrepancy(residuals: NDArray[np.float64], n_prices: float) -> float:
    """Return the standard deviation of departures, from residuals of a fit of so many prices."""
    freedom = max(0.0, residuals.size - n_prices)
    squares = residuals @ residuals + _USUAL_COUNTS * _USUAL_DISCREPANCY**2
    return float(np.sqrt(squares / (freedom + _USUAL_COUNTS)))
