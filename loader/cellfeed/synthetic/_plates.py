"""Synthetic collections: the experiment, a model of expression, and plates written as h5ad files.

A *well* is one drug at one dosage; a *condition* is one cell line in one well. Every drug is
spread over as many plates as it has dosages, so that a held-out plate can be predicted from the
others. In a small collection a well contains only some cell lines, chosen so that each plate
still has all its wells and all cell lines.
"""

import math
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray
from scipy.special import ndtri

from cellfeed.bytes import cancellable_threads, is_cancelled
from cellfeed.extending import (
    ParameterError,
    os_errors,
    require_positive,
    require_seed,
    usable_cpu_count,
)

# Purposes of independent random streams, so that plates can be written in any order and by any
# process. The numbers determine the output.
_WELLS, _LAYOUT, _BASELINE, _CELL_LINES, _DRUGS, _MECHANISMS, _PLATE_EFFECT, _COUNTS = range(8)


def _random(seed: int, purpose: int, plate: int = 0) -> np.random.Generator:
    """Return the generator for one purpose and one plate, at its beginning."""
    return np.random.default_rng([seed, purpose, plate])


_DOSAGES = (0.05, 0.5, 5.0)  # in micromolar
# The mechanisms of a drug are its code modulo these numbers; fine ones nest in broad ones.
_N_BROAD = 4
_N_FINE = 25

# Cells per plate in percent: 4.7 to 10.4, entropy 3.78 bits.
_SHARES_OF_14_PLATES = (7.6, 5.4, 8.2, 6.5, 10.4, 5.9, 7.2, 4.7, 7.8, 6.8, 8.9, 6.2, 7.4, 7.0)

_MIN_CELLS_PER_PLATE = 10
_MAX_CELLS = 2**53  # shares of more are not exact
_CELLS_PER_CONDITION = 20  # unless all lines are in all wells, or some would be missing


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
        require_seed(self.seed)
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

    def layout(self, plate: int) -> pd.DataFrame:
        """Return the conditions of one plate, in file order.

        Parameters
        ----------
        plate
            Number of the plate, 0 <= plate < n_plates.

        Returns
        -------
        A data frame with a row for each condition: the codes of its ``drug``, its ``dosage`` (of
        `_DOSAGES`) and its ``cell_line``, and the number of its cells, ``n_cells``, at least one.
        """
        rng = _random(self.seed, _LAYOUT, plate)
        n_cells = int(self.cells_per_plate()[plate])
        wells = rng.permutation(self._wells(plate))
        lines = rng.permutation(self.n_cell_lines)
        wanted = max(n_cells // _CELLS_PER_CONDITION, len(wells), len(lines))
        # Along the diagonals of the table of wells and lines: no pair is used twice, and every row
        # and column is used once before any is used again.
        step = np.arange(min(wanted, len(wells) * len(lines), n_cells))
        well = step % len(wells)
        line = (step + step // math.lcm(len(wells), len(lines))) % len(lines)
        order = np.lexsort((lines[line], well))
        # Cells survive unevenly, as in a real screen, with at least one in each condition.
        survival = rng.gamma(4.0, size=step.size)
        conditions = pd.DataFrame(wells[well[order]], columns=["drug", "dosage"])
        conditions["cell_line"] = lines[line[order]]
        conditions["n_cells"] = 1 + _apportion(n_cells - step.size, survival)
        return conditions

    def _wells(self, plate: int) -> NDArray[np.int64]:
        """Return (drug, dosage) of the plate's wells, shape (n_wells, 2)."""
        rng = _random(self.seed, _WELLS)
        rank = rng.permutation(self.n_drugs)
        # The step from one dosage's plate to the next varies between drugs, so that two drugs which
        # share one plate do not share all of them.
        step = 1 + rank // self.n_plates % max(1, (self.n_plates - 1) // 2)
        dosage = np.arange(len(_DOSAGES))
        plate_of_well = (rank[:, None] + step[:, None] * dosage) % self.n_plates
        wells = np.argwhere(plate_of_well == plate)
        # With very few drugs a plate may get none: it then repeats a drug of other plates.
        return wells if len(wells) else np.array([[plate % self.n_drugs, plate % len(dosage)]])


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


def typical_nonzeros(n_genes: int) -> float:
    """Return about how many non-zeros a cell has."""
    return min(n_genes, 2_230 * math.sqrt(n_genes / _FULL_GENES))


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
        # Quantiles of a lognormal distribution, so that its tail is the same for any seed.
        quantiles = ndtri((np.arange(n_genes) + 0.5) / n_genes)
        self._baseline = _random(seed, _BASELINE).permutation(_SPREAD_OF_ABUNDANCE * quantiles)
        # With fewer genes, cells have fewer UMIs but more of them per gene: as if the genes were
        # a selection of informative ones.
        self._median_umis = _MEDIAN_UMIS * math.sqrt(n_genes / _FULL_GENES)
        n_shifted = max(1, round(_SHIFTED_SHARE * n_genes))
        of_mechanisms = _random(seed, _MECHANISMS)
        # Which genes each cause shifts, and by how much.
        self._shifts = list[tuple[NDArray[np.int64], NDArray[np.float64]]]()
        for rng, n_causes, strength in (
            (_random(seed, _CELL_LINES), experiment.n_cell_lines, _CELL_LINE_STRENGTH),
            (of_mechanisms, _N_BROAD, _BROAD_STRENGTH),
            (of_mechanisms, _N_FINE, _FINE_STRENGTH),
            (_random(seed, _DRUGS), experiment.n_drugs, _DRUG_STRENGTH),
        ):
            genes = [rng.choice(n_genes, n_shifted, replace=False) for _ in range(n_causes)]
            sizes = rng.standard_normal((n_causes, n_shifted)).clip(-_MAX_SHIFT, _MAX_SHIFT)
            self._shifts.append((np.array(genes), strength * sizes))

    def expected_nonzeros(self, n_cells: int) -> int:
        """Return the approximate number of non-zeros of this many cells."""
        abundance = np.exp(self._baseline)
        abundance *= self._median_umis * math.exp(_SPREAD_OF_UMIS**2 / 2) / abundance.sum()
        return round(-n_cells * float(np.expm1(-abundance).sum()))

    def draw_n_umis(self, rng: np.random.Generator, n_cells: int) -> NDArray[np.int64]:
        """Return the UMIs of each cell, int64, shape (n_cells,), at least one each."""
        umis = rng.lognormal(math.log(self._median_umis), _SPREAD_OF_UMIS, size=n_cells)
        return np.maximum(umis.round().astype(np.int64), 1)

    def untreated(self, plate: int) -> NDArray[np.float64]:
        """Return the log abundance of genes on a plate, without shifts by condition."""
        rng = _random(self.experiment.seed, _PLATE_EFFECT, plate)
        return self._baseline + _PLATE_STRENGTH * rng.standard_normal(self.experiment.n_genes)

    def cumulative(
        self, untreated: NDArray[np.float64], *, cell_line: int, drug: int, dosage: int
    ) -> NDArray[np.float64]:
        """Return the cumulative distribution over genes of one condition.

        Returns
        -------
        float64, shape (n_genes,), non-decreasing, 1.0 at the end.
        """
        scale = 1 + math.log10(_DOSAGES[dosage] / _DOSAGES[-1]) / len(_DOSAGES)
        log_abundance = untreated.copy()
        causes = (
            (cell_line, 1.0),
            (drug % _N_FINE % _N_BROAD, scale),
            (drug % _N_FINE, scale),
            (drug, scale),
        )
        for (genes, sizes), (cause, factor) in zip(self._shifts, causes, strict=True):
            log_abundance[genes[cause]] += factor * sizes[cause]
        cumulative = np.exp(log_abundance, out=log_abundance).cumsum()
        cumulative /= cumulative[-1]
        return cumulative


def _draw_counts(
    rng: np.random.Generator, cumulative: NDArray[np.float64], n_umis: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
    """Draw the counts of cells of one condition.

    Parameters
    ----------
    rng
        The random generator.
    cumulative
        The cumulative distribution over genes, see `ExpressionModel.cumulative`.
    n_umis
        UMIs of each cell, int64, shape (n_cells,), at least one each.

    Returns
    -------
    The detected genes, ascending within a cell, and their counts, both of shape (n_nonzeros,), one
    cell after the other; and where each cell ends in these arrays, shape (n_cells,).
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
    return (
        run_genes[is_gene].astype(np.int32),
        run_lengths[is_gene].astype(np.float32),
        run_ends[is_gene].searchsorted(closing),
    )


# Writing a sparse matrix in anndata's layout without holding it in memory.

_INT32_MAX = np.iinfo(np.int32).max
_CELLS_PER_WRITE = 64  # so that one draw fits in a CPU's cache
_GZIP: dict[str, Any] = {"compression": "gzip", "compression_opts": 4}  # anndata's "gzip"


class GrowingArray:
    """A gzipped dataset to which values are appended, compressed outside HDF5's lock and the GIL.

    Parameters
    ----------
    group, name, dtype
        Where the dataset is created, and its dtype.
    length
        Its expected length. Chunks get the size that h5py guesses for it, as when anndata writes
        the whole array in one call.
    """

    def __init__(self, group: h5py.Group, name: str, dtype: type[np.generic], length: int) -> None:
        self._dataset = group.create_dataset(name, (length,), dtype, maxshape=(None,), **_GZIP)
        self._chunk: int = self._dataset.chunks[0]
        self._waiting, self._written = np.empty(0, dtype), 0

    def append(self, values: NDArray[np.generic]) -> None:
        """Append values of the dtype, shape (n,)."""
        self._waiting = np.concatenate([self._waiting, values])
        while self._waiting.size >= self._chunk:
            self._write(self._waiting[: self._chunk])
            self._waiting = self._waiting[self._chunk :]

    def finish(self) -> None:
        """Write the last chunk, possibly a partial one, and truncate the dataset to its length."""
        length = self._written + self._waiting.size
        if self._waiting.size:
            self._write(np.pad(self._waiting, (0, self._chunk - self._waiting.size)))
        self._dataset.resize((length,))

    def _write(self, chunk: NDArray[np.generic]) -> None:
        end = self._written + self._chunk
        if end > self._dataset.shape[0]:
            self._dataset.resize((end,))
        compressed = zlib.compress(chunk.data, _GZIP["compression_opts"])
        with phil:  # before 3.16, h5py does not take it here
            self._dataset.id.write_direct_chunk((self._written,), compressed)
        self._written = end


# Libraries that anndata uses change the list of warning filters, which all threads share.
_anndata_lock = threading.Lock()


def _write_plate(
    model: ExpressionModel, plate: int, path: Path, on_written: Callable[[int], None]
) -> None:
    """Write one plate; the file appears at ``path`` only once it is complete."""
    experiment = model.experiment
    conditions = experiment.layout(plate)
    rng = _random(experiment.seed, _COUNTS, plate)
    n_umis = model.draw_n_umis(rng, int(conditions["n_cells"].sum()))
    var = pd.DataFrame(index=[f"gene{gene:05d}" for gene in range(experiment.n_genes)])
    obs = _obs(experiment.plate_names[plate], conditions, n_umis)
    unfinished = path.with_name(path.name + ".part")
    try:
        with os_errors(path):
            # anndata writes everything except the matrix, which would have to fit in memory.
            with _anndata_lock:
                AnnData(obs=obs, var=var).write_h5ad(unfinished, compression="gzip")
            with h5py.File(unfinished, "r+") as file:
                group = file.create_group("X")
                group.attrs["encoding-type"] = "csr_matrix"
                group.attrs["encoding-version"] = "0.1.0"
                group.attrs["shape"] = np.array([n_umis.size, experiment.n_genes])
                expected = model.expected_nonzeros(n_umis.size)
                indices = GrowingArray(group, "indices", np.int32, expected)
                data = GrowingArray(group, "data", np.float32, expected)
                indptr, n_nonzeros = [np.zeros(1, np.int64)], 0
                for cumulative, batch in _batches(model, plate, conditions, n_umis):
                    genes, counts, row_ends = _draw_counts(rng, cumulative, batch)
                    indices.append(genes)
                    data.append(counts)
                    indptr.append(n_nonzeros + row_ends)
                    n_nonzeros += genes.size
                    on_written(batch.size)
                indices.finish()
                data.finish()
                dtype = np.int32 if n_nonzeros <= _INT32_MAX else np.int64
                pointers = np.concatenate(indptr).astype(dtype)
                group.create_dataset("indptr", data=pointers, maxshape=(None,), **_GZIP)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _batches(
    model: ExpressionModel, plate: int, conditions: pd.DataFrame, n_umis: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
    """Yield the cumulative distribution over genes, and the UMIs, of some cells after others."""
    untreated, stop = model.untreated(plate), 0
    for drug, dosage, cell_line, n_cells in conditions.itertuples(index=False, name=None):
        cumulative = model.cumulative(untreated, cell_line=cell_line, drug=drug, dosage=dosage)
        start, stop = stop, stop + n_cells
        for first in range(start, stop, _CELLS_PER_WRITE):
            yield cumulative, n_umis[first : min(first + _CELLS_PER_WRITE, stop)]


def _obs(plate_name: str, conditions: pd.DataFrame, n_umis: NDArray[np.int64]) -> pd.DataFrame:
    """Return the obs table: one row per cell, the conditions one after the other."""
    drugs = conditions["drug"].to_numpy()
    columns = pd.DataFrame(
        {
            "plate": pd.Categorical([plate_name] * drugs.size),
            "cell_line": _named("cell_line_", conditions["cell_line"].to_numpy()),
            "drug": _named("drug_", drugs),
            "dosage": np.array(_DOSAGES)[conditions["dosage"]],
            "moa_broad": _named("moa_broad_", drugs % _N_FINE % _N_BROAD),
            "moa_fine": _named("moa_fine_", drugs % _N_FINE),
        }
    )
    obs = columns.loc[columns.index.repeat(conditions["n_cells"])]
    obs.index = pd.Index([f"{plate_name}_{cell:08d}" for cell in range(n_umis.size)])
    return obs.assign(n_counts=n_umis.astype(np.float32))


def _named(prefix: str, codes: NDArray[np.int64]) -> "pd.Categorical[str]":
    """Return a categorical with only the names that occur, as in files of single plates."""
    present, local = np.unique(codes, return_inverse=True)
    names = pd.Index([f"{prefix}{code + 1:03d}" for code in present])
    return pd.Categorical.from_codes(local, names)


# Writing several plates concurrently.
#
# Threads suffice, since almost all of the time is spent drawing and compressing, outside the GIL
# and HDF5's lock. Unlike processes, they start immediately and demand nothing of the caller.

_POLL_SECONDS = 0.2


def write_plates(
    experiment: Experiment, paths: Mapping[int, Path], on_progress: Callable[[int], None]
) -> None:
    """Write plates; if one fails, or the caller is interrupted, stop them all.

    Parameters
    ----------
    experiment
        The collection.
    paths
        Path of each plate, by its number, at least one.
    on_progress
        Called in the calling thread, with the number of cells written so far.
    """
    model, n_written = ExpressionModel(experiment), dict.fromkeys(paths, 0)

    def write(plate: int, path: Path) -> None:
        def count(n_cells: int) -> None:
            if is_cancelled():
                raise CancelledError
            n_written[plate] += n_cells

        _write_plate(model, plate, path, count)

    num_threads = min(usable_cpu_count(), len(paths))
    with cancellable_threads(num_threads, "cellfeed-synthetic") as threads:
        pending = {threads.submit(write, *each) for each in paths.items()}
        while pending:
            done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            on_progress(sum(n_written.values()))
