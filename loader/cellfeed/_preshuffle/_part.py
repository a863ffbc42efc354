"""Writing one part, in this process or on a Dask worker: read, shuffle, write, rename."""

import hashlib
import resource
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._cells import Cells
from cellfeed._collection import Collection, open_collection
from cellfeed._errors import PathError
from cellfeed._preshuffle._dataset import write_dataset
from cellfeed._preshuffle._elements import CsrPart, DensePart, Matrix
from cellfeed._preshuffle._folder import OutputFolder
from cellfeed._preshuffle._job import Job
from cellfeed._preshuffle._obs_table import ObsTable
from cellfeed._reading import PlannedRead, Reader, Stage, in_stages

__all__ = ["Inputs", "peak_memory", "token_of", "write_part", "write_part_of"]

# A process holds the buffers of one part; the threads of a Dask worker take turns.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The opened inputs of a job."""

    collection: Collection
    obs: ObsTable
    var: pd.DataFrame

    @classmethod
    def open(cls, job: Job, collection: Collection | None = None) -> "Inputs":
        """Open the files of a job, which must not have changed since it began."""
        for file in (*job.inputs, *job.linked):
            file.check()
        if collection is None:
            collection = open_collection(job.paths, elements=[job.element])
        obs = ObsTable(collection.sources, job.paths)
        return cls(collection, obs, collection.sources[0].read_var())


def write_part(
    folder: OutputFolder,
    job: Job,
    inputs: Inputs,
    number: int,
    on_share: Callable[[float], object],
) -> None:
    """Write a part, unless it exists.

    Parameters
    ----------
    folder, job, inputs
        The output, the job and its inputs.
    number
        Number of the part.
    on_share
        Called from time to time with the share of the work that is done.
    """
    if folder.part(number).exists():
        return
    part = job.part(number)
    obs = inputs.obs.read(part.rows).iloc[part.order]
    matrix = _read(job, inputs.collection, number, lambda share: on_share(share / 2))
    with folder.new_part(number) as place:
        write_dataset(
            place,
            job,
            matrix=matrix,
            obs=obs,
            var=inputs.var,
            on_share=lambda share: on_share((1 + share) / 2),
        )


def write_part_of(path: str, token: str, number: int) -> int:
    """Write a part of the job that is recorded in an output folder; return `peak_memory`.

    A Dask worker gets few arguments, and checks that it sees the same files.
    """
    with _ONE_AT_A_TIME:
        folder, job, inputs = _opened(path, token)
        write_part(folder, job, inputs, number, lambda share: None)  # noqa: ARG005
    return peak_memory()


def token_of(job: Job) -> str:
    """Return a short identifier of a job."""
    return hashlib.sha256(job.to_json().encode()).hexdigest()


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@lru_cache(maxsize=1)
def _opened(path: str, token: str) -> tuple[OutputFolder, Job, Inputs]:
    folder = OutputFolder(Path(path))
    job = folder.begun()
    if job is None or token_of(job) != token:
        msg = f"{path}: is not visible to a Dask worker; give an output that all machines share"
        raise PathError(msg)
    return folder, job, Inputs.open(job)


def _read(
    job: Job, collection: Collection, number: int, on_share: Callable[[float], object]
) -> Matrix:
    part = job.part(number)
    n_rows, dtype = part.rows.size, np.dtype(job.dtype)
    held: CsrPart | DensePart
    if job.n_elements is None:
        held = DensePart((n_rows, job.n_vars), dtype)
    else:
        n_elements, counts = round(n_rows * job.elements_per_cell), job.codec == "delta"
        held = CsrPart(n_rows, n_elements, dtype, job.index_dtype, counts=counts)
    n = job.cells_per_piece
    pieces = (part.rows[start : start + n] for start in range(0, n_rows, n))
    n_read = 0
    with Reader(collection) as reader:

        def planned(rows: NDArray[np.int64]) -> PlannedRead:
            return reader.plan(rows, np.arange(rows.size), rows.size).readahead()

        def read(plan: PlannedRead) -> Cells:
            return next(reader.read_planned(plan)).to_scipy()

        # One is read while the one before it is copied, and the one after it is on its way.
        with in_stages(pieces, [Stage(planned, 1), Stage(read, 1)]) as found:
            for cells in found:
                held.append(cells[job.element])
                n_read += len(cells)
                on_share(n_read / n_rows)
    return held.shuffled(part.order)
