"""Writing one part, in this process or on a Dask worker: read, shuffle, write, rename."""

import hashlib
import resource
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._collection import Collection, exact_numbers, join_column, open_collection
from cellfeed._convert._preshuffle._dataset import CsrPart, write_dataset
from cellfeed._convert._preshuffle._job import Job, OutputFolder, file_labels
from cellfeed._errors import FormatError, PathError
from cellfeed._fetch import PlannedRead, Reader, Stage, in_stages
from cellfeed._rows import Cells, NumericColumn
from cellfeed._runs import expand, merge_consecutive, split_at
from cellfeed._storages import Source

# obs columns of many files as one table: the same columns and dtypes in every part.


class ObsTable:
    """obs of a collection with the provenance of each cell, read by rows.

    The columns are those of all files, in order of first appearance; if a file lacks a column, its
    cells have missing values. Categories are the union over the files.

    Parameters
    ----------
    sources, names
        The sources of the collection, and their names.
    chosen
        Names of the columns; all columns if None.

    Raises
    ------
    MismatchError
        A column is numeric in one file and text or categorical in another.
    FormatError
        A file is damaged.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        names: tuple[str, ...],
        chosen: Sequence[str] | None = None,
    ) -> None:
        self.starts = np.cumsum([0, *(source.n_rows for source in sources)])
        self._sources = sources
        there = [tuple(source.obs_names()) for source in sources]
        taken = tuple(dict.fromkeys(name for names in there for name in names))
        columns = taken if chosen is None else tuple(chosen)
        self._names = [tuple(name for name in names if name in columns) for names in there]
        no_rows = np.empty(0, np.int64)
        empty = [
            source.read_obs_rows(names, no_rows)
            for source, names in zip(sources, self._names, strict=True)
        ]
        self._dtypes = {}
        for name in columns:
            own = [
                (source.location, table[name])
                for source, table in zip(sources, empty, strict=True)
                if name in table
            ]
            everywhere = len(own) == len(sources)
            self._dtypes[name] = _common_dtype(name, own, everywhere=everywhere)
        index_name = empty[0].index.name
        self._index_name = None if index_name in columns else index_name
        self._source = pd.CategoricalDtype(list(file_labels(names)))
        self.provenance = (_free("source_file", taken), _free("source_row", taken))

    def read(self, rows: NDArray[np.int64]) -> pd.DataFrame:
        """Return the obs of cells, with their provenance.

        Parameters
        ----------
        rows
            Ascending rows of the collection, int64, shape (n,).
        """
        pieces = [(k, expand(runs)) for k, runs in split_at(merge_consecutive(rows), self.starts)]
        read = [self._read_source(k, local) for k, local in pieces]
        table = pd.DataFrame(
            {name: _joined([columns[name] for _, columns in read]) for name in self._dtypes},
            index=pd.Index(
                np.concatenate([names for names, _ in read]), dtype=object, name=self._index_name
            ),
        )
        source_file, source_row = self.provenance
        codes = np.repeat([k for k, _ in pieces], [local.size for _, local in pieces])
        table[source_file] = pd.Categorical.from_codes(codes, dtype=self._source)
        table[source_row] = np.concatenate([local for _, local in pieces])
        return table

    def _read_source(self, number: int, rows: NDArray[np.int64]) -> "tuple[Any, dict[str, Any]]":
        """Return the names of cells of a source, and all columns."""
        source, names = self._sources[number], self._names[number]
        table = source.read_obs_rows(names, rows)
        if len(table) != rows.size:
            msg = (
                f"{source.location}: obs has {len(table)} rows, but {rows.size} expected; write "
                "the file again"
            )
            raise FormatError(msg)
        columns = dict[str, Any]()
        for name, dtype in self._dtypes.items():
            if name not in names:
                missing = pd.Series([None], dtype=dtype)
                columns[name] = missing.repeat(rows.size).reset_index(drop=True)
                continue
            column = table[name].reset_index(drop=True)
            if isinstance(dtype, np.dtype) and dtype.kind in "iuf":
                columns[name] = pd.Series(exact_numbers(name, source.location, column, dtype))
            else:
                columns[name] = column.astype(dtype)
        return np.asarray(table.index, dtype=object), columns


def _common_dtype(
    name: str, columns: "Sequence[tuple[Location, pd.Series[Any]]]", *, everywhere: bool
) -> Any:
    """Return a dtype that can hold a column of all files, with missing values if needed."""
    dtypes = [column.dtype for _, column in columns]
    first, joint = dtypes[0], join_column(name, columns)
    same = all(dtype == first for dtype in dtypes)
    if isinstance(joint, NumericColumn):
        if same and (everywhere or pd.api.types.is_extension_array_dtype(first)):
            return first
        # As in a collection: NaN where it is missing, of pandas' nullable numbers too.
        numbers = joint.values  # noqa: PD011 - not pandas'
        return numbers.dtype if everywhere else np.result_type(numbers.dtype, np.float64)
    if all(isinstance(dtype, pd.CategoricalDtype) for dtype in dtypes):
        return first if same else pd.CategoricalDtype(pd.Index(joint.categories).infer_objects())
    is_boolean = any(pd.api.types.is_bool_dtype(dtype) for dtype in dtypes)
    if same and everywhere:
        return first
    return pd.BooleanDtype() if is_boolean else pd.StringDtype()


def _joined(parts: "Sequence[pd.Series[Any]]") -> Any:
    return parts[0].array if len(parts) == 1 else pd.concat(parts, ignore_index=True).array


def _free(name: str, taken: Sequence[str]) -> str:
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


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
    matrix = _read(job, inputs.collection, part.rows, lambda share: on_share(share / 2))
    with folder.new_part(number) as place:
        write_dataset(
            place,
            job,
            matrix=matrix,
            order=part.order,
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
    job: Job,
    collection: Collection,
    rows: NDArray[np.int64],
    on_share: Callable[[float], object],
) -> CsrPart | NDArray[Any]:
    """Return the matrix of a part, in storage order."""
    n_rows, dtype = rows.size, np.dtype(job.dtype)
    matrix: CsrPart | NDArray[Any]
    if job.n_elements is None:
        matrix = np.empty((n_rows, job.n_vars), dtype)
    else:
        n_elements, counts = round(n_rows * job.elements_per_cell), job.codec == "delta"
        matrix = CsrPart(n_rows, n_elements, dtype, job.index_dtype, counts=counts)
    n = job.cells_per_piece
    pieces = (rows[start : start + n] for start in range(0, n_rows, n))
    n_read = 0
    with Reader(collection) as reader:

        def planned(rows: NDArray[np.int64]) -> PlannedRead:
            return reader.plan(rows, np.arange(rows.size), rows.size).readahead()

        def read(plan: PlannedRead) -> Cells:
            return next(reader.read_planned(plan)).to_scipy()

        # One is read while the one before it is copied, and the one after it is on its way.
        with in_stages(pieces, [Stage(planned, 1), Stage(read, 1)]) as found:
            for cells in found:
                if isinstance(matrix, CsrPart):
                    matrix.append(cells[job.element])
                else:
                    matrix[n_read : n_read + len(cells)] = cells[job.element]
                n_read += len(cells)
                on_share(n_read / n_rows)
    return matrix
