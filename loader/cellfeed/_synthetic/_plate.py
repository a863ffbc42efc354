"""Writing one plate as an h5ad file, condition by condition."""

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from numpy.typing import NDArray

from cellfeed._synthetic._csr_writer import CsrWriter
from cellfeed._synthetic._experiment import (
    DOSAGES,
    PlateLayout,
    broad_mechanism,
    fine_mechanism,
)
from cellfeed._synthetic._expression import ExpressionModel, draw_counts, draw_n_umis
from cellfeed._synthetic._streams import Stream, random_stream

__all__ = ["write_plate"]

_CELLS_PER_WRITE = 64  # so that one draw fits in a CPU's cache

# Libraries that anndata uses change the list of warning filters, which all threads share.
_anndata_lock = threading.Lock()


def write_plate(
    model: ExpressionModel, plate: int, path: Path, on_written: Callable[[int], None]
) -> None:
    """Write one plate; the file appears at ``path`` only once it is complete.

    Parameters
    ----------
    model
        The expression in the collection.
    plate
        Number of the plate, 0 <= plate < n_plates.
    path
        Path of the file; its folder must exist.
    on_written
        Called with the number of cells written since the last call. An exception that it raises
        stops the writing.
    """
    unfinished = path.with_name(path.name + ".part")
    try:
        _write(model, plate, unfinished, on_written)
        unfinished.replace(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise _in_short(error, path) from error
    finally:
        unfinished.unlink(missing_ok=True)


def _in_short(error: Exception, path: Path) -> Exception:
    """Return the exception that Python would raise for a full disk or a limit of file sizes.

    HDF5 describes these at length, in errors of any type. If closing the file fails as well, HDF5
    raises a RuntimeError which hides the first error.
    """
    first = error.__context__ if isinstance(error, RuntimeError) else error
    number = re.search(r"\berrno = (\d+)", f"{error} {first}")
    code = getattr(first, "errno", None) or (int(number[1]) if number else 0)
    return OSError(code, os.strerror(code), str(path)) if code else error


def _write(
    model: ExpressionModel, plate: int, path: Path, on_written: Callable[[int], None]
) -> None:
    experiment = model.experiment
    layout = experiment.layout(plate)
    rng = random_stream(experiment.seed, Stream.COUNTS, plate)
    n_umis = draw_n_umis(rng, int(layout.n_cells.sum()), experiment.n_genes)

    # anndata writes everything except the matrix, which would have to fit in memory.
    with _anndata_lock:
        var = pd.DataFrame(index=[f"gene{gene:05d}" for gene in range(experiment.n_genes)])
        obs = _obs(experiment.plate_names[plate], layout, n_umis)
        AnnData(obs=obs, var=var).write_h5ad(path, compression="gzip")
    with h5py.File(path, "r+") as file:
        _write_matrix(file.create_group("X"), model, plate, layout, n_umis, rng, on_written)


def _write_matrix(
    group: h5py.Group,
    model: ExpressionModel,
    plate: int,
    layout: PlateLayout,
    n_umis: NDArray[np.int64],
    rng: np.random.Generator,
    on_written: Callable[[int], None],
) -> None:
    expression = model.on_plate(plate)
    matrix = CsrWriter(
        group,
        shape=(n_umis.size, model.experiment.n_genes),
        expected_nonzeros=model.expected_nonzeros(n_umis.size),
    )
    stops = layout.n_cells.cumsum()
    for condition, stop in enumerate(stops):
        cumulative = expression.cumulative(
            cell_line=layout.cell_line[condition],
            drug=layout.drug[condition],
            dosage=layout.dosage[condition],
        )
        for start in range(stop - layout.n_cells[condition], stop, _CELLS_PER_WRITE):
            batch = n_umis[start : min(start + _CELLS_PER_WRITE, stop)]
            matrix.append(draw_counts(rng, cumulative, batch))
            on_written(batch.size)
    matrix.finish()


def _obs(plate_name: str, layout: PlateLayout, n_umis: NDArray[np.int64]) -> pd.DataFrame:
    """Return the obs table: one row per cell, the conditions one after the other."""
    conditions = pd.DataFrame(
        {
            "plate": pd.Categorical([plate_name] * layout.n_cells.size),
            "cell_line": _named("cell_line_", layout.cell_line),
            "drug": _named("drug_", layout.drug),
            "dosage": np.array(DOSAGES)[layout.dosage],
            "moa_broad": _named("moa_broad_", broad_mechanism(layout.drug)),
            "moa_fine": _named("moa_fine_", fine_mechanism(layout.drug)),
        }
    )
    obs = conditions.loc[conditions.index.repeat(layout.n_cells)]
    obs.index = pd.Index([f"{plate_name}_{cell:08d}" for cell in range(n_umis.size)])
    return obs.assign(n_counts=n_umis.astype(np.float32))


def _named(prefix: str, codes: NDArray[np.int64]) -> "pd.Categorical[str]":
    """Return a categorical with only the names that occur, as in files of single plates."""
    present, local = np.unique(codes, return_inverse=True)
    names = pd.Index([f"{prefix}{code + 1:03d}" for code in present])
    return pd.Categorical.from_codes(local, names)
