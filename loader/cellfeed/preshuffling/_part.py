"""Writing one part: read, shuffle, write, rename."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.collection import Collection
from cellfeed.fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed.preshuffling._dataset import CsrPart, write_dataset
from cellfeed.preshuffling._inputs import Inputs
from cellfeed.preshuffling._job import Job, OutputFolder
from cellfeed.rows import Cells


def write_part(
    folder: OutputFolder,
    job: Job,
    inputs: Inputs,
    number: int,
    on_share: Callable[[float], object],
) -> None:
    """Write a part.

    Parameters
    ----------
    folder, job, inputs
        The output, the job and its inputs.
    number
        Number of the part.
    on_share
        Called from time to time with the share of the work that is done.
    """
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
