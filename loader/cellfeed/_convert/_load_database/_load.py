"""Loading a collection into a database, by several processes."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import resource_tracker
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location, StorageOptions
from cellfeed._collection import open_collection
from cellfeed._convert._load_database._job import (
    Job,
    begin,
    describe_job,
    finish,
    hold,
    python_values,
)
from cellfeed._decode._packed import pack_row
from cellfeed._errors import DeliveryError, FormatError, ParameterError, one_line, require_positive
from cellfeed._rows import Cells
from cellfeed._storages import Source
from cellfeed._storages._postgres._database import Database, escaped, psycopg, quoted

# Writing one part: its cells and their packed rows, in one transaction.


class PartWriter:
    """Writes parts over one connection, which is reopened if it was dropped.

    Parameters
    ----------
    job
        The job.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._connection: Any = None

    def write(self, number: int) -> None:
        """Write a part, unless it exists.

        Raises
        ------
        RemoteError
            The server refuses it.
        FormatError
            A file is damaged, or has text that PostgreSQL cannot store.
        """
        job, library = self._job, psycopg(self._job.location)
        rows = job.rows(number)
        cells = job.collection[rows]
        packed = [_packed(cells, each.name) for each in job.elements]
        obs = job.obs.read(rows)
        columns = [python_values(each, obs[each.name]) for each in job.obs_columns]
        names = [str(each) for each in obs.index]

        def attempt() -> None:
            connection = self._connected()
            try:
                with connection.transaction():
                    connection.execute("SET LOCAL synchronous_commit = off")  # the last one waits
                    self._insert(connection, number, packed)
                    self._copy(
                        connection, "cells", zip(rows.tolist(), names, *columns, strict=True)
                    )
                    self._copy(
                        connection,
                        "packed",
                        zip(rows.tolist(), *packed, strict=True),
                        is_binary=True,
                    )
            except library.errors.UniqueViolation:
                pass  # another process wrote it meanwhile, of a run that was killed
            except library.DataError as error:
                msg = (
                    f"{job.location}: PostgreSQL cannot store obs of cells {rows[0]} to {rows[-1]}"
                )
                raise FormatError(f"{msg} ({one_line(error)}); correct it in the files") from None

        job.database.retried(attempt)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    def _connected(self) -> Any:
        if self._connection is None or self._connection.closed:
            self._connection = self._job.database.connect(for_writing=True)
        return self._connection

    def _insert(self, connection: Any, number: int, packed: list[list[bytes]]) -> None:
        sizes = [sum(map(len, each)) for each in packed]
        table = escaped(quoted(self._job.schema, "parts"))
        connection.execute(f"INSERT INTO {table} VALUES (%s, %s)", (number, sizes))  # noqa: S608

    def _copy(self, connection: Any, table: str, rows: Any, *, is_binary: bool = False) -> None:
        query = f"COPY {quoted(self._job.schema, table)} FROM STDIN"
        with (
            connection.cursor() as cursor,
            cursor.copy(f"{query} (FORMAT BINARY)" if is_binary else query) as copy,
        ):
            if is_binary:
                copy.set_types(["int8", *("bytea" for _ in self._job.elements)])
            for row in rows:
                copy.write_row(row)


def _packed(cells: Cells, name: str) -> list[bytes]:
    """Return each row of an element, packed."""
    rows = cells[name]
    if isinstance(rows, np.ndarray):
        dense: NDArray[Any] = rows.reshape(len(rows), -1)
        return [pack_row(None, each) for each in dense]
    ends = pairwise(rows.indptr.tolist())
    return [pack_row(rows.indices[i:j], rows.data[i:j]) for i, j in ends]


PathLike = str | os.PathLike[str]

_writer: PartWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A collection that was loaded into a database.

    Parameters
    ----------
    url
        URL for `open_collection`, without a password.
    n_cells, n_parts, n_parts_written
        Number of cells, of parts, and of parts that this call wrote.
    seconds
        Duration of this call.
    """

    url: str
    n_cells: int
    n_parts: int
    n_parts_written: int
    seconds: float


def load_database(
    paths: PathLike | Source | Iterable[PathLike | Source],
    url: PathLike,
    name: str,
    *,
    elements: Sequence[str] = ("X",),
    obs: Sequence[str] | None = None,
    processes: int = 1,
    database_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> Loaded:
    """Write a collection into a PostgreSQL database, from which `open_collection` reads it.

    docs/how-to/postgres.md describes the tables. Parts of some thousand cells are each written in
    one transaction. To resume a load that was stopped or killed, repeat the same call: only missing
    parts are written. A load of cells in memory, or of other cells that cannot be identified,
    cannot be resumed.

    Parameters
    ----------
    paths
        As for `open_collection`, with its default join of genes.
    url
        URL of the database, as libpq takes it: ``postgresql://user@host/db``.
    name
        Name of the collection in the database; a schema of this name is created.
    elements
        Names of the elements to write.
    obs
        Names of the obs columns to write; all if None. With several files, a column with the file
        of each cell is added.
    processes
        Number of processes that write, each over its own connection.
    database_options
        Other options of libpq, such as ``password``. They never appear in messages.
    on_progress
        Called with the number of cells in the database, and the total number.

    Raises
    ------
    RemoteError
        The server cannot be reached, or refuses.
    ParameterError
        The name is used for something else, another process is loading it, or a column is missing.
    DeliveryError
        A process died.
    CellfeedError
        See `open_collection`.

    Examples
    --------
    >>> from cellfeed import load_database
    >>> load_database("plates", "postgresql://me@host/cells", "plates")  # doctest: +SKIP
    """
    start = time.perf_counter()
    processes = require_positive("processes", processes)
    location = Location.of(url).with_options(StorageOptions(dict(database_options or {})))
    if location.scheme not in ("postgresql", "postgres"):
        msg = f"{location.shown}: is not a database; give postgresql://user@host/database"
        raise ParameterError(msg)
    database = Database(location, "database_options")
    with closing(database.connect(for_writing=True)) as connection:
        collection = open_collection(paths, elements=elements)
        job = describe_job(collection, database, name, obs)
        with _failures_named(database):
            hold(connection, job)
            begun = begin(connection, job)
        missing = begun or ()
        done = len(collection) - sum(len(job.rows(number)) for number in missing)
        for number in _written(job, missing, processes):
            done += len(job.rows(number))
            if on_progress is not None:
                on_progress(done, len(collection))
        if begun is not None:
            database.retried(lambda: _finish(job))
    return Loaded(
        url=_url_of(location, name),
        n_cells=len(collection),
        n_parts=job.n_parts,
        n_parts_written=len(missing),
        seconds=time.perf_counter() - start,
    )


@contextmanager
def _failures_named(database: Database) -> Iterator[None]:
    library = psycopg(database.location)
    try:
        yield
    except library.DataError as error:
        msg = f"{database.location}: PostgreSQL cannot store a name or category ({one_line(error)})"
        raise FormatError(f"{msg}; correct it in the files") from None
    except library.Error as error:
        raise database.failure(error) from None


def _finish(job: Job) -> None:
    with closing(job.database.connect(for_writing=True)) as connection:
        finish(connection, job)


def _url_of(location: Location, name: str) -> str:
    return f"{location}{'&' if '?' in location.text else '?'}collection={quote(name)}"


def _written(job: Job, numbers: Sequence[int], processes: int) -> Iterator[int]:
    """Write parts; yield the number of each part once it is written."""
    if processes == 1 or len(numbers) < 2:  # noqa: PLR2004 - nothing to divide
        with closing(PartWriter(job)) as writer:
            for number in numbers:
                writer.write(number)
                yield number
        return
    with ProcessPoolExecutor(
        min(processes, len(numbers)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(job,),
    ) as executor:
        try:
            with _without_interrupts():
                written = executor.map(_write, numbers)
            yield from written
        except BrokenExecutor as error:
            msg = f"{job.location}: a writing process died, perhaps for lack of memory"
            raise DeliveryError(f"{msg}; repeat the call with fewer `processes`") from error
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Start processes that get no Ctrl-C, not even while they import: this one stops them."""
    if not hasattr(signal, "pthread_sigmask"):  # not on this system
        yield
        return
    resource_tracker.ensure_running()  # starting it would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(job: Job) -> None:
    global _writer  # noqa: PLW0603 - one for each process
    _writer = PartWriter(job)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that waits


def _write(number: int) -> int:
    _writer.write(number)
    return number
