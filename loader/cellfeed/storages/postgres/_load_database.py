"""Loading a collection into a database: in parts, each in one transaction."""

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import Location, digest_of, digest_of_array, lasting_identity
from cellfeed.collection import Collection, open_collection, require_named
from cellfeed.extending import FormatError, ParameterError, one_line, require_list
from cellfeed.fetch import Stage, in_stages
from cellfeed.preshuffling import InputFile, ObsTable
from cellfeed.rows import Cells
from cellfeed.sources import Source
from cellfeed.sources.anndata import AnnDataObjectSource
from cellfeed.storages.postgres._database import (
    VERSION,
    Database,
    ElementColumn,
    ObsColumn,
    Session,
    column_names,
    escaped,
    psycopg,
    quoted,
)
from cellfeed.storages.postgres._packed import pack_row

# Converting obs columns of pandas to columns of a database table.

_INTEGERS = {"int8": "smallint", "uint8": "smallint", "int16": "smallint", "uint16": "integer",
             "int32": "integer", "uint32": "bigint", "int64": "bigint",
             "uint64": "numeric(20, 0)"}  # fmt: skip
_FLOATS = {"float16": "real", "float32": "real", "float64": "double precision"}
_TYPES = {**_INTEGERS, **_FLOATS, "bool": "boolean", "boolean": "boolean", "text": "text"}
_OF_CATEGORIES = {bool: "boolean", int: "bigint", float: "double precision", str: "text"}


def _described(name: str, column: str, values: "pd.Series[Any]") -> ObsColumn:
    """Return the description of an obs column, from its names in obs and in the table of cells."""
    dtype = values.dtype
    if not isinstance(dtype, pd.CategoricalDtype):
        known = str(dtype) if str(dtype).lower() in _TYPES else "text"
        return ObsColumn(name=name, column=column, dtype=known)
    categories = dtype.categories.tolist()  # as JSON values: numbers, or text
    kinds = {type(each) for each in categories}
    if len(kinds) != 1 or not kinds.issubset(_OF_CATEGORIES):
        categories = [str(each) for each in categories]
    return ObsColumn(
        name=name,
        column=column,
        dtype="category",
        categories=categories,
        is_ordered=bool(dtype.ordered),
    )


def _sql_type(column: ObsColumn) -> str:
    """Return the PostgreSQL type of a column."""
    if column.dtype == "category":
        return _OF_CATEGORIES[type((column.categories or [""])[0])]
    return _TYPES[column.dtype.lower()]


def _python_values(column: ObsColumn, values: "pd.Series[Any]") -> list[Any]:
    """Return values for psycopg, with None for missing values."""
    if column.dtype == "category":
        categories = np.array([*(column.categories or ()), None], object)
        found: list[Any] = categories[values.cat.codes.to_numpy()].tolist()
        return found
    as_python = str if column.dtype == "text" else lambda value: value
    pairs = zip(values.tolist(), values.isna().tolist(), strict=True)
    return [None if is_missing else as_python(each) for each, is_missing in pairs]


_PART_BYTES = 32 << 20  # of rows in memory
_LEAST_CELLS, _MOST_CELLS = 64, 8192
_LOCK_SECONDS = 2.0  # a server releases the lock of a connection a moment after that has ended


class Job:
    """A collection that is written into a database.

    Parameters
    ----------
    collection
        The collection, with the elements to write.
    database, schema
        The target database and schema.
    obs
        Names of the obs columns; all columns if None.

    Attributes
    ----------
    obs, obs_columns
        The obs columns, and their descriptions.
    elements, genes
        Descriptions of the elements, and the names of their columns by key.
    parts
        First row, and the end, of each part, which is written in one transaction.
    digest
        Identifier of the job; empty if there is none, as for cells in memory.

    Raises
    ------
    ParameterError
        There is no such column, or the name of the schema is invalid.
    MismatchError
        A gene has no name.
    """

    def __init__(
        self, collection: Collection, database: Database, schema: str, obs: Sequence[str] | None
    ) -> None:
        if not schema or schema.startswith("pg_") or len(schema.encode()) > 63:  # noqa: PLR2004
            msg = f"`name` must have 1 to 63 bytes and not begin with pg_, but got name={schema!r}"
            raise ParameterError(msg)
        self.collection, self.database, self.schema = collection, database, schema
        self.named = f"{database.location}: {schema}"  # for messages
        files = tuple(map(InputFile.of, collection.locations))
        there = list(
            dict.fromkeys(name for each in collection.sources for name in each.obs_names())
        )
        if obs is not None:
            require_list("obs", "columns", obs)
        chosen = there if obs is None else list(dict.fromkeys(obs))
        for name in chosen:
            if name not in there:
                msg = f"`obs` names {name!r}, but the columns are: {', '.join(there)}"
                raise ParameterError(msg)
        self.obs = ObsTable(collection.sources, tuple(each.path for each in files), chosen)
        first = self.obs.read(np.zeros(1, np.int64))
        if len(files) > 1:
            chosen += self.obs.provenance
        columns = zip(chosen, column_names(chosen, "obs"), strict=True)
        self.obs_columns = [_described(name, column, first[name]) for name, column in columns]
        self.elements, self.genes = list[ElementColumn](), dict[str, list[str]]()
        of_genes = list[str]()
        columns = zip(
            collection.elements, column_names(collection.elements, "element"), strict=True
        )
        for name, column in columns:
            each, var = collection.elements[name], collection.sources[0].elements[name].var
            if var is not None:
                require_named(collection.locations[0], each.column_names)
                self.genes[f"genes/{var}"] = list(map(str, each.column_names))
                of_genes.append(digest_of(*self.genes[f"genes/{var}"]))
            element = ElementColumn(
                name=name,
                column=column,
                layout=each.layout,
                dtype=str(each.dtype),
                row_shape=each.row_shape,
                genes=None if var is None else f"genes/{var}",
            )
            self.elements.append(element)
        n_cells, row_bytes = len(collection), max(1.0, collection.mean_row_bytes())
        n = int(min(max(_PART_BYTES // row_bytes, _LEAST_CELLS), _MOST_CELLS))
        self.parts = [(k, min(k + n, n_cells)) for k in range(0, n_cells, n)]
        identities = [_identity(each, tuple(collection.elements)) for each in collection.sources]
        self.digest = ""
        if all(identities):
            self.digest = digest_of(
                str(VERSION), *map(str, files), *identities, str(n_cells), str(n),
                *map(str, self.elements), *map(str, self.obs_columns), *of_genes,
            )  # fmt: skip

    def n_cells_of(self, parts: Iterable[int]) -> int:
        """Return the number of cells of some parts."""
        return sum(stop - first for first, stop in (self.parts[number] for number in parts))


def _identity(source: Source, elements: Sequence[str]) -> str:
    """Return an identifier of the cells of a source; empty if there is none."""
    if isinstance(source, AnnDataObjectSource):  # obs is in memory, that of a backed one too
        return ""
    version, files = source.version(), source.files()
    if version is None:
        if not files:
            return ""
        version = lasting_identity((str(each.absolute()), each.stat()) for each in files).digest
    found = map(source.elements.__getitem__, elements)
    orders = (order for each in found for order in (each.row_order, each.stored_columns))
    return digest_of(version, source.selection(), *map(digest_of_array, orders))


# The tables of a collection: creating, resuming and finishing them.


def _hold(connection: Any, job: Job) -> None:
    """Lock the collection against other loads, as long as the connection is open.

    Raises
    ------
    ParameterError
        Another process is loading it.
    """
    query = "SELECT pg_try_advisory_lock(hashtextextended(%s, 17))"
    deadline = time.monotonic() + _LOCK_SECONDS
    while not connection.execute(query, (f"cellfeed {job.schema}",)).fetchone()[0]:
        if time.monotonic() > deadline:
            msg = f"{job.named} is being loaded by another process; wait for it"
            raise ParameterError(msg)
        time.sleep(_LOCK_SECONDS / 50)


def _begin_load(connection: Any, job: Job) -> Sequence[int] | None:
    """Create the tables, or resume an earlier load.

    Returns
    -------
    The missing parts; None if the load is finished.

    Raises
    ------
    ParameterError
        The schema contains something else.
    """
    schema = quoted(job.schema)
    found = connection.execute(
        "SELECT to_regnamespace(%s) IS NOT NULL, to_regclass(%s) IS NOT NULL",
        (schema, f"{schema}.cellfeed"),
    ).fetchone()
    if found == (False, False):
        _make(connection, job)
    elif found == (True, False):
        msg = f"{job.database.location}: the schema {job.schema} exists, but is not a collection"
        raise ParameterError(f"{msg}; give another `name`")
    elif not job.digest:
        msg = f"{job.named} was begun, but its cells cannot be identified"
        remedy = f"give another `name`, or DROP SCHEMA {schema} CASCADE"
        raise ParameterError(f"{msg}; {remedy}, and load from .h5ad, which can be resumed")
    rows = connection.execute(
        f"SELECT key, value FROM {schema}.cellfeed WHERE key IN ('digest', 'is_complete')"  # noqa: S608
    ).fetchall()
    there = dict(rows)
    if there.get("digest") != job.digest:
        msg = f"{job.named} was begun with other files, elements or obs columns"
        raise ParameterError(f"{msg}; give another `name`, or DROP SCHEMA {schema} CASCADE")
    if there.get("is_complete"):
        return None
    done = {number for (number,) in connection.execute(f"SELECT number FROM {schema}.parts")}  # noqa: S608
    return [number for number in range(len(job.parts)) if number not in done]


def _finish(connection: Any, job: Job) -> None:
    """Record that all parts are written, and their sizes in bytes."""
    schema = quoted(job.schema)
    with connection.transaction():
        sizes = connection.execute(f"SELECT sizes FROM {schema}.parts").fetchall()  # noqa: S608
        totals = [sum(each) for each in zip(*(sizes_ for (sizes_,) in sizes), strict=True)]
        elements = [
            {**asdict(each), "n_bytes": total}
            for each, total in zip(job.elements, totals, strict=True)
        ]
        _put(connection, job, {"elements": elements, "is_complete": True})
        connection.execute(f"DROP TABLE {schema}.parts")
    connection.execute(f"ANALYZE {schema}.cells; ANALYZE {schema}.packed")


def _make(connection: Any, job: Job) -> None:
    schema = quoted(job.schema)
    obs = "".join(f", {quoted(each.column)} {_sql_type(each)}" for each in job.obs_columns)
    packed = "".join(f", {quoted(each.column)} bytea" for each in job.elements)
    not_compressed = ", ".join(
        f"ALTER {quoted(each.column)} SET STORAGE EXTERNAL" for each in job.elements
    )
    library = psycopg(job.database.location)
    try:
        with connection.transaction():
            connection.execute(f"CREATE SCHEMA {schema}")
            for table in (
                "cellfeed (key text PRIMARY KEY, value jsonb NOT NULL)",
                "parts (number bigint PRIMARY KEY, sizes bigint[] NOT NULL)",
                f"cells (id bigint PRIMARY KEY, name text NOT NULL{obs})",
                # Rows stay beside each other in pages of the table, as long as they fit there.
                f"packed (id bigint PRIMARY KEY{packed}) WITH (toast_tuple_target = 8160)",
            ):
                connection.execute(f"CREATE TABLE {schema}.{table}")
            connection.execute(f"ALTER TABLE {schema}.packed {not_compressed}")
            metadata = {
                "version": VERSION,
                "n_cells": len(job.collection),
                "token": uuid.uuid4().hex,
                "digest": job.digest,
                "is_complete": False,
                "obs": [asdict(each) for each in job.obs_columns],
                "elements": [asdict(each) for each in job.elements],
                **job.genes,
            }
            _put(connection, job, metadata)
    except library.errors.InsufficientPrivilege as error:
        msg = f"{job.database.location}: its user may not create a schema in this database"
        raise ParameterError(f"{msg}; GRANT CREATE ON DATABASE to it") from error


def _put(connection: Any, job: Job, values: dict[str, Any]) -> None:
    query = (
        f"INSERT INTO {escaped(quoted(job.schema))}.cellfeed VALUES (%s, %s) "  # noqa: S608
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    )
    with connection.cursor() as cursor:
        cursor.executemany(query, [(key, json.dumps(value)) for key, value in values.items()])


# Writing one part: its cells and their packed rows, in one transaction.


class _Part(NamedTuple):
    """Cells of a part, as they are written."""

    number: int
    names: pd.Index
    columns: list[list[Any]]  # values of each obs column
    packed: list[list[bytes]]  # rows of each element


def _read_part(job: Job, number: int) -> _Part:
    rows = np.arange(*job.parts[number])
    cells, obs = job.collection[rows], job.obs.read(rows)
    columns = [_python_values(each, obs[each.name]) for each in job.obs_columns]
    return _Part(number, obs.index, columns, [_packed(cells, each.name) for each in job.elements])


def _write_part(job: Job, session: Session, part: _Part) -> None:
    """Write a part.

    Raises
    ------
    RemoteError
        The server refuses it.
    FormatError
        A file has text that PostgreSQL cannot store.
    """
    database, library = job.database, psycopg(job.database.location)
    rows, sizes = range(*job.parts[part.number]), [sum(map(len, each)) for each in part.packed]
    parts = escaped(quoted(job.schema, "parts"))

    def copy(connection: Any, table: str, *columns: Iterable[Any], types: Sequence[str]) -> None:
        how = " (FORMAT BINARY)" if types else ""
        query = f"COPY {quoted(job.schema, table)} FROM STDIN{how}"
        with connection.cursor() as cursor, cursor.copy(query) as copying:
            if types:
                copying.set_types(types)
            for row in zip(rows, *columns, strict=True):
                copying.write_row(row)

    def write() -> None:
        connection = session.connection()
        try:
            with connection.transaction():
                connection.execute("SET LOCAL synchronous_commit = off")  # the last one waits
                connection.execute(
                    f"INSERT INTO {parts} VALUES (%s, %s)",  # noqa: S608
                    (part.number, sizes),
                )
                copy(connection, "cells", map(str, part.names), *part.columns, types=())
                types = ["int8", *("bytea" for _ in part.packed)]
                copy(connection, "packed", *part.packed, types=types)
        except library.errors.UniqueViolation:
            pass  # the connection was lost after this part had been committed
        except library.DataError as error:
            where = f"obs of cells {rows[0]} to {rows[-1]}"
            msg = f"{database.location}: PostgreSQL cannot store {where} ({one_line(error)})"
            raise FormatError(f"{msg}; correct it in the files") from None

    database.retried(write)


def _packed(cells: Cells, name: str) -> list[bytes]:
    """Return each row of an element, packed."""
    rows = cells[name]
    if isinstance(rows, np.ndarray):
        dense: NDArray[Any] = rows.reshape(len(rows), -1)
        return [pack_row(None, each) for each in dense]
    ends = pairwise(rows.indptr.tolist())
    return [pack_row(rows.indices[i:j], rows.data[i:j]) for i, j in ends]


PathLike = str | os.PathLike[str]


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
    CellfeedError
        See `open_collection`.

    Examples
    --------
    >>> from cellfeed import load_database
    >>> load_database("plates", "postgresql://me@host/cells", "plates")  # doctest: +SKIP
    """
    start = time.perf_counter()
    location = Location.of(url, database_options)
    if location.scheme not in ("postgresql", "postgres"):
        msg = f"{location.shown}: is not a database; give postgresql://user@host/database"
        raise ParameterError(msg)
    database, library = Database(location, "database_options"), psycopg(location)
    with Session(database, for_writing=True) as session:
        connection = session.connection()
        collection = open_collection(paths, elements=elements)
        job = Job(collection, database, name, obs)
        try:
            _hold(connection, job)
            begun = _begin_load(connection, job)
        except library.DataError as error:
            msg = f"{location}: PostgreSQL cannot store a name or category ({one_line(error)})"
            raise FormatError(f"{msg}; correct it in the files") from None
        except library.Error as error:
            raise database.failure(error) from None
        missing = begun or ()
        done = len(collection) - job.n_cells_of(missing)
        # The next part is read while this one is written.
        with in_stages(missing, [Stage(partial(_read_part, job), 1)]) as parts:
            for part in parts:
                _write_part(job, session, part)
                done += job.n_cells_of([part.number])
                if on_progress is not None:
                    on_progress(done, len(collection))
        if begun is not None:
            database.retried(lambda: _finish(session.connection(), job))
    separator = "&" if "?" in location.text else "?"
    return Loaded(
        url=f"{location}{separator}collection={quote(name)}",
        n_cells=len(collection),
        n_parts=len(job.parts),
        n_parts_written=len(missing),
        seconds=time.perf_counter() - start,
    )
