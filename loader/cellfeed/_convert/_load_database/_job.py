"""The job as a value that all processes share."""

import hashlib
import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from cellfeed._bytes import Location, digest_of, lasting_identity
from cellfeed._collection import Collection
from cellfeed._convert._preshuffle._job import InputFile
from cellfeed._convert._preshuffle._part import ObsTable
from cellfeed._errors import ParameterError
from cellfeed._storages import AnnDataObjectSource, Source
from cellfeed._storages._postgres._database import (
    VERSION,
    Database,
    ElementColumn,
    ObsColumn,
    column_names,
    escaped,
    psycopg,
    quoted,
)

# Converting obs columns of pandas to columns of a database table.

_INTEGERS = {"int8": "smallint", "uint8": "smallint", "int16": "smallint", "uint16": "integer",
             "int32": "integer", "uint32": "bigint", "int64": "bigint",
             "uint64": "numeric(20, 0)"}  # fmt: skip
_FLOATS = {"float16": "real", "float32": "real", "float64": "double precision"}
_TYPES = {**_INTEGERS, **_FLOATS, "bool": "boolean", "boolean": "boolean", "text": "text"}


def described(name: str, column: str, values: "pd.Series[Any]") -> ObsColumn:
    """Return the description of an obs column in the table of cells.

    Parameters
    ----------
    name, column
        Its names in obs and in the table.
    values
        Some of its values, in the dtype of all.
    """
    dtype = values.dtype
    if isinstance(dtype, pd.CategoricalDtype):
        categories = _categories(dtype.categories)
        return ObsColumn(
            name=name,
            column=column,
            dtype="category",
            categories=categories,
            is_ordered=bool(dtype.ordered),
        )
    known = str(dtype) if str(dtype).lower() in _TYPES else "text"
    return ObsColumn(name=name, column=column, dtype=known)


def sql_type(column: ObsColumn) -> str:
    """Return the PostgreSQL type of a column."""
    if column.dtype != "category":
        return _TYPES[column.dtype.lower()]
    kinds = {type(each).__name__ for each in column.categories or ()}
    of_one_kind = {"bool": "boolean", "int": "bigint", "float": "double precision"}
    return of_one_kind.get(kinds.pop(), "text") if len(kinds) == 1 else "text"


def python_values(column: ObsColumn, values: "pd.Series[Any]") -> list[Any]:
    """Return values for psycopg, with None for missing values."""
    if column.dtype == "category":
        categories = np.array([*(column.categories or ()), None], object)
        found: list[Any] = categories[values.cat.codes.to_numpy()].tolist()
        return found
    is_missing = values.isna().to_numpy()
    if column.dtype == "text":
        texts = values.astype(object).to_numpy()
        return [None if no else str(each) for each, no in zip(texts, is_missing, strict=True)]
    python = np.array(values.tolist(), object)
    python[is_missing] = None
    return [*python]


def _categories(index: "pd.Index[Any]") -> list[Any]:
    """Return categories as JSON values: numbers, or text."""
    values = index.tolist()
    if len({type(each) for each in values}) == 1 and isinstance(values[0], bool | int | float):
        return values
    return [str(each) for each in values]


_PART_BYTES = 32 << 20  # of rows in memory
_LEAST_CELLS, _MOST_CELLS = 64, 8192


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Job:
    """A collection that is written into a database.

    Parameters
    ----------
    database, schema
        The target database and schema.
    collection, obs
        The collection, and its obs.
    obs_columns, elements
        Descriptions of obs columns and elements in the tables.
    cells_per_part
        Number of cells that are written in one transaction.
    digest
        Identifier of the job; empty if there is none, as for cells in memory.
    """

    database: Database
    schema: str
    collection: Collection
    obs: ObsTable
    obs_columns: tuple[ObsColumn, ...]
    elements: tuple[ElementColumn, ...]
    cells_per_part: int
    digest: str

    @property
    def location(self) -> Location:
        """The database."""
        return self.database.location

    @property
    def n_parts(self) -> int:
        """Number of parts."""
        return -(-len(self.collection) // self.cells_per_part)

    def rows(self, part: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return the rows of a part, ascending."""
        first = part * self.cells_per_part
        return np.arange(first, min(first + self.cells_per_part, len(self.collection)))


def describe_job(
    collection: Collection, database: Database, schema: str, obs: Sequence[str] | None
) -> Job:
    """Return the job for a collection.

    Parameters
    ----------
    collection
        The collection, with the elements to write.
    database, schema
        The target database and schema.
    obs
        Names of the obs columns; all columns if None.

    Raises
    ------
    ParameterError
        There is no such column, or the name of the schema is invalid.
    """
    if not schema or schema.startswith("pg_") or len(schema.encode()) > 63:  # noqa: PLR2004
        msg = f"`name` must have 1 to 63 bytes and not begin with pg_, but got name={schema!r}"
        raise ParameterError(msg)
    files = tuple(map(InputFile.of, collection.locations))
    there = list(dict.fromkeys(name for each in collection.sources for name in each.obs_names()))
    chosen = there if obs is None else list(dict.fromkeys(obs))
    for name in chosen:
        if name not in there:
            msg = f"`obs` names {name!r}, but the columns are: {', '.join(there)}"
            raise ParameterError(msg)
    table = ObsTable(collection.sources, tuple(each.path for each in files), chosen)
    first = table.read(np.zeros(1, np.int64))
    if len(files) > 1:
        chosen += table.provenance
    columns = column_names(chosen, "obs")
    obs_columns = tuple(
        described(name, column, first[name]) for name, column in zip(chosen, columns, strict=True)
    )
    names = column_names(collection.elements, "element")
    elements = tuple(
        ElementColumn(
            name=name,
            column=column,
            layout=each.layout,
            dtype=str(each.dtype),
            row_shape=each.row_shape,
            genes=_genes_key(collection, name),
        )
        for (name, each), column in zip(collection.elements.items(), names, strict=True)
    )
    row_bytes = max(1.0, collection.mean_row_bytes())
    cells = int(min(max(_PART_BYTES // row_bytes, _LEAST_CELLS), _MOST_CELLS))
    identities = [_identity(each, tuple(collection.elements)) for each in collection.sources]
    digest = ""
    if all(identities):
        digest = digest_of(
            str(VERSION), *map(str, files), *identities, str(len(collection)), str(cells),
            *map(str, elements), *map(str, obs_columns), *_names_of_genes(collection),
        )  # fmt: skip
    return Job(
        database=database,
        schema=schema,
        collection=collection,
        obs=table,
        obs_columns=obs_columns,
        elements=elements,
        cells_per_part=cells,
        digest=digest,
    )


def _identity(source: Source, elements: Sequence[str]) -> str:
    """Return an identifier of the cells of a source; empty if there is none."""
    if isinstance(source, AnnDataObjectSource):  # obs is in memory, that of a backed one too
        return ""
    version, files = source.version(), source.files()
    if version is None:
        if not files:
            return ""
        version = lasting_identity((str(each.absolute()), each.stat()) for each in files).digest
    stored = hashlib.blake2b(digest_size=16)
    for element in map(source.elements.__getitem__, elements):
        for order in (element.row_order, element.stored_columns):
            stored.update(b"\0" if order is None else order.tobytes())
    return digest_of(version, source.selection(), stored.hexdigest())


def _names_of_genes(collection: Collection) -> list[str]:
    return [
        digest_of(*map(str, element.column_names))
        for name, element in collection.elements.items()
        if _genes_key(collection, name) is not None
    ]


def _genes_key(collection: Collection, name: str) -> str | None:
    var = collection.sources[0].elements[name].var
    return None if var is None else f"genes/{var}"


# The tables of a collection: creating, resuming and finishing them.


def hold(connection: Any, job: Job) -> None:
    """Lock the collection against other loads, as long as the connection is open.

    Raises
    ------
    ParameterError
        Another process is loading it.
    """
    query = "SELECT pg_try_advisory_lock(hashtextextended(%s, 17))"
    if not connection.execute(query, (f"cellfeed {job.schema}",)).fetchone()[0]:
        msg = f"{job.location}: {job.schema} is being loaded by another process; wait for it"
        raise ParameterError(msg)


def begin(connection: Any, job: Job) -> Sequence[int] | None:
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
        msg = f"{job.location}: the schema {job.schema} exists, but is not a collection"
        raise ParameterError(f"{msg}; give another `name`")
    elif not job.digest:
        msg = f"{job.location}: {job.schema} was begun, but its cells cannot be identified"
        remedy = f"give another `name`, or DROP SCHEMA {schema} CASCADE"
        raise ParameterError(f"{msg}; {remedy}, and load from .h5ad, which can be resumed")
    rows = connection.execute(
        f"SELECT key, value FROM {schema}.cellfeed WHERE key IN ('digest', 'is_complete')"  # noqa: S608
    ).fetchall()
    there = dict(rows)
    if there.get("digest") != job.digest:
        msg = f"{job.location}: {job.schema} was begun with other files, elements or obs columns"
        raise ParameterError(f"{msg}; give another `name`, or DROP SCHEMA {schema} CASCADE")
    if there.get("is_complete"):
        return None
    done = {number for (number,) in connection.execute(f"SELECT number FROM {schema}.parts")}  # noqa: S608
    return [number for number in range(job.n_parts) if number not in done]


def finish(connection: Any, job: Job) -> None:
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
    connection.execute(f"ANALYZE {schema}.cells")
    connection.execute(f"ANALYZE {schema}.packed")


def _make(connection: Any, job: Job) -> None:
    schema = quoted(job.schema)
    obs = "".join(f", {quoted(each.column)} {sql_type(each)}" for each in job.obs_columns)
    packed = "".join(f", {quoted(each.column)} bytea" for each in job.elements)
    not_compressed = ", ".join(
        f"ALTER {quoted(each.column)} SET STORAGE EXTERNAL" for each in job.elements
    )
    library = psycopg(job.location)
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
            _put(connection, job, _metadata(job))
    except library.errors.InsufficientPrivilege as error:
        msg = f"{job.location}: its user may not create a schema in this database"
        raise ParameterError(f"{msg}; GRANT CREATE ON DATABASE to it") from error


def _metadata(job: Job) -> dict[str, Any]:
    genes = {
        each.genes: list(map(str, job.collection.elements[each.name].column_names))
        for each in job.elements
        if each.genes is not None
    }
    return {
        "version": VERSION,
        "n_cells": len(job.collection),
        "token": uuid.uuid4().hex,
        "digest": job.digest,
        "is_complete": False,
        "obs": [asdict(each) for each in job.obs_columns],
        "elements": [asdict(each) for each in job.elements],
        **genes,
    }


def _put(connection: Any, job: Job, values: dict[str, Any]) -> None:
    query = (
        f"INSERT INTO {escaped(quoted(job.schema))}.cellfeed VALUES (%s, %s) "  # noqa: S608
        "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    )
    with connection.cursor() as cursor:
        cursor.executemany(query, [(key, json.dumps(value)) for key, value in values.items()])
