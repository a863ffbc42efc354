"""The job as a value that all processes share."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cellfeed._bytes import Location, digest_of, lasting_identity
from cellfeed._collection import Collection
from cellfeed._errors import ParameterError
from cellfeed._load_database._columns import described
from cellfeed._preshuffle._inputs import InputFile
from cellfeed._preshuffle._obs_table import ObsTable
from cellfeed._sources import AnnDataObjectSource, Source
from cellfeed._sources._postgres._database import Database
from cellfeed._sources._postgres._layout import (
    VERSION,
    ElementColumn,
    ObsColumn,
    column_names,
)

__all__ = ["Job", "describe_job"]

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
