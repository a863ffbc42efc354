"""A sparse array of TileDB whose tiles are decoded here."""

import itertools
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import (
    ChunkedArray,
    FolderFiles,
    Fragments,
    TileChunks,
    TileFilters,
    TileRows,
    Tiles,
    tiled_array,
)
from cellfeed._layouts import CsrPieces, PiecedCsr
from cellfeed._sources._base import FileNames
from cellfeed._sources._soma._tiledb._fragments import (
    FILES,
    FRAGMENTS,
    Fragment,
    fragments_at,
    read_fragment,
)
from cellfeed._sources._soma._tiledb._generic import UnknownLayoutError
from cellfeed._sources._soma._tiledb._schema import Schema, read_schema

__all__ = ["TiledCsr", "tiled_csr"]

_SCHEMAS = "__schema"
_DAMAGE = (OSError, ValueError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error)


class TiledCsr(PiecedCsr):
    """Rows of a sparse array of TileDB.

    Parameters
    ----------
    schema
        How the array is stored.
    columns, values
        Columns and values of its elements, with the locations of their chunks.
    find
        Locates rows.
    joinids
        The row of the array for each row, ascending, int64; None if they are the same.
    n_columns, n_elements
        Number of columns and of elements.
    """

    def __init__(
        self,
        schema: Schema,
        columns: tuple[ChunkedArray, TileChunks],
        values: tuple[ChunkedArray, TileChunks],
        find: TileRows,
        *,
        joinids: NDArray[np.int64] | None,
        n_columns: int,
        n_elements: int,
    ) -> None:
        self._schema, self._columns, self._values, self._find = schema, columns, values, find
        self._joinids, self._n_columns, self._n_elements = joinids, n_columns, n_elements

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `PiecedCsr`."""
        return self._schema.dtype

    def rows_per_chunk(self, n_rows: int) -> float:
        """Return the mean number of rows whose columns lie in one chunk, of ``n_rows`` rows."""
        blocks = -(-self._n_columns // self._schema.block_columns)
        of_row = max(1.0, self._n_elements / max(1, n_rows * blocks))
        return max(1.0, min(self._columns[1].chunk_elements / of_row, self._schema.block_rows))

    def pieces(self, rows: NDArray[np.int64]) -> CsrPieces:
        """See `PiecedCsr`."""
        found = self._find(rows if self._joinids is None else self._joinids[rows])
        return CsrPieces(
            indices=self._columns[0],
            data=self._values[0],
            n_columns=self._n_columns,
            lengths=found.lengths,
            rows=found.rows,
            index_starts=self._columns[1].starts(found.elements),
            data_starts=self._values[1].starts(found.elements),
            counts=found.counts,
            before=found.before,
        )


def tiled_csr(
    folder: Path,
    name: str,
    timestamp: int,
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> TiledCsr | None:
    """Return a sparse array, reading only metadata; None if nothing is written there.

    Parameters
    ----------
    folder
        Folder of the array.
    name
        Name for messages.
    timestamp
        In ms; later writes are ignored.
    joinids, n_columns
        See `TiledCsr`.

    Raises
    ------
    UnknownLayoutError
        TileDB has to read the array; the message gives the reason.
    """
    try:
        names = fragments_at(folder, timestamp)
        if not names:
            return None
        schema, found = _read(folder, names)
        return _joined(folder, name, schema, found, joinids, n_columns)
    except _DAMAGE as error:
        raise UnknownLayoutError("its metadata cannot be read") from error


def _read(folder: Path, names: list[str]) -> tuple[Schema, list[Fragment]]:
    """Return the schema of fragments, which must share one, and the fragments, by their rows."""
    found = sorted((read_fragment(folder, name) for name in names), key=lambda each: each.rows)
    if any(first.rows[1] >= second.rows[0] for first, second in itertools.pairwise(found)):
        raise UnknownLayoutError("several of its fragments have the same rows")
    of_fragments = {each.schema for each in found}
    schemas = {read_schema((folder / _SCHEMAS / each).read_bytes()) for each in of_fragments}
    if len(schemas) > 1:
        raise UnknownLayoutError("its fragments have different schemas")
    return schemas.pop(), found


def _joined(
    folder: Path,
    name: str,
    schema: Schema,
    found: list[Fragment],
    joinids: NDArray[np.int64] | None,
    n_columns: int,
) -> TiledCsr:
    """Return an array of fragments, in row order."""
    names = [f"{FRAGMENTS}/{each.name}/{file}" for file in FILES for each in found]
    files = FolderFiles(folder, FileNames(*names), len(names))
    expected = np.array([each.bounds[:, -1] for each in found]).T.ravel()
    if (files.sizes(np.arange(len(names))) != expected).any():
        raise UnknownLayoutError("the size of a file differs from its metadata")
    n_tiles = np.array([each.n_tiles for each in found])
    n_elements = np.concatenate([each.n_elements(schema.capacity) for each in found])

    def tiles(number: int) -> Tiles:
        return Tiles(
            files=np.repeat(np.arange(len(found)) + number * len(found), n_tiles),
            offsets=np.concatenate([each.bounds[number, :-1] for each in found]),
            ends=np.concatenate([each.bounds[number, 1:] for each in found]),
            n_elements=n_elements,
            capacity=schema.capacity,
        )

    def array(
        number: int, column: str, dtype: np.dtype[Any], filters: TileFilters
    ) -> tuple[ChunkedArray, TileChunks]:
        full_name = f"{name}/{column}"
        chunks = TileChunks(full_name, tiles(number), dtype.itemsize, filters, files)
        return tiled_array(full_name, chunks, dtype, filters, files), chunks

    number_of_row = np.dtype(np.int64)
    fragments = Fragments(
        rows=np.array([each.rows for each in found], np.int64),
        first_tiles=np.concatenate([[0], np.cumsum(n_tiles, dtype=np.int64)]),
        tile_rows=np.concatenate([each.tile_rows for each in found]),
        block_rows=schema.block_rows,
    )
    rows = array(0, "soma_dim_0", number_of_row, schema.row_filters)
    return TiledCsr(
        schema,
        array(1, "soma_dim_1", number_of_row, schema.column_filters),
        array(2, "soma_data", schema.dtype, schema.value_filters),
        TileRows(*rows, tiles(0), fragments),
        joinids=joinids,
        n_columns=n_columns,
        n_elements=int(n_elements.sum()),
    )
