"""Writing one part, in this process or on a Dask worker: read, shuffle, write, rename."""

import resource
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.bytes import digest_of
from cellfeed.collection import Collection
from cellfeed.console import format_bytes
from cellfeed.extending import ParameterError, PathError
from cellfeed.fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed.preshuffling._dataset import CsrPart, write_dataset
from cellfeed.preshuffling._inputs import Inputs
from cellfeed.preshuffling._job import Job, OutputFolder
from cellfeed.rows import Cells

# A process holds the buffers of one part; the threads of a Dask worker take turns.
_ONE_AT_A_TIME = threading.Lock()


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
    if folder.part(job.first_part + number).exists():
        return
    part = inputs.part(job, number)
    rows = part.rows
    obs = inputs.obs.read(rows).iloc[part.order]
    frames = {name: each.read(rows).iloc[part.order] for name, each in inputs.frames.items()}
    matrices = _read(job, inputs.collection, rows, lambda share: on_share(share / 2))
    with folder.new_part(job.first_part + number) as place:
        write_dataset(
            place,
            job,
            inputs,
            matrices=matrices,
            order=part.order,
            obs=obs,
            frames=frames,
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


def peak_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@lru_cache(maxsize=1)
def _opened(path: str, token: str) -> tuple[OutputFolder, Job, Inputs]:
    folder = OutputFolder(Path(path))
    job = folder.begun()
    if job is None or digest_of(job.to_json()) != token:
        msg = f"{path}: is not visible to a Dask worker; give an output that all machines share"
        raise PathError(msg)
    return folder, job, Inputs.open(job, folder)


def _read(
    job: Job,
    collection: Collection,
    rows: NDArray[np.int64],
    on_share: Callable[[float], object],
) -> dict[str, CsrPart | NDArray[Any]]:
    """Return the matrices of a part by name, in storage order."""
    n_rows = rows.size
    found = dict[str, CsrPart | NDArray[Any]]()
    for each in job.matrices:
        dtype = np.dtype(each.dtype)
        if each.is_sparse:
            n_elements = round(n_rows * each.elements_per_cell)
            found[each.name] = CsrPart(n_rows, n_elements, dtype, each.index_dtype)
        else:
            found[each.name] = np.empty((n_rows, *each.row_shape), dtype)
    n = job.cells_per_piece
    pieces = (rows[start : start + n] for start in range(0, n_rows, n))
    n_read = 0
    with Reader(collection) as reader:

        def planned(rows: NDArray[np.int64]) -> PlannedRead:
            return reader.plan(rows, np.arange(rows.size), rows.size).readahead()

        def read(plan: PlannedRead) -> Cells:
            return next(reader.read_planned(plan)).to_scipy()

        # One is read while the one before it is copied, and the one after it is on its way.
        with in_stages(pieces, [Stage(planned, 1), Stage(read, 1)]) as cells_read:
            for cells in cells_read:
                for name, matrix in found.items():
                    if isinstance(matrix, CsrPart):
                        matrix.append(cells[name])
                    else:
                        matrix[n_read : n_read + len(cells)] = cells[name]
                n_read += len(cells)
                on_share(n_read / n_rows)
    return found


# Writing parts on the workers of a Dask cluster.

# A worker that dies, or a file system that falters, costs a part that is begun again.
_RETRIES = 3
_SECONDS_TO_CONNECT = 20


def written_on_dask(
    address: str, folder: OutputFolder, job: Job, numbers: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Write parts on the workers of a cluster, one at a time on each.

    Parameters
    ----------
    address
        Address of the scheduler.
    folder, job
        The output, which every worker sees under the same path, and the job.
    numbers
        Numbers of the parts.

    Yields
    ------
    The number of each completed part, and the peak memory of its worker.

    Raises
    ------
    ParameterError
        Dask is not installed, there is no scheduler, or the memory limit of a worker is too low.
    PathError
        A worker does not see the files.
    """
    try:
        distributed: Any = import_module("distributed")
    except ImportError as error:
        msg = "`scheduler` needs Dask; install it with `pip install 'cellfeed[dask]'`"
        raise ParameterError(msg) from error
    try:
        client = distributed.Client(address, timeout=_SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, ValueError) as error:
        msg = f"no Dask scheduler answers at {address}; start one with `dask scheduler`"
        raise ParameterError(msg) from error
    with client:
        _check_workers(client, job.memory)
        n, path, token = len(numbers), str(folder.path), digest_of(job.to_json())
        futures = client.map(
            write_part_of, [path] * n, [token] * n, numbers, pure=False, retries=_RETRIES
        )
        number_of = {future.key: number for future, number in zip(futures, numbers, strict=True)}
        try:
            for future, peak in distributed.as_completed(
                futures, with_results=True, loop=client.loop
            ):
                yield number_of[future.key], peak
        except distributed.KilledWorker as error:
            msg = (
                "several Dask workers died while writing the same part; give less `memory`, or "
                "give the workers more"
            )
            raise ParameterError(msg) from error


def _check_workers(client: Any, memory: int) -> None:
    workers = client.scheduler_info(n_workers=-1)["workers"]
    if not workers:
        msg = "the Dask scheduler has no workers; start some with `dask worker ADDRESS`"
        raise ParameterError(msg)
    for address, worker in workers.items():
        limit = worker["memory_limit"]
        if limit and limit < memory:
            msg = (
                f"the Dask worker {address} may use {format_bytes(limit)}, less than the "
                f"{format_bytes(memory)} of `memory`; give less `memory`, or give the workers more"
            )
            raise ParameterError(msg)
