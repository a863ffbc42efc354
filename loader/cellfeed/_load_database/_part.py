"""Writing one part: its cells and their packed rows, in one transaction."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._cells import Cells
from cellfeed._chunks._packed import pack_row
from cellfeed._errors import FormatError, one_line
from cellfeed._load_database._columns import python_values
from cellfeed._load_database._job import Job
from cellfeed._sources._postgres._database import psycopg
from cellfeed._sources._postgres._layout import escaped, quoted

__all__ = ["PartWriter"]


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
