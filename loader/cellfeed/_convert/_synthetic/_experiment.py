"""The experiment behind a synthetic collection: which cells got which drug, on which plate.

A *well* is one drug at one dosage; a *condition* is one cell line in one well. Every drug is
spread over as many plates as it has dosages, so that a held-out plate can be predicted from the
others. In a small collection a well contains only some cell lines, chosen so that each plate
still has all its wells and all cell lines.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from cellfeed._errors import ParameterError, require_positive

# Independent random streams, so that plates can be written in any order and by any process.


class Stream(IntEnum):
    """Purposes of random streams; the numbers determine the output."""

    WELLS = 0
    LAYOUT = 1
    BASELINE = 2
    CELL_LINES = 3
    DRUGS = 4
    MECHANISMS = 5
    PLATE_EFFECT = 6
    COUNTS = 7


def random_stream(seed: int, stream: Stream, plate: int = 0) -> np.random.Generator:
    """Return the generator for one purpose and one plate, at its beginning."""
    return np.random.default_rng([seed, stream, plate])


DOSAGES = (0.05, 0.5, 5.0)  # in micromolar
N_BROAD = 4
N_FINE = 25

# Cells per plate in percent: 4.7 to 10.4, entropy 3.78 bits.
_SHARES_OF_14_PLATES = (7.6, 5.4, 8.2, 6.5, 10.4, 5.9, 7.2, 4.7, 7.8, 6.8, 8.9, 6.2, 7.4, 7.0)

_MIN_CELLS_PER_PLATE = 10
_MAX_CELLS = 2**53  # shares of more are not exact
_CELLS_PER_CONDITION = 20  # unless all lines are in all wells, or some would be missing

_Drugs = TypeVar("_Drugs", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True, kw_only=True)
class PlateLayout:
    """The conditions of one plate, in file order.

    Parameters
    ----------
    drug, dosage, cell_line
        Codes of each condition, int64, shape (n_conditions,). ``dosage`` indexes `DOSAGES`.
    n_cells
        Cells of each condition, int64, shape (n_conditions,), at least one each.
    """

    drug: NDArray[np.int64]
    dosage: NDArray[np.int64]
    cell_line: NDArray[np.int64]
    n_cells: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """The parameters of a collection, which determine its whole content.

    Raises
    ------
    ParameterError
        A size is below one, ``n_cells`` is above 2**53, ``seed`` is negative, or there are fewer
        than 10 cells per plate.
    """

    n_cells: int
    seed: int
    n_genes: int
    n_plates: int
    n_cell_lines: int
    n_drugs: int

    def __post_init__(self) -> None:
        """Check the sizes and the seed."""
        for name in ("n_cells", "n_genes", "n_plates", "n_cell_lines", "n_drugs"):
            require_positive(name, getattr(self, name))
        if self.seed < 0:
            msg = f"`seed >= 0` must hold, but got seed={self.seed}"
            raise ParameterError(msg)
        if self.n_cells > _MAX_CELLS:
            msg = f"`n_cells <= {_MAX_CELLS}` must hold, but got n_cells={self.n_cells}"
            raise ParameterError(msg)
        if self.n_cells < _MIN_CELLS_PER_PLATE * self.n_plates:
            msg = (
                f"`n_cells >= {_MIN_CELLS_PER_PLATE} * n_plates` must hold, "
                f"but got n_cells={self.n_cells}, n_plates={self.n_plates}"
            )
            raise ParameterError(msg)

    @property
    def plate_names(self) -> list[str]:
        """Names of the plates, which sort in plate order."""
        width = max(2, len(str(self.n_plates)))
        return [f"plate{number:0{width}d}" for number in range(1, self.n_plates + 1)]

    def cells_per_plate(self) -> NDArray[np.int64]:
        """Return the cells of each plate, int64, shape (n_plates,)."""
        uniform = (1,) * self.n_plates
        shares = _SHARES_OF_14_PLATES if self.n_plates == len(_SHARES_OF_14_PLATES) else uniform
        return _apportion(self.n_cells, np.asarray(shares, dtype=np.float64))

    def layout(self, plate: int) -> PlateLayout:
        """Return the conditions of one plate.

        Parameters
        ----------
        plate
            Number of the plate, 0 <= plate < n_plates.
        """
        rng = random_stream(self.seed, Stream.LAYOUT, plate)
        n_cells = int(self.cells_per_plate()[plate])
        wells = rng.permutation(self._wells(plate))
        lines = rng.permutation(self.n_cell_lines)
        well, line = _choose_pairs(len(wells), len(lines), n_cells)
        order = np.lexsort((lines[line], well))
        well, line = well[order], line[order]
        return PlateLayout(
            drug=wells[well, 0],
            dosage=wells[well, 1],
            cell_line=lines[line],
            n_cells=_condition_sizes(rng, n_cells, len(well)),
        )

    def _wells(self, plate: int) -> NDArray[np.int64]:
        """Return (drug, dosage) of the plate's wells, shape (n_wells, 2)."""
        rng = random_stream(self.seed, Stream.WELLS)
        rank = rng.permutation(self.n_drugs)
        # The step from one dosage's plate to the next varies between drugs, so that two drugs which
        # share one plate do not share all of them.
        step = 1 + rank // self.n_plates % max(1, (self.n_plates - 1) // 2)
        dosage = np.arange(len(DOSAGES))
        plate_of_well = (rank[:, None] + step[:, None] * dosage) % self.n_plates
        wells = np.argwhere(plate_of_well == plate)
        # With very few drugs a plate may get none: it then repeats a drug of other plates.
        return wells if len(wells) else np.array([[plate % self.n_drugs, plate % len(dosage)]])


def fine_mechanism(drug: _Drugs) -> _Drugs:
    """Return the fine mechanism of each drug, below `N_FINE`."""
    return drug % N_FINE


def broad_mechanism(drug: _Drugs) -> _Drugs:
    """Return the broad mechanism of each drug, below `N_BROAD`; fine mechanisms nest in it."""
    return fine_mechanism(drug) % N_BROAD


def _choose_pairs(
    n_wells: int, n_lines: int, n_cells: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose distinct (well, line) pairs that use all wells and lines about equally."""
    wanted = max(n_cells // _CELLS_PER_CONDITION, n_wells, n_lines)
    n_pairs = min(wanted, n_wells * n_lines, n_cells)
    # Along the diagonals of the table of wells and lines: no pair is used twice, and every row and
    # column is used once before any is used again.
    step = np.arange(n_pairs)
    return step % n_wells, (step + step // math.lcm(n_wells, n_lines)) % n_lines


def _condition_sizes(
    rng: np.random.Generator, n_cells: int, n_conditions: int
) -> NDArray[np.int64]:
    """Divide the cells unevenly, as in a real screen, with at least one cell per condition."""
    survival = rng.gamma(4.0, size=n_conditions)
    return 1 + _apportion(n_cells - n_conditions, survival)


def _apportion(total: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Divide ``total`` in proportion to ``weights``, by the method of largest remainders."""
    quotas = total * weights / weights.sum()
    counts: NDArray[np.int64] = np.floor(quotas).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:missing]] += 1
    return counts


# A model of expression: how often each gene is detected, given line, drug, dosage and plate.
#
# The logarithm of a gene's abundance is the sum of a baseline and of sparse shifts: markers of
# the cell line, effects of the drug's broad mechanism, of its fine mechanism and of the drug
# itself, in proportion to the logarithm of the dosage, and a slight shift of every gene by the
# plate. A cell's counts are then a multinomial draw of its UMIs.

# Together these give 2,230 non-zeros per cell on average; half of the cells have 1,680 to 2,680.
_FULL_GENES = 62_710
_MEDIAN_UMIS = 3_700
_SPREAD_OF_UMIS = 0.45
_SPREAD_OF_ABUNDANCE = 2.3

# In natural logarithms. Chosen so that a linear classifier, trained on 13 plates of a collection
# of 28,000 cells, predicts on the remaining plate the cell line always, the broad mechanism for
# 0.7 of the cells, the fine one for 0.5 to 0.6, and the drug for 0.2.
_CELL_LINE_STRENGTH = 1.4
_BROAD_STRENGTH = 0.3
_FINE_STRENGTH = 0.5
_DRUG_STRENGTH = 1.6
_PLATE_STRENGTH = 0.1

_SHIFTED_SHARE = 0.04  # fraction of genes shifted by each effect
_MAX_SHIFT = 2.0  # in standard deviations; otherwise one gene could dominate a cell


@dataclass(frozen=True, slots=True)
class _Shifts:
    """Shifts of some genes for each of several causes, both of shape (n_causes, n_shifted)."""

    genes: NDArray[np.int64]
    sizes: NDArray[np.float64]

    @classmethod
    def draw(cls, rng: np.random.Generator, n_causes: int, n_genes: int, strength: float) -> Self:
        n_shifted = max(1, round(_SHIFTED_SHARE * n_genes))
        genes = [rng.choice(n_genes, n_shifted, replace=False) for _ in range(n_causes)]
        sizes = rng.standard_normal((n_causes, n_shifted)).clip(-_MAX_SHIFT, _MAX_SHIFT)
        return cls(np.array(genes), strength * sizes)

    def add_to(self, log_abundance: NDArray[np.float64], cause: int, scale: float = 1.0) -> None:
        log_abundance[self.genes[cause]] += scale * self.sizes[cause]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRows:
    """Counts of some cells, one cell after the other.

    Parameters
    ----------
    genes
        The detected genes, int32, shape (n_nonzeros,), ascending within a cell.
    counts
        Their counts, float32, shape (n_nonzeros,).
    row_ends
        Where each cell ends in these arrays, int64, shape (n_cells,).
    """

    genes: NDArray[np.int32]
    counts: NDArray[np.float32]
    row_ends: NDArray[np.int64]


class ExpressionModel:
    """The expression of a collection.

    Parameters
    ----------
    experiment
        The collection.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        seed, n_genes = experiment.seed, experiment.n_genes
        self.baseline = _baseline(seed, n_genes)
        rng = random_stream(seed, Stream.CELL_LINES)
        self.cell_lines = _Shifts.draw(rng, experiment.n_cell_lines, n_genes, _CELL_LINE_STRENGTH)
        rng = random_stream(seed, Stream.MECHANISMS)
        self.broad = _Shifts.draw(rng, N_BROAD, n_genes, _BROAD_STRENGTH)
        self.fine = _Shifts.draw(rng, N_FINE, n_genes, _FINE_STRENGTH)
        rng = random_stream(seed, Stream.DRUGS)
        self.drugs = _Shifts.draw(rng, experiment.n_drugs, n_genes, _DRUG_STRENGTH)

    def expected_nonzeros(self, n_cells: int) -> int:
        """Return the approximate number of non-zeros of this many cells."""
        median = _median_umis(self.experiment.n_genes)
        abundance = np.exp(self.baseline)
        abundance *= median * math.exp(_SPREAD_OF_UMIS**2 / 2) / abundance.sum()
        return round(-n_cells * float(np.expm1(-abundance).sum()))

    def on_plate(self, plate: int) -> "PlateExpression":
        """Return the expression on one plate, 0 <= plate < n_plates."""
        rng = random_stream(self.experiment.seed, Stream.PLATE_EFFECT, plate)
        effect = _PLATE_STRENGTH * rng.standard_normal(self.experiment.n_genes)
        return PlateExpression(self, self.baseline + effect)


@dataclass(frozen=True, slots=True)
class PlateExpression:
    """The expression on one plate: a model, and the log abundance without shifts by condition."""

    model: ExpressionModel
    untreated: NDArray[np.float64]

    def cumulative(self, *, cell_line: int, drug: int, dosage: int) -> NDArray[np.float64]:
        """Return the cumulative distribution over genes of one condition.

        Returns
        -------
        float64, shape (n_genes,), non-decreasing, 1.0 at the end.
        """
        scale = 1 + math.log10(DOSAGES[dosage] / DOSAGES[-1]) / len(DOSAGES)
        log_abundance = self.untreated.copy()
        self.model.cell_lines.add_to(log_abundance, cell_line)
        self.model.broad.add_to(log_abundance, broad_mechanism(drug), scale)
        self.model.fine.add_to(log_abundance, fine_mechanism(drug), scale)
        self.model.drugs.add_to(log_abundance, drug, scale)
        cumulative = np.exp(log_abundance, out=log_abundance).cumsum()
        cumulative /= cumulative[-1]
        return cumulative


def _baseline(seed: int, n_genes: int) -> NDArray[np.float64]:
    """Return quantiles of a lognormal distribution, so that its tail is the same for any seed."""
    quantiles = ndtri((np.arange(n_genes) + 0.5) / n_genes)
    rng = random_stream(seed, Stream.BASELINE)
    return rng.permutation(_SPREAD_OF_ABUNDANCE * quantiles)


def draw_n_umis(rng: np.random.Generator, n_cells: int, n_genes: int) -> NDArray[np.int64]:
    """Return the UMIs of each cell, int64, shape (n_cells,), at least one each."""
    umis = rng.lognormal(math.log(_median_umis(n_genes)), _SPREAD_OF_UMIS, size=n_cells)
    return np.maximum(umis.round().astype(np.int64), 1)


def _median_umis(n_genes: int) -> float:
    # With fewer genes, cells have fewer UMIs but more of them per gene: as if the genes were
    # a selection of informative ones.
    return _MEDIAN_UMIS * math.sqrt(n_genes / _FULL_GENES)


def draw_counts(
    rng: np.random.Generator, cumulative: NDArray[np.float64], n_umis: NDArray[np.int64]
) -> CountRows:
    """Draw the counts of cells of one condition.

    Parameters
    ----------
    rng
        The random generator.
    cumulative
        The cumulative distribution over genes, see `PlateExpression.cumulative`.
    n_umis
        UMIs of each cell, int64, shape (n_cells,), at least one each.
    """
    # Arrival times of a Poisson process, divided by the time of the next arrival, are sorted
    # uniforms: the search then walks through the genes in order, and the UMIs of one gene are
    # adjacent. All cells share one process, cut at the last arrival of each cell.
    closing = np.cumsum(n_umis + 1) - 1
    times = rng.standard_exponential(closing[-1] + 1).cumsum()
    end_times = times[closing]
    start_times = np.append(0.0, end_times[:-1])
    times -= np.repeat(start_times, n_umis + 1)
    times /= np.repeat(end_times - start_times, n_umis + 1)
    genes = cumulative.searchsorted(times)
    genes[closing] = -1

    run_ends = (genes[1:] != genes[:-1]).nonzero()[0]
    run_lengths = np.diff(run_ends, prepend=-1)
    run_genes = genes[run_ends]
    is_gene = run_genes >= 0
    return CountRows(
        genes=run_genes[is_gene].astype(np.int32),
        counts=run_lengths[is_gene].astype(np.float32),
        row_ends=run_ends[is_gene].searchsorted(closing),
    )
