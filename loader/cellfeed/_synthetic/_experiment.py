"""The experiment behind a synthetic collection: which cells got which drug, on which plate.

A *well* is one drug at one dosage; a *condition* is one cell line in one well. Every drug is
spread over as many plates as it has dosages, so that a held-out plate can be predicted from the
others. In a small collection a well contains only some cell lines, chosen so that each plate
still has all its wells and all cell lines.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import ParameterError, require_positive
from cellfeed._synthetic._streams import Stream, random_stream

__all__ = [
    "DOSAGES",
    "N_BROAD",
    "N_FINE",
    "Experiment",
    "PlateLayout",
    "broad_mechanism",
    "fine_mechanism",
]

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
