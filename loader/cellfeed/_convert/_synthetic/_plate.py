"""Writing one plate as an h5ad file, condition by condition."""

import os
import re
import threading
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
from anndata import AnnData
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray

from cellfeed._convert._synthetic._experiment import (
    DOSAGES,
    CountRows,
    ExpressionModel,
    PlateLayout,
    Stream,
    broad_mechanism,
    draw_counts,
    draw_n_umis,
    fine_mechanism,
    random_stream,
)

# Writing a sparse matrix in anndata's layout without holding it in memory.

_INT32_MAX = np.iinfo(np.int32).max
_GZIP_LEVEL = 4  # anndata's compression="gzip"


class CsrWriter:
    """Appends rows to a CSR matrix; `finish` makes it readable.

    Parameters
    ----------
    group
        An empty group of a file that is open for writing.
    shape
        Rows and columns of the finished matrix.
    expected_nonzeros
        Estimated number of non-zeros. HDF5 chunks get the size that h5py guesses for that length,
        as when anndata writes the whole array in one call.
    """

    def __init__(
        self, group: h5py.Group, *, shape: tuple[int, int], expected_nonzeros: int
    ) -> None:
        group.attrs["encoding-type"] = "csr_matrix"
        group.attrs["encoding-version"] = "0.1.0"
        group.attrs["shape"] = np.array(shape, dtype=np.int64)
        self._group = group
        self._indptr = np.zeros(shape[0] + 1, dtype=np.int64)
        self._n_rows = 0
        self._indices = _ChunkWriter(_create(group, "indices", expected_nonzeros, np.int32))
        self._data = _ChunkWriter(_create(group, "data", expected_nonzeros, np.float32))

    def append(self, rows: CountRows) -> None:
        """Append rows."""
        self._indices.append(rows.genes)
        self._data.append(rows.counts)
        stop = self._n_rows + rows.row_ends.size
        self._indptr[self._n_rows + 1 : stop + 1] = self._indptr[self._n_rows] + rows.row_ends
        self._n_rows = stop

    def finish(self) -> None:
        """Write the remaining values, and the row pointers."""
        self._indices.finish()
        self._data.finish()
        dtype = np.int32 if self._indptr[-1] <= _INT32_MAX else np.int64
        _create(self._group, "indptr", self._indptr.size, dtype)[:] = self._indptr


class _ChunkWriter:
    """Appends to a gzipped dataset; compresses outside HDF5's lock and the GIL."""

    def __init__(self, dataset: h5py.Dataset) -> None:
        self._dataset = dataset
        self._chunk = np.zeros(dataset.chunks, dtype=dataset.dtype)
        self._filled = 0
        self._written = 0

    def append(self, values: NDArray[np.generic]) -> None:
        while values.size:
            taken = values[: self._chunk.size - self._filled]
            self._chunk[self._filled : self._filled + taken.size] = taken
            self._filled += taken.size
            values = values[taken.size :]
            if self._filled == self._chunk.size:
                self._write_chunk()

    def finish(self) -> None:
        """Write the last chunk, possibly a partial one, and truncate the dataset to its length."""
        length = self._written + self._filled
        if self._filled:
            self._chunk[self._filled :] = 0
            self._write_chunk()
        self._dataset.resize((length,))

    def _write_chunk(self) -> None:
        end = self._written + self._chunk.size
        if end > self._dataset.shape[0]:
            self._dataset.resize((end,))
        compressed = zlib.compress(self._chunk.data, _GZIP_LEVEL)
        with phil:  # before 3.16, h5py does not take it here
            self._dataset.id.write_direct_chunk((self._written,), compressed)
        self._written, self._filled = end, 0


def _create(group: h5py.Group, name: str, length: int, dtype: type[np.generic]) -> h5py.Dataset:
    return group.create_dataset(
        name,
        shape=(length,),
        maxshape=(None,),
        dtype=dtype,
        compression="gzip",
        compression_opts=_GZIP_LEVEL,
    )


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


# Writing several plates concurrently.
#
# Threads suffice, since almost all of the time is spent drawing and compressing, outside the GIL
# and HDF5's lock. Unlike processes, they start immediately and demand nothing of the caller.

_POLL_SECONDS = 0.2


def write_plates(
    model: ExpressionModel,
    paths: Mapping[int, Path],
    on_progress: Callable[[int], None],
    n_threads: int,
) -> None:
    """Write plates; if one fails, or the caller is interrupted, stop them all.

    Parameters
    ----------
    model
        The expression in the collection.
    paths
        Path of each plate, by its number.
    on_progress
        Called in the calling thread, with the number of cells written so far.
    n_threads
        Number of plates that are written concurrently.
    """
    work = _Work(model, paths)
    with ThreadPoolExecutor(n_threads) as pool:
        pending = {pool.submit(work.write, plate) for plate in paths}
        try:
            while pending:
                done, pending = wait(pending, timeout=_POLL_SECONDS)
                for future in done:
                    future.result()
                on_progress(sum(work.n_written.values()))
        except BaseException:
            work.cancelled.set()
            raise


class _Work:
    """State shared by the threads."""

    def __init__(self, model: ExpressionModel, paths: Mapping[int, Path]) -> None:
        self.cancelled = threading.Event()
        self.n_written = dict.fromkeys(paths, 0)
        self._model = model
        self._paths = paths

    def write(self, plate: int) -> None:
        def count(n_cells: int) -> None:
            if self.cancelled.is_set():
                raise CancelledError
            self.n_written[plate] += n_cells

        # The thread that cancelled reports why; and after a failure HDF5 is better left alone.
        with suppress(CancelledError):
            count(0)
            try:
                write_plate(self._model, plate, self._paths[plate], count)
            except Exception:
                self.cancelled.set()
                raise
