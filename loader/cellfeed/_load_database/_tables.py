"""The tables of a collection: creating, resuming and finishing them."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from cellfeed._errors import ParameterError
from cellfeed._load_database._columns import sql_type
from cellfeed._load_database._job import Job
from cellfeed._sources._postgres._database import psycopg
from cellfeed._sources._postgres._layout import VERSION, escaped, quoted

__all__ = ["begin", "finish", "hold"]


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
