"""Synthetic collections that resemble Tahoe-100M, to try settings, to test and to benchmark.

Nothing is downloaded; the content depends only on the parameters and a seed.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, CancelledError, wait
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray
from scipy.special import ndtri

from cellfeed.bytes import cancellable_threads, is_cancelled, writable_path
from cellfeed.console import format_bytes
from cellfeed.extending import (
    ParameterError,
    os_errors,
    require_positive,
    require_seed,
    usable_cpu_count,
)

__all__ = ["plate_sizes", "write_tahoe_like"]

# Increase it whenever the same parameters give other content.
_GENERATOR = "cellfeed tahoe-like 1"

# Cells per plate in percent: 4.7 to 10.4, entropy 3.78 bits.
_SHARES_OF_14_PLATES = (7.6, 5.4, 8.2, 6.5, 10.4, 5.9, 7.2, 4.7, 7.8, 6.8, 8.9, 6.2, 7.4, 7.0)
_MIN_CELLS_PER_PLATE = 10
_MAX_CELLS = 2**53  # shares of more are not exact


def write_tahoe_like(
    folder: str | os.PathLike[str],
    *,
    n_cells: int,
    seed: int = 0,
    n_genes: int = 62_710,
    n_plates: int = 14,
    n_cell_lines: int = 50,
    n_drugs: int = 380,
    on_progress: Callable[[int], None] | None = None,
) -> list[Path]:
    """Write a collection that resembles Tahoe-100M, one h5ad file per plate.

    Cells of one condition (plate, drug, dosage and cell line) are contiguous, and nothing is
    shuffled. Expression depends strongly on the cell line, hierarchically on the drug (broad
    mechanism, fine mechanism, drug; more at higher dosage) and slightly on the plate. Each drug
    occurs on as many plates as it has dosages, so a model can be trained on all plates but one
    and tested on that one. Small collections have fewer cell lines per drug.

    Parameters
    ----------
    folder
        Folder for ``plate01.h5ad``, ``plate02.h5ad`` and so on, created if needed. If it already
        contains the same collection, only missing plates are written.
    n_cells
        Number of cells in the collection, at least 10 per plate. With 14 plates, their shares are
        between 4.7 % and 10.4 %, with an entropy of 3.78 bits; with any other number, the shares
        are equal.
    seed
        The same seed and parameters give the same content, with the same version of NumPy.
    n_genes
        Number of genes, the same in all files. A cell has about 2,230 non-zero counts with the
        default, and fewer if there are fewer genes.
    n_plates, n_cell_lines, n_drugs
        Sizes of the experiment; each drug is given at 0.05, 0.5 and 5 micromolar.
    on_progress
        Called from time to time with the number of cells written so far, and finally with
        ``n_cells``. Not called if nothing needs to be written.

    Returns
    -------
    The paths of the files, in the order of the plates. In each, ``X`` is a gzipped CSR matrix of
    float32 counts; ``obs`` has the categorical columns ``plate``, ``cell_line``, ``drug``,
    ``moa_broad`` and ``moa_fine``, the ``dosage`` in micromolar (float64) and ``n_counts``, the
    cell's sum of counts (float32).

    Raises
    ------
    ParameterError
        A size is out of range, ``seed`` is negative, or ``folder`` contains another collection.
    PathError
        ``folder`` is a URL.
    OSError
        The folder cannot be written to, or the disk has too little space.

    Examples
    --------
    >>> import tempfile
    >>> import anndata
    >>> folder = tempfile.TemporaryDirectory()
    >>> paths = write_tahoe_like(folder.name, n_cells=100, n_genes=500, n_plates=2, n_drugs=4)
    >>> [path.name for path in paths]
    ['plate01.h5ad', 'plate02.h5ad']
    >>> plate = anndata.read_h5ad(paths[0])
    >>> plate.shape
    (50, 500)
    >>> list(plate.obs)
    ['plate', 'cell_line', 'drug', 'dosage', 'moa_broad', 'moa_fine', 'n_counts']
    >>> folder.cleanup()
    """
    sizes = plate_sizes(n_cells, n_plates)
    for name, n in (("n_genes", n_genes), ("n_cell_lines", n_cell_lines), ("n_drugs", n_drugs)):
        require_positive(name, n)
    require_seed(seed)
    folder = writable_path(folder)
    width = max(2, len(str(n_plates)))  # names sort in the order of the plates
    paths = [folder / f"plate{number:0{width}d}.h5ad" for number in range(1, n_plates + 1)]
    parameters = {
        "generator": _GENERATOR,
        "n_cells": n_cells,
        "seed": seed,
        "n_genes": n_genes,
        "n_plates": n_plates,
        "n_cell_lines": n_cell_lines,
        "n_drugs": n_drugs,
    }
    manifest = folder / "collection.json"
    description = json.dumps(parameters, indent=2, default=int)
    is_claimed = manifest.exists() and manifest.read_bytes() == description.encode()
    # Readers of plate*.h5ad would take any other plate for part of this collection.
    others = [] if is_claimed else sorted(folder.glob("plate*.h5ad"))
    if others:
        msg = f"`{folder}` contains another collection, with `{others[0].name}`"
        raise ParameterError(f"{msg}; choose another folder, or remove its plates")
    missing = {plate: path for plate, path in enumerate(paths) if not path.exists()}
    # Before anything is written: a full disk can crash HDF5.
    bytes_per_cell = 60 + round(2.5 * min(n_genes, 2_230 * math.sqrt(n_genes / _FULL_GENES)))
    needed = sum(100_000 + 40 * n_genes + int(sizes[plate]) * bytes_per_cell for plate in missing)
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    if needed > (free := shutil.disk_usage(existing).free):
        msg = f"about {format_bytes(needed)} are needed, but {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, msg, str(folder))
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        manifest.write_text(description)
        experiment = _Experiment(sizes, seed, n_genes, n_cell_lines, n_drugs)
        _write_plates(experiment, missing, on_progress or (lambda _: None))
    return paths


def plate_sizes(n_cells: int, n_plates: int = 14) -> NDArray[np.int64]:
    """Return the number of cells on each plate of such a collection.

    The sizes suffice to study label entropy, which does not depend on counts.

    Parameters
    ----------
    n_cells, n_plates
        See `write_tahoe_like`.

    Returns
    -------
    Number of cells of each plate, in the order of the plates, int64, shape (n_plates,).

    Raises
    ------
    ParameterError
        There are fewer than 10 cells per plate, or more than 2**53 cells.

    Examples
    --------
    >>> plate_sizes(1_000)
    array([ 76,  54,  82,  65, 104,  59,  72,  47,  78,  68,  89,  62,  74,
            70])
    """
    require_positive("n_cells", n_cells)
    require_positive("n_plates", n_plates)
    if not _MIN_CELLS_PER_PLATE * n_plates <= n_cells <= _MAX_CELLS:
        msg = (
            f"`{_MIN_CELLS_PER_PLATE} * n_plates <= n_cells <= {_MAX_CELLS}` must hold, "
            f"but got n_cells={n_cells}, n_plates={n_plates}"
        )
        raise ParameterError(msg)
    of_14 = np.array(_SHARES_OF_14_PLATES)
    return _apportion(n_cells, of_14 if n_plates == of_14.size else np.ones(n_plates))


def _apportion(total: int, weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Divide ``total`` in proportion to ``weights``, by the method of largest remainders."""
    quotas = total * weights / weights.sum()
    counts: NDArray[np.int64] = np.floor(quotas).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:missing]] += 1
    return counts


# The experiment, and a model of expression.
#
# A *well* is one drug at one dosage; a *condition* is one cell line in one well. Every drug is
# spread over as many plates as it has dosages, so that a held-out plate can be predicted from the
# others. In a small collection a well contains only some cell lines, chosen so that each plate
# still has all its wells and all cell lines.
#
# The logarithm of a gene's abundance is the sum of a baseline and of sparse shifts: markers of
# the cell line, effects of the drug's broad mechanism, of its fine mechanism and of the drug
# itself, in proportion to the logarithm of the dosage, and a slight shift of every gene by the
# plate. A cell's counts are then a multinomial draw of its UMIs.

_DOSAGES = (0.05, 0.5, 5.0)  # in micromolar
# The mechanisms of a drug are its code modulo these numbers; fine ones nest in broad ones.
_N_BROAD = 4
_N_FINE = 25

_CELLS_PER_CONDITION = 20  # unless all lines are in all wells, or some would be missing

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

# Purposes of independent random streams, so that plates can be written in any order and by any
# process. The numbers determine the output.
_WELLS, _LAYOUT, _BASELINE, _CELL_LINES, _DRUGS, _MECHANISMS, _PLATE_EFFECT, _COUNTS = range(8)


def _random(seed: int, purpose: int, plate: int = 0) -> np.random.Generator:
    """Return the generator for one purpose and one plate, at its beginning."""
    return np.random.default_rng([seed, purpose, plate])


class _Experiment:
    """The conditions of a collection, and how often each of them detects each gene.

    Parameters
    ----------
    sizes
        Number of cells on each plate, int64, shape (n_plates,).
    seed, n_genes, n_cell_lines, n_drugs
        See `write_tahoe_like`.
    """

    def __init__(
        self, sizes: NDArray[np.int64], seed: int, n_genes: int, n_cell_lines: int, n_drugs: int
    ) -> None:
        self.sizes, self.seed, self.n_genes = sizes, seed, n_genes
        self.n_cell_lines, self.n_drugs = n_cell_lines, n_drugs
        # Quantiles of a lognormal distribution, so that its tail is the same for any seed.
        quantiles = ndtri((np.arange(n_genes) + 0.5) / n_genes)
        self._baseline = _random(seed, _BASELINE).permutation(_SPREAD_OF_ABUNDANCE * quantiles)
        # With fewer genes, cells have fewer UMIs but more of them per gene: as if the genes were
        # a selection of informative ones.
        self.median_umis = _MEDIAN_UMIS * math.sqrt(n_genes / _FULL_GENES)
        abundance = np.exp(self._baseline)
        abundance *= self.median_umis * math.exp(_SPREAD_OF_UMIS**2 / 2) / abundance.sum()
        self.expected_nonzeros = -float(np.expm1(-abundance).sum())  # of a cell
        n_shifted = max(1, round(_SHIFTED_SHARE * n_genes))
        of_mechanisms = _random(seed, _MECHANISMS)
        # Which genes each cause shifts, and by how much.
        self._shifts = list[tuple[NDArray[np.int64], NDArray[np.float64]]]()
        for rng, n_causes, strength in (
            (_random(seed, _CELL_LINES), n_cell_lines, _CELL_LINE_STRENGTH),
            (of_mechanisms, _N_BROAD, _BROAD_STRENGTH),
            (of_mechanisms, _N_FINE, _FINE_STRENGTH),
            (_random(seed, _DRUGS), n_drugs, _DRUG_STRENGTH),
        ):
            genes = [rng.choice(n_genes, n_shifted, replace=False) for _ in range(n_causes)]
            shifts = rng.standard_normal((n_causes, n_shifted)).clip(-_MAX_SHIFT, _MAX_SHIFT)
            self._shifts.append((np.array(genes), strength * shifts))

    def conditions(self, plate: int) -> pd.DataFrame:
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
        n_plates, n_cells = self.sizes.size, int(self.sizes[plate])
        rank = _random(self.seed, _WELLS).permutation(self.n_drugs)
        # The step from one dosage's plate to the next varies between drugs, so that two drugs which
        # share one plate do not share all of them.
        step = 1 + rank // n_plates % max(1, (n_plates - 1) // 2)
        plate_of_well = (rank[:, None] + step[:, None] * np.arange(len(_DOSAGES))) % n_plates
        wells = np.argwhere(plate_of_well == plate)  # (drug, dosage) of each
        if not len(wells):  # with very few drugs; it then repeats a drug of other plates
            wells = np.array([[plate % self.n_drugs, plate % len(_DOSAGES)]])
        rng = _random(self.seed, _LAYOUT, plate)
        wells, lines = rng.permutation(wells), rng.permutation(self.n_cell_lines)
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

    def batches(
        self, plate: int, conditions: pd.DataFrame, n_umis: NDArray[np.int64]
    ) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        """Yield the cells of a plate, some of one condition at a time.

        Yields
        ------
        The cumulative distribution over genes, float64, shape (n_genes,), non-decreasing, 1.0 at
        the end; and the UMIs of each cell.
        """
        rng = _random(self.seed, _PLATE_EFFECT, plate)
        untreated = self._baseline + _PLATE_STRENGTH * rng.standard_normal(self.n_genes)
        stop = 0
        for drug, dosage, cell_line, n_cells in conditions.itertuples(index=False, name=None):
            scale = 1 + math.log10(_DOSAGES[dosage] / _DOSAGES[-1]) / len(_DOSAGES)
            causes = (
                (cell_line, 1.0),
                (drug % _N_FINE % _N_BROAD, scale),
                (drug % _N_FINE, scale),
                (drug, scale),
            )
            log_abundance = untreated.copy()
            for (genes, shifts), (cause, factor) in zip(self._shifts, causes, strict=True):
                log_abundance[genes[cause]] += factor * shifts[cause]
            cumulative = np.exp(log_abundance, out=log_abundance).cumsum()
            cumulative /= cumulative[-1]
            start, stop = stop, stop + n_cells
            for first in range(start, stop, _CELLS_PER_WRITE):
                yield cumulative, n_umis[first : min(first + _CELLS_PER_WRITE, stop)]


def _draw_counts(
    rng: np.random.Generator, cumulative: NDArray[np.float64], n_umis: NDArray[np.int64]
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int64]]:
    """Draw the counts of cells of one condition.

    Parameters
    ----------
    rng
        The random generator.
    cumulative
        The cumulative distribution over genes, see `_Experiment.distributions`.
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


# Writing plates, without holding their matrices in memory, in several threads.
#
# Threads suffice, since almost all of the time is spent drawing and compressing, outside the GIL
# and HDF5's lock. Unlike processes, they start immediately and demand nothing of the caller.

_INT32_MAX = np.iinfo(np.int32).max
_CELLS_PER_WRITE = 64  # so that one draw fits in a CPU's cache
_GZIP: dict[str, Any] = {"compression": "gzip", "compression_opts": 4}  # anndata's "gzip"
_POLL_SECONDS = 0.2

# Libraries that anndata uses change the list of warning filters, which all threads share.
_anndata_lock = threading.Lock()


def _write_plates(
    experiment: _Experiment, paths: Mapping[int, Path], on_progress: Callable[[int], None]
) -> None:
    """Write plates; if one fails, or the caller is interrupted, stop them all.

    Parameters
    ----------
    experiment
        The collection.
    paths
        Path of each plate that is to be written, by its number, at least one.
    on_progress
        Called in the calling thread, with the number of cells in the collection so far.
    """
    n_written = experiment.sizes.copy()
    n_written[[*paths]] = 0
    num_threads = min(usable_cpu_count(), len(paths))
    with cancellable_threads(num_threads, "cellfeed-synthetic") as threads:
        pending = {
            threads.submit(_write_plate, experiment, *each, n_written) for each in paths.items()
        }
        while pending:
            done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            on_progress(int(n_written.sum()))


def _write_plate(
    experiment: _Experiment, plate: int, path: Path, n_written: NDArray[np.int64]
) -> None:
    """Write one plate and count its cells; the file appears only once it is complete."""
    conditions, n_cells = experiment.conditions(plate), int(experiment.sizes[plate])
    rng = _random(experiment.seed, _COUNTS, plate)
    umis = rng.lognormal(math.log(experiment.median_umis), _SPREAD_OF_UMIS, size=n_cells)
    n_umis = np.maximum(umis.round().astype(np.int64), 1)
    var = pd.DataFrame(index=[f"gene{gene:05d}" for gene in range(experiment.n_genes)])
    obs = _obs(path.stem, conditions, n_umis)
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
                group.attrs["shape"] = np.array([n_cells, experiment.n_genes])
                expected = round(n_cells * experiment.expected_nonzeros)
                indices = _GrowingArray(group, "indices", np.int32, expected)
                data = _GrowingArray(group, "data", np.float32, expected)
                indptr, n_nonzeros = [np.zeros(1, np.int64)], 0
                for cumulative, batch in experiment.batches(plate, conditions, n_umis):
                    if is_cancelled():
                        raise CancelledError
                    genes, counts, row_ends = _draw_counts(rng, cumulative, batch)
                    indices.append(genes)
                    data.append(counts)
                    indptr.append(n_nonzeros + row_ends)
                    n_nonzeros += genes.size
                    n_written[plate] += batch.size
                indices.finish()
                data.finish()
                dtype = np.int32 if n_nonzeros <= _INT32_MAX else np.int64
                pointers = np.concatenate(indptr).astype(dtype)
                group.create_dataset("indptr", data=pointers, maxshape=(None,), **_GZIP)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _obs(plate_name: str, conditions: pd.DataFrame, n_umis: NDArray[np.int64]) -> pd.DataFrame:
    """Return the obs table: one row per cell, the conditions one after the other."""

    def named(name: str, codes: pd.Series[int]) -> pd.Categorical[Any]:
        # Only the names that occur, as in files of single plates.
        return pd.Categorical(codes + 1).rename_categories(f"{name}_{{:03d}}".format)

    drugs = conditions["drug"]
    columns = pd.DataFrame(
        {
            "plate": pd.Categorical([plate_name] * len(drugs)),
            "cell_line": named("cell_line", conditions["cell_line"]),
            "drug": named("drug", drugs),
            "dosage": np.array(_DOSAGES)[conditions["dosage"]],
            "moa_broad": named("moa_broad", drugs % _N_FINE % _N_BROAD),
            "moa_fine": named("moa_fine", drugs % _N_FINE),
        }
    )
    obs = columns.loc[columns.index.repeat(conditions["n_cells"])]
    obs.index = pd.Index([f"{plate_name}_{cell:08d}" for cell in range(n_umis.size)])
    return obs.assign(n_counts=n_umis.astype(np.float32))


class _GrowingArray:
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
        self._dataset.resize((0,))
        self._waiting = np.empty(0, dtype)

    def append(self, values: NDArray[np.generic]) -> None:
        """Append values of the dtype, shape (n,)."""
        self._waiting = np.concatenate([self._waiting, values])
        (size,) = self._dataset.chunks
        while self._waiting.size >= size:
            self._write(self._waiting[:size])
            self._waiting = self._waiting[size:]

    def finish(self) -> None:
        """Write the last chunk, possibly a partial one, and truncate the dataset to its length."""
        length = self._dataset.size + self._waiting.size
        if self._waiting.size:
            self._write(np.pad(self._waiting, (0, self._dataset.chunks[0] - self._waiting.size)))
        self._dataset.resize((length,))

    def _write(self, chunk: NDArray[np.generic]) -> None:
        start = self._dataset.size
        self._dataset.resize((start + chunk.size,))
        compressed = zlib.compress(chunk.data, _GZIP["compression_opts"])
        with phil:  # before 3.16, h5py does not take it here
            self._dataset.id.write_direct_chunk((start,), compressed)
