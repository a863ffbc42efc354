"""The cost of a configuration: a sum of terms with unknown prices, which measurements weight."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from cellfeed import ParameterError
from cellfeed_tuner._configuration import Configuration, Setting

# Ranges of prices, as powers of ten, relative to the price of a cell: reading and placing it once
# its chunk is available. Chosen: wide enough for all recorded grids, to none of which it was
# fitted.
PRICES = {
    "fetch": (0.5, 3.0),
    "block": (-1.0, 1.7),
    "file": (0.0, 2.5),
    "chunk": (-1.0, 1.5),  # a row's share of it
    "transfer": (-1.0, 1.0),  # from a worker process, per cell
    "worker": (-2.0, 0.0),  # what each worker adds to each cell, by contention
}
# Range, as powers of ten, of the share of reading that workers do not divide. Chosen: from hardly
# any to all.
SERIAL = (-2.0, 0.0)
# Largest addition to the logarithm of a cost, divided by the fetches of an epoch, because the
# first fetch is not prefetched. Chosen.
NOT_PREFETCHED = 0.5
# Standard deviation of a cost from the sum for each doubling of the fetch. Chosen: buffers outgrow
# caches, and allocating memory is slow.
BY_SIZE = 0.1
# Shares of the variance of other deviations from the sum that neighbours do not share, and that do
# not depend on workers; and doublings over which the rest, and the unshared part, decay. Chosen.
ALONE, OF_SIZES, REACH, CLOSE = 0.25, 0.5, 3.0, 0.5
# Standard deviation of a cost for each combination of other settings. Chosen: the sum does not
# model them.
BY_OTHERS = 0.5
# Standard deviation of the logarithm of the time unit. Chosen: nothing is known about it.
ANY_SCALE = 3.0
# Draws of the prices; how many equally likely draws are enough; the bisection steps to reach that
# number; and the share of the likeliest draw's weight that counts as none. Chosen: with a single
# normal distribution instead, choices on recorded grids are as good, but worse in ranges of
# settings.
N_SAMPLES, ENOUGH_SAMPLES, HALVINGS, NO_WEIGHT = 4000, 200, 8, 1e-6
# Smallest and largest relative spread of replicates, and how many values in between are tried.
# Chosen: from a quiet machine to one that is hardly usable.
NOISES = (0.01, 0.4, 8)
# Typical relative spread, and the standard deviation of its logarithm. Measured: half of the grids
# in `bench/grids` were recorded with spreads of 5 to 20 %.
USUAL_NOISE, NOISE_WIDTH = 0.08, 0.6
# Variance added to that of each replicate. Chosen: makes matrices invertible.
JITTER = 1e-9
# Most configurations of a space that are all listed; a larger space gets a coarse grid, then the
# surroundings of the best. Chosen: replaying a pair of sizes takes about 50 ms, and the cost
# model's covariance grows with the square of their number.
MOST_LISTED = 2000
# Factors between neighbours in the coarse grid: for sizes, and for processes and threads. Chosen:
# the latter span a smaller range.
SIZE_STEP, WORKER_STEP = 4, 2
# Proposals are rounded to this many significant bits. Chosen: neither speed nor entropy changes
# measurably within steps of 6 % to 12 %.
SIGNIFICANT_BITS = 4
# Factor between a size and its neighbours around a configuration. Chosen.
AROUND_STEP = 2**0.5
# Numbers of these steps in block size and fetch. Chosen: a fetch with as many blocks mixes as
# well, and one with more blocks mixes better.
AROUND = ((-2, -2), (-1, -1), (1, 1), (2, 2), (-1, 0), (1, 0), (0, -1), (0, 1))

# The search space: a grid that is listed, or a space too large for that.

_FEW = ("num_workers", "num_threads")


@dataclass(frozen=True, slots=True)
class Space:
    """Every combination of the values of each setting of a `Configuration`.

    Integers are in ascending order, and a `range` stands for all its integers; other values are in
    the order given.

    Examples
    --------
    >>> space = Space.of(range(1, 4097), range(1, 513), [0, 2])
    >>> space.size, space.is_large, len(space.coarse_grid())
    (4194304, True, 84)
    """

    domains: Mapping[str, Sequence[Setting]]

    @classmethod
    def of(
        cls,
        block_sizes: Sequence[int] = (1,),
        fetch_factors: Sequence[int] = (1,),
        workers: Sequence[int] = (0,),
        /,
        **others: Sequence[Setting],
    ) -> "Space":
        """Return the space of values in any order, possibly repeated.

        Raises
        ------
        ParameterError
            A setting has no values, or one is below what it may be.
        """
        common = {"block_size": block_sizes, "fetch_factor": fetch_factors, "num_workers": workers}
        asked: dict[str, Sequence[Setting]] = {**common, **others}
        domains = {name: _ascending(values) for name, values in asked.items()}
        empty = [name for name, values in domains.items() if not len(values)]
        if empty:
            msg = f"each setting must have at least one value, but {empty[0]} has none"
            raise ParameterError(msg)
        space = cls(domains)
        space._configuration(values[0] for values in domains.values())
        return space

    @property
    def block_sizes(self) -> Sequence[int]:
        """Values of the block size."""
        return cast("Sequence[int]", self.domains["block_size"])

    @property
    def fetch_factors(self) -> Sequence[int]:
        """Values of the fetch factor."""
        return cast("Sequence[int]", self.domains["fetch_factor"])

    @property
    def workers(self) -> Sequence[int]:
        """Values of the number of workers."""
        return cast("Sequence[int]", self.domains["num_workers"])

    @property
    def others(self) -> dict[str, Sequence[Setting]]:
        """Values of the other settings."""
        return dict(list(self.domains.items())[3:])

    @property
    def size(self) -> int:
        """Number of configurations."""
        return prod(len(each) for each in self.domains.values())

    @property
    def is_large(self) -> bool:
        """Whether there are too many to list."""
        return self.size > MOST_LISTED

    def __contains__(self, configuration: object) -> bool:
        return (
            isinstance(configuration, Configuration)
            and configuration.keys() == self.domains.keys()
            and all(configuration[name] in values for name, values in self.domains.items())
        )

    def grid(self) -> list[Configuration]:
        """Return all configurations in their order."""
        return self._product(self.domains)

    def coarse_grid(self) -> list[Configuration]:
        """Return a grid of the ends of each range and the powers of 4 between (of 2 for workers).

        A power that is not one of the values is replaced by the nearest. Settings that are not
        sizes keep all values.
        """
        return self._product({name: _coarse(name, each) for name, each in self.domains.items()})

    def nearest(self, **settings: Setting) -> Configuration:
        """Return the configuration nearest to rounded sizes, so that similar ones are timed once.

        Blocks need not divide the fetch: a block that straddles two fetches is read in two parts,
        which both replay and timing account for.
        """
        return self._configuration(
            _nearest_setting(name, values, settings[name]) for name, values in self.domains.items()
        )

    def around(self, configuration: Configuration) -> list[Configuration]:
        """Return 0.5 to 2 times the block, the fetch or both, and a worker more or less.

        Examples
        --------
        >>> space = Space.of(range(1, 4097), range(1, 513), [0, 1])
        >>> found = space.around(Configuration(block_size=64, fetch_factor=64))
        >>> [(each.block_size, each.fetch_factor, each.num_workers) for each in found[:2]]
        [(32, 32, 0), (44, 44, 0)]
        """
        block, fetch = configuration.block_size, configuration.fetch_factor
        workers, others = configuration.num_workers, configuration.others
        sizes = [(block * AROUND_STEP**i, fetch * AROUND_STEP**j, workers) for i, j in AROUND]
        sizes += [(block, fetch, workers + more) for more in (-1, 1) if workers + more >= 0]
        found = [
            self.nearest(
                block_size=max(1, round(b)), fetch_factor=max(1, round(f)), num_workers=w, **others
            )
            for b, f, w in sizes
        ]
        return [each for each in dict.fromkeys(found) if each != configuration]

    def best_mixed(self) -> list[Configuration]:
        """Return the smallest blocks, in the largest fetches first, with the fewest workers."""
        fetch, found = float(self.fetch_factors[-1]), list[Configuration]()
        sizes = {"block_size": self.block_sizes[0], "num_workers": self.workers[0]}
        while fetch >= self.fetch_factors[0]:
            for values in product(*self.others.values()):
                others = dict(zip(self.others, values, strict=True))
                found.append(self.nearest(fetch_factor=round(fetch), **sizes, **others))
            fetch /= AROUND_STEP
        return list(dict.fromkeys(found))

    def ends(self) -> list[Configuration]:
        """Return the configurations of the least and of the largest values."""
        ends = ((values[place] for values in self.domains.values()) for place in (0, -1))
        return [self._configuration(each) for each in ends]

    def _product(self, domains: Mapping[str, Sequence[Setting]]) -> list[Configuration]:
        return [self._configuration(values) for values in product(*domains.values())]

    def _configuration(self, values: Iterable[Setting]) -> Configuration:
        settings: dict[str, Any] = dict(zip(self.domains, values, strict=True))
        return Configuration(**settings)


def are_sizes(values: Sequence[Setting]) -> bool:
    """Return whether values are integers, so that others may lie between them."""
    return isinstance(values, range) or all(type(each) is int for each in values)


def _ascending(values: Sequence[Setting]) -> Sequence[Setting]:
    if isinstance(values, range):
        return values if values.step > 0 else values[::-1]
    given: Sequence[Any] = values  # which may be NumPy's
    plain = (each.item() if isinstance(each, np.generic) else each for each in given)
    distinct = tuple(dict.fromkeys(plain))
    return tuple(sorted(cast("Any", distinct))) if are_sizes(distinct) else distinct


def _coarse(name: str, values: Sequence[Setting]) -> Sequence[Setting]:
    if not are_sizes(values):
        return values
    sizes, step = cast("Sequence[int]", values), WORKER_STEP if name in _FEW else SIZE_STEP
    found, power = {sizes[0], sizes[-1]}, 1
    while power < sizes[-1]:
        if power > sizes[0]:
            found.add(_nearest(sizes, power))
        power *= step
    return sorted(found)


def _nearest_setting(name: str, values: Sequence[Setting], wanted: Setting) -> Setting:
    if not are_sizes(values):
        return wanted
    size = cast("int", wanted)
    return _nearest(cast("Sequence[int]", values), size if name in _FEW else _rounded(size))


def _nearest(sizes: Sequence[int], wanted: int) -> int:
    """Return the value whose ratio to ``wanted`` is nearest to 1; 0 counts as a half."""
    place = bisect_left(sizes, wanted)
    around = sizes[max(0, place - 1) : place + 1]
    return min(around, key=lambda size: max(size, wanted) / max(0.5, min(size, wanted)))


def _rounded(size: int) -> int:
    """Return a size with so many significant bits, such as 11, 104 or 1152."""
    step = 1 << max(0, size.bit_length() - SIGNIFICANT_BITS)
    return round(size / step) * step


_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How a collection is stored, as far as that is known.

    Parameters
    ----------
    n_cells
        Rows of the collection.
    rows_per_chunk
        Mean number of rows in a unit of storage that is read as a whole; may be below 1.
    n_files
        Files that it is made of.
    n_ranks
        Ranks that divide an epoch.
    """

    n_cells: int | None = None
    rows_per_chunk: float | None = None
    n_files: int | None = None
    n_ranks: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Observations:
    """Measured costs: logarithms of seconds per cell of n configurations, with their errors.

    Parameters
    ----------
    configurations
        What was measured.
    logs
        Means of replicates, shape (n,).
    covariance
        Of their errors, shape (n, n).
    """

    configurations: Sequence[Configuration]
    logs: NDArray[np.float64]
    covariance: NDArray[np.float64]

    @classmethod
    def none(cls) -> "Observations":
        """Return no observations."""
        return cls((), np.empty(0), np.empty((0, 0)))


class Assumption(NamedTuple):
    """What is assumed of costs.

    Attributes
    ----------
    has_terms
        Whether they are about a sum of terms; otherwise they have nothing in common.
    deviation
        Standard deviation of their logarithms from that.
    prior
        Probability before anything is measured.
    """

    has_terms: bool
    deviation: float
    prior: float


# The sum; the sum roughly; nothing in common. Chosen: on recorded grids, the last are hardly ever
# the likeliest, and on the same grids with configurations exchanged at random, nearly always.
ASSUMPTIONS = (
    Assumption(has_terms=True, deviation=0.15, prior=0.8),
    Assumption(has_terms=True, deviation=0.4, prior=0.1),
    *(Assumption(has_terms=False, deviation=each, prior=0.1 / 3) for each in (0.3, 0.5, 0.8)),
)


class Fit(NamedTuple):
    """How well a model fits what was measured.

    Attributes
    ----------
    spread
        Relative standard deviation of replicates, in seconds per cell. It is inferred from the
        differences between replicates of one configuration, and from the deviations of the means
        from the model.
    log_evidence
        Logarithm of the probability density of all replicates, up to a constant that all models
        share.
    """

    spread: float
    log_evidence: float


def distinct(
    pieces: float, blocks: NDArray[np.float64], touched: NDArray[np.float64] | float = 1.0
) -> NDArray[np.float64]:
    """Return how many different pieces of storage random blocks touch, on average.

    ``P (1 - (1 - t / P)^B)`` for B blocks that each touch t of P pieces.

    Examples
    --------
    >>> distinct(2, np.array([1.0, 2.0])).tolist()
    [1.0, 1.5]
    """
    return pieces * -np.expm1(blocks * np.log1p(-np.minimum(touched / pieces, 1 - JITTER)))


_Places = NDArray[np.int64]


class CostModel:
    """Seconds per cell of a set of configurations, with their uncertainty.

    A fetch of n = m f cells consists of B = max(1, n / b) blocks of rows that lie together. Its
    cost is a sum of terms, each a price times a count: the fetch itself (1); the different files
    and chunks that its blocks touch (see `distinct`; a block of b rows touches
    ``1 + (b - 1) / c`` chunks of c rows); blocks, each a seek; and cells. Workers divide a part of
    the sum; transfer between processes costs a price per cell, and so does each worker.

    Prices are drawn many times, and replicates weight these samples by their likelihood. If too few
    samples would be left, a power of the likelihood that leaves enough weights them, and the rest
    of it conditions the normal distribution with their mean and covariance. Deviations from the sum
    are a Gaussian process over the logarithms of the settings.

    Parameters
    ----------
    configurations
        Those to predict.
    batch_size
        Cells of a minibatch.
    geometry
        How the collection is stored.
    """

    def __init__(
        self, configurations: Sequence[Configuration], batch_size: int, geometry: Geometry
    ) -> None:
        self._place = {each: number for number, each in enumerate(configurations)}
        self._samples = self.samples(configurations, batch_size, geometry)
        self._alike, self._others = _alike(configurations), _numbers_of_others(configurations)

    @staticmethod
    def samples(
        configurations: Sequence[Configuration], batch_size: int, geometry: Geometry
    ) -> NDArray[np.float64]:
        """Return logarithms of costs at prices drawn at random, shape (n_samples, n)."""
        rng = np.random.default_rng(_SEED)
        prices = {name: _decades(rng, ends) for name, ends in PRICES.items()}
        block = np.array([each.block_size for each in configurations], dtype=np.float64)
        workers = np.array([each.num_workers for each in configurations], dtype=np.float64)
        cells = batch_size * np.array(
            [each.fetch_factor for each in configurations], dtype=np.float64
        )
        blocks = np.maximum(1.0, cells / block)
        fetch = prices["fetch"] + prices["block"] * blocks + cells
        if geometry.n_files is not None and geometry.n_files > 1:
            fetch = fetch + prices["file"] * distinct(geometry.n_files, blocks)
        if geometry.rows_per_chunk is not None and geometry.n_cells is not None:
            rows = geometry.rows_per_chunk
            chunks = max(1.0, geometry.n_cells / rows)
            touched = 1 + (np.minimum(block, cells) - 1) / rows
            fetch = fetch + prices["chunk"] * max(1.0, rows) * distinct(chunks, blocks, touched)
        serial = _decades(rng, SERIAL)
        divided = serial + (1 - serial) / np.maximum(1.0, workers)
        by_workers = (workers > 0) * prices["transfer"] + workers * prices["worker"]
        logs = np.log(fetch / cells * divided + by_workers)
        if geometry.n_cells is not None:
            n_fetches = np.maximum(1.0, geometry.n_cells // geometry.n_ranks // cells)
            logs = logs + NOT_PREFETCHED * rng.random((N_SAMPLES, 1)) / n_fetches
        by_size = BY_SIZE * rng.standard_normal((N_SAMPLES, 1)) * np.log2(cells)
        found: NDArray[np.float64] = logs + by_size
        return found

    def mean(self) -> NDArray[np.float64]:
        """Return the prior mean of the logarithms of costs, up to a constant."""
        mean: NDArray[np.float64] = self._samples.mean(axis=0)
        return mean

    def posterior(
        self, observations: Observations, assumption: Assumption = ASSUMPTIONS[0]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return mean and covariance of the logarithms of seconds per cell.

        Parameters
        ----------
        observations
            Measured costs; without any, the scale is arbitrary.

        Returns
        -------
        Shapes (n_configurations,) and (n_configurations, n_configurations).
        """
        found, every = observations.configurations, np.arange(len(self._place))
        rows = np.array([self._place[each] for each in found], dtype=np.int64)
        samples, deviations = self._under(assumption)
        seen, apart = observations.logs, deviations(every, rows)
        known = apart[rows] + observations.covariance + JITTER * np.eye(len(rows))
        # Squared Mahalanobis distances of the samples from what was measured.
        apart_from_seen = (seen - samples[:, rows]).T
        misfit = (np.linalg.solve(np.linalg.cholesky(known), apart_from_seen) ** 2).sum(axis=0)
        share, weights = _weights(misfit)
        weighty = weights > NO_WEIGHT * weights.max()
        mean = weights[weighty] @ samples[weighty]
        roots = np.sqrt(weights[weighty])[:, None] * (samples[weighty] - mean)
        covariance: NDArray[np.float64] = roots.T @ roots
        if share < 1:
            remaining = covariance[np.ix_(rows, rows)] + known / (1 - share)
            gain = np.linalg.solve(remaining, covariance[rows]).T
            mean = mean + gain @ (seen - mean[rows])
            covariance = covariance - gain @ covariance[rows]
        gain = np.linalg.solve(known, apart.T).T
        known_part = gain @ covariance[rows]
        covariance = covariance - known_part - known_part.T + known_part[:, rows] @ gain.T
        covariance = covariance + deviations(every, every) - gain @ apart.T
        return mean + gain @ (seen - mean[rows]), covariance

    def fit(
        self,
        replicates: Mapping[Configuration, Sequence[float]],
        assumption: Assumption = ASSUMPTIONS[0],
    ) -> Fit:
        """Return how well the model fits replicates, in seconds per cell."""
        samples, deviations = self._under(assumption)
        logs = [np.log(each) for each in replicates.values()]
        rows = np.array([self._place[each] for each in replicates], dtype=np.int64)
        numbers = np.array([each.size for each in logs])
        within = float(sum(((each - each.mean()) ** 2).sum() for each in logs))
        freedom = int((numbers - 1).sum())
        apart = np.array([each.mean() for each in logs]) - samples[:, rows]
        near = deviations(rows, rows)
        noises = np.geomspace(*NOISES)
        # Weighted by the number of replicates, one basis makes every noise's covariance diagonal.
        scales = np.sqrt(numbers)
        values, basis = np.linalg.eigh(scales[:, None] * near * scales)
        variances = np.maximum(values, 0.0) + noises[:, None] ** 2
        misfits = (1 / variances) @ ((apart * scales) @ basis).T ** 2
        best = misfits.min(axis=1)
        likelihoods = np.exp(-0.5 * (misfits - best[:, None])).mean(axis=1)
        scores = np.log(likelihoods) - 0.5 * (
            best
            + np.log(variances).sum(axis=1)
            + within / noises**2
            + 2 * freedom * np.log(noises)
            + (np.log(noises / USUAL_NOISE) / NOISE_WIDTH) ** 2
        )
        weights = np.exp(scores - scores.max())
        return Fit(
            spread=float(np.sqrt(weights @ noises**2 / weights.sum())),
            log_evidence=float(scores.max() + np.log(weights.sum())),
        )

    def _under(
        self, assumption: Assumption
    ) -> tuple[NDArray[np.float64], Callable[[_Places, _Places], NDArray[np.float64]]]:
        """Return samples, and the covariance of deviations from them, of rows and columns.

        The latter includes what is unknown of all costs together.
        """
        has_terms, deviation, _ = assumption

        def deviations(rows: _Places, columns: _Places) -> NDArray[np.float64]:
            found = deviation**2 * (
                self._alike[np.ix_(rows, columns)] if has_terms else rows[:, None] == columns
            )
            if has_terms:  # up to a constant
                found -= BY_OTHERS**2 * (self._others[rows][:, None] != self._others[columns])
            together: NDArray[np.float64] = found + ANY_SCALE**2
            return together

        return self._samples if has_terms else np.zeros((1, len(self._place))), deviations


def _weights(misfit: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
    """Return the largest power of the likelihood that leaves enough samples, and their weights."""

    def weights_at(share: float) -> NDArray[np.float64]:
        weights = np.exp(-0.5 * share * (misfit - misfit.min()))
        found: NDArray[np.float64] = weights / weights.sum()
        return found

    least, most = 0.0, 1.0
    if 1 / (weights_at(most) ** 2).sum() >= ENOUGH_SAMPLES:
        return most, weights_at(most)
    for _ in range(HALVINGS):
        middle = (least + most) / 2
        is_enough = 1 / (weights_at(middle) ** 2).sum() >= ENOUGH_SAMPLES
        least, most = (middle, most) if is_enough else (least, middle)
    return least, weights_at(least)


def draws_of(
    mean: NDArray[np.float64],
    covariance: NDArray[np.float64],
    n_draws: int,
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """Return draws of a normal distribution, possibly singular, shape (n_draws, n)."""
    values, vectors = np.linalg.eigh(covariance)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    draws: NDArray[np.float64] = mean + rng.standard_normal((n_draws, mean.size)) @ root.T
    return draws


def _decades(rng: np.random.Generator, ends: tuple[float, float]) -> NDArray[np.float64]:
    draws: NDArray[np.float64] = 10 ** rng.uniform(*ends, (N_SAMPLES, 1))
    return draws


def _alike(configurations: Sequence[Configuration]) -> NDArray[np.float64]:
    """Return the correlation of deviations from the sum."""
    sizes = np.log2([(each.block_size, each.fetch_factor) for each in configurations])
    workers = 2 * np.log2([1 + each.num_workers for each in configurations])
    by_sizes = np.linalg.norm((sizes[:, None] - sizes[None]).reshape(*2 * workers.shape, 2), axis=2)
    by_all = np.hypot(by_sizes, workers[:, None] - workers[None])
    shares = (1 - ALONE - OF_SIZES, OF_SIZES, ALONE)
    parts = (_fading(by_all), _fading(by_sizes), np.exp(-((by_all / CLOSE) ** 2)))
    alike: NDArray[np.float64] = np.sum(
        [share * part for share, part in zip(shares, parts, strict=True)], axis=0
    )
    return alike


def _numbers_of_others(configurations: Sequence[Configuration]) -> _Places:
    """Return the number of each configuration's combination of other settings, shape (n,)."""
    others = [tuple(each.others.items()) for each in configurations]
    number_of = {each: number for number, each in enumerate(dict.fromkeys(others))}
    return np.array([number_of[each] for each in others], dtype=np.int64)


def _fading(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the correlation of deviations at such distances, 0 to 1."""
    alike: NDArray[np.float64] = (1 + distances / REACH) * np.exp(-distances / REACH)
    return alike
