"""Loading a collection into a database, in one transaction."""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection, open_collection, require_named
from cellfeed.extending import FormatError, ParameterError, one_line, require_list
from cellfeed.fetch import Stage, in_stages
from cellfeed.preshuffling import InputFile, ObsTable
from cellfeed.rows import Cells
from cellfeed.sources import Source
from cellfeed.storages.postgres._database import (
    VERSION,
    Database,
    ElementColumn,
    ObsColumn,
    Session,
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
_LONGEST = 63  # maximum length of a name in PostgreSQL, in bytes
_OWN = ("id", "name")  # columns that the tables have anyway


def _described(name: str, dtype: Any) -> ObsColumn:
    """Return the description of an obs column."""
    if not isinstance(dtype, pd.CategoricalDtype):
        known = str(dtype) if str(dtype).lower() in _TYPES else "text"
        return ObsColumn(name=name, dtype=known)
    categories = dtype.categories.tolist()  # as JSON values: numbers, or text
    kinds = {type(each) for each in categories}
    if len(kinds) != 1 or not kinds.issubset(_OF_CATEGORIES):
        categories = [str(each) for each in categories]
    return ObsColumn(
        name=name, dtype="category", categories=categories, is_ordered=bool(dtype.ordered)
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


def _packed(cells: Cells, name: str) -> list[bytes]:
    """Return each row of an element, packed."""
    rows = cells[name]
    if isinstance(rows, np.ndarray):
        dense: NDArray[Any] = rows.reshape(len(rows), -1)
        return [pack_row(None, each, dense.shape[1]) for each in dense]
    ends, n_columns = pairwise(rows.indptr.tolist()), rows.shape[1]
    return [pack_row(rows.indices[i:j], rows.data[i:j], n_columns) for i, j in ends]


_PART_BYTES = 32 << 20  # of rows in memory, that are copied together
_LEAST_CELLS, _MOST_CELLS = 64, 8192
_LOCK_SECONDS = 2  # how long to wait for another load of the same name


def _obs_of(collection: Collection, obs: Sequence[str] | None) -> tuple[ObsTable, list[ObsColumn]]:
    """Return the table of obs, and the columns to write."""
    names = [each.obs_names() for each in collection.sources]
    there = list(dict.fromkeys(name for each in names for name in each))
    if obs is not None:
        require_list("obs", "columns", obs)
    chosen = there if obs is None else list(dict.fromkeys(obs))
    for name in chosen:
        if name not in there:
            msg = f"`obs` names {name!r}, but the columns are: {', '.join(there)}"
            raise ParameterError(msg)
    files = tuple(InputFile.of(each).path for each in collection.locations)
    table = ObsTable(collection.sources, files, chosen)
    if len(files) > 1:
        chosen += table.provenance
    first = table.read(np.zeros(1, np.int64))
    return table, [_described(name, first[name].dtype) for name in chosen]


def _copy(connection: Any, table: str, rows: Iterable[Any], types: Sequence[str] = ()) -> None:
    """Copy rows into a table, in binary form if their types are given."""
    query = f"COPY {table} FROM STDIN{' (FORMAT BINARY)' if types else ''}"
    with connection.cursor() as cursor, cursor.copy(query) as copying:
        if types:
            copying.set_types(types)
        for row in rows:
            copying.write_row(row)


def _write(
    connection: Any,
    name: str,
    collection: Collection,
    table: ObsTable,
    columns: Sequence[ObsColumn],
    on_progress: Callable[[int, int], object] | None,
) -> None:
    """Create the tables of a collection, and write its cells and its metadata."""
    elements, schema = collection.elements, quoted(name)
    metadata: dict[str, Any] = {"version": VERSION, "token": uuid.uuid4().hex}
    vars_ = {each: collection.sources[0].elements[each].var for each in elements}
    for each, var in vars_.items():
        if var is not None:
            require_named(collection.locations[0], elements[each].column_names)
            metadata[f"genes/{var}"] = list(map(str, elements[each].column_names))
    connection.execute(f"SET LOCAL lock_timeout = '{_LOCK_SECONDS}s'; CREATE SCHEMA {schema}")
    obs = "".join(f", {quoted(each.name)} {_sql_type(each)}" for each in columns)
    packed = "".join(f", {quoted(each)} bytea" for each in elements)
    for each in (
        "cellfeed (key text PRIMARY KEY, value jsonb NOT NULL)",
        f"cells (id bigint PRIMARY KEY, name text NOT NULL{obs})",
        # Rows stay beside each other in pages of the table, as long as they fit there.
        f"packed (id bigint PRIMARY KEY{packed}) WITH (toast_tuple_target = 8160)",
    ):
        connection.execute(f"CREATE TABLE {schema}.{each}")
    for each in elements:  # they are compressed already
        connection.execute(f"ALTER TABLE {schema}.packed ALTER {quoted(each)} SET STORAGE EXTERNAL")

    n_cells, row_bytes = len(collection), max(1.0, collection.mean_row_bytes())
    n = int(min(max(_PART_BYTES // row_bytes, _LEAST_CELLS), _MOST_CELLS))

    def read(first: int) -> tuple[range, list[Iterable[Any]], list[list[bytes]]]:
        rows = range(first, min(first + n, n_cells))
        cells, frame = collection[rows], table.read(np.array(rows))
        values = [_python_values(each, frame[each.name]) for each in columns]
        return rows, [map(str, frame.index), *values], [_packed(cells, each) for each in elements]

    n_bytes, types = np.zeros(len(elements), np.int64), ["int8", *["bytea"] * len(elements)]
    with in_stages(range(0, n_cells, n), [Stage(read, 1)]) as parts:
        for rows, values, packed_rows in parts:  # the next one is read meanwhile
            _copy(connection, f"{schema}.cells", zip(rows, *values, strict=True))
            _copy(connection, f"{schema}.packed", zip(rows, *packed_rows, strict=True), types)
            n_bytes += [sum(map(len, each)) for each in packed_rows]
            if on_progress is not None:
                on_progress(rows.stop, n_cells)
    described = [
        ElementColumn(
            name=each,
            layout=element.layout,
            dtype=str(element.dtype),
            row_shape=element.row_shape,
            genes=None if vars_[each] is None else f"genes/{vars_[each]}",
            n_bytes=own,
        )
        for (each, element), own in zip(elements.items(), n_bytes.tolist(), strict=True)
    ]
    metadata["n_cells"] = n_cells
    metadata["obs"], metadata["elements"] = ([*map(asdict, of)] for of in (columns, described))
    pairs = ((key, json.dumps(value)) for key, value in metadata.items())
    _copy(connection, f"{schema}.cellfeed", pairs)


PathLike = str | os.PathLike[str]


def load_database(
    paths: PathLike | Source | Iterable[PathLike | Source],
    url: PathLike,
    name: str,
    *,
    elements: Sequence[str] = ("X",),
    obs: Sequence[str] | None = None,
    database_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], object] | None = None,
) -> str:
    """Write a collection into a PostgreSQL database, from which `open_collection` reads it.

    docs/how-to/postgres.md describes the tables. All cells are written in one transaction, so that
    a load that was stopped or killed, or that failed, leaves nothing: call it again.

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
        Names of the obs columns to write; all if None. With several files, two columns with the
        file of each cell, and its row there, are added.
    database_options
        Other options of libpq, such as ``password``. They never appear in messages.
    on_progress
        Called with the number of cells that were written, and the total number.

    Returns
    -------
    The URL for `open_collection`, without a password.

    Raises
    ------
    RemoteError
        The server cannot be reached, or refuses.
    ParameterError
        A schema of this name exists, or is being written; or a column is missing, or its name
        cannot be that of a column of PostgreSQL.
    FormatError
        A file has text that PostgreSQL cannot store.
    CellfeedError
        See `open_collection`.

    Examples
    --------
    >>> from cellfeed import load_database
    >>> load_database("plates", "postgresql://me@host/cells", "plates")  # doctest: +SKIP
    """
    location = Location.of(url, database_options)
    if location.scheme not in ("postgresql", "postgres"):
        msg = f"{location.shown}: is not a database; give postgresql://user@host/database"
        raise ParameterError(msg)
    if not name or name.startswith("pg_") or len(name.encode()) > _LONGEST:
        msg = (
            f"`name` must have 1 to {_LONGEST} bytes and not begin with pg_, but got name={name!r}"
        )
        raise ParameterError(msg)
    database = Database(location, "database_options")
    with Session(database, for_writing=True) as session:
        connection, errors = session.connection(), database.driver.errors
        collection = open_collection(paths, elements=elements)
        table, columns = _obs_of(collection, obs)
        for each in (*(column.name for column in columns), *collection.elements):
            if not each or each in _OWN or len(each.encode()) > _LONGEST:
                msg = f"{location}: the column {each!r} cannot be written, since tables have an"
                msg = f"{msg} `id` and a `name` of their own, and names at most {_LONGEST} bytes"
                raise ParameterError(f"{msg}; leave it out, or rename it in the files")
        try:
            with connection.transaction():
                _write(connection, name, collection, table, columns, on_progress)
            connection.execute(f"ANALYZE {quoted(name, 'cells')}, {quoted(name, 'packed')}")
        except (errors.DuplicateSchema, errors.UniqueViolation, errors.LockNotAvailable):
            msg = f"{location}: there is a schema {name}, or another process is writing it"
            drop = f"DROP SCHEMA {quoted(name)} CASCADE"
            raise ParameterError(f"{msg}; give another `name`, or {drop}") from None
        except errors.InsufficientPrivilege as error:
            msg = f"{location}: its user may not create a schema in this database"
            raise ParameterError(f"{msg}; GRANT CREATE ON DATABASE to it") from error
        except errors.DataError as error:
            msg = f"{location}: PostgreSQL cannot store a name, category or value of obs"
            raise FormatError(f"{msg} ({one_line(error)}); correct it in the files") from None
        except database.driver.Error as error:
            raise database.failure(error) from None
    separator = "&" if "?" in location.text else "?"
    return f"{location}{separator}collection={quote(name)}"
