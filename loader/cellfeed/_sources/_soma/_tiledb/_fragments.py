"""The fragments of an array, one per write; ``format_spec/fragment.md`` of TileDB."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cellfeed._sources._soma._tiledb._generic import Fields, UnknownLayoutError, generic_tile
from cellfeed._sources._soma._tiledb._schema import VERSIONS

__all__ = ["FILES", "FRAGMENTS", "Fragment", "fragments_at", "read_fragment"]

FRAGMENTS = "__fragments"
FILES = ("d0.tdb", "d1.tdb", "a0.tdb")  # rows, columns and values
_COMMITS, _WRITTEN = "__commits", ".wrt"
_METADATA = "__fragment_metadata.tdb"
_N_FIELDS = 4  # values, coordinates in their older form, rows and columns
_OF_FILES = (2, 3, 0)  # indices of `FILES` among these


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """One fragment: the result of one write.

    Parameters
    ----------
    name
        Name of its folder.
    schema
        File name of its schema.
    rows
        First and last row with elements in it.
    n_last
        Number of elements of its last tile; all others are full.
    tile_rows
        Smallest and largest row of each tile, int64, shape (n_tiles, 2).
    bounds
        Where tiles begin and end in each of `FILES`, int64, shape (3, n_tiles + 1).
    """

    name: str
    schema: str
    rows: tuple[int, int]
    n_last: int
    tile_rows: NDArray[np.int64]
    bounds: NDArray[np.int64]

    @property
    def n_tiles(self) -> int:
        """Number of tiles."""
        return len(self.tile_rows)

    def n_elements(self, capacity: int) -> NDArray[np.int64]:
        """Return the number of elements of each tile, int64, shape (n_tiles,)."""
        if not 0 < self.n_last <= capacity:
            raise ValueError(
                f"it has a tile of {self.n_last} elements, above the capacity of {capacity}"
            )
        n_elements = np.full(self.n_tiles, capacity, np.int64)
        n_elements[-1] = self.n_last
        return n_elements


def fragments_at(folder: Path, timestamp: int) -> list[str]:
    """Return the names of the fragments that an array has at a time.

    Parameters
    ----------
    folder
        The array.
    timestamp
        In ms.

    Raises
    ------
    UnknownLayoutError
        The array is not made of fragments alone, or some fragments end after the time.
    OSError, ValueError
        It is damaged.
    """
    there = list[str]()
    if not (folder / _COMMITS).is_dir():
        return there
    for commit in sorted((folder / _COMMITS).iterdir()):
        if commit.suffix != _WRITTEN:
            raise UnknownLayoutError(f"it has commits of kind {commit.suffix!r}")
        first, last = (int(each) for each in commit.name.split("_")[2:4])
        if first <= timestamp < last:
            raise UnknownLayoutError("fragments of different times were consolidated")
        if last <= timestamp:
            there.append(commit.stem)
    return there


def read_fragment(folder: Path, name: str) -> Fragment:
    """Return the metadata of a fragment.

    Parameters
    ----------
    folder, name
        The array, and the fragment.

    Raises
    ------
    UnknownLayoutError
        The fragment is not decoded here.
    OSError, ValueError, struct.error, zlib.error, RuntimeError
        It is damaged.
    """
    content = (folder / FRAGMENTS / name / _METADATA).read_bytes()
    end = len(content) - 8
    fields = Fields(content, end - Fields(content, end).number("Q"))
    version, n_name = fields.numbers("IQ")
    if version not in VERSIONS:
        raise UnknownLayoutError(f"version {version} of TileDB's format is unknown")
    schema = fields.bytes(n_name).decode()
    is_dense, is_empty = fields.numbers("BB")
    if is_dense or is_empty:
        raise UnknownLayoutError("a fragment is dense, or has no extent")
    first, last, _, _, n_tiles, of_last = fields.numbers("qqqqQQ")
    if any(fields.numbers("BB")):
        raise UnknownLayoutError("elements have their own timestamps, or were deleted")
    sizes = fields.numbers(f"{3 * _N_FIELDS}Q")
    tree, *tiles = fields.numbers(f"{1 + _N_FIELDS}Q")
    offsets = np.stack([_offsets(generic_tile(content, tiles[k]), n_tiles) for k in _OF_FILES])
    ends = np.array([[sizes[k]] for k in _OF_FILES], np.int64)
    if n_tiles < 1 or (np.diff(offsets, append=ends) < 0).any() or (offsets[:, 0] < 0).any():
        raise ValueError("its tiles overlap")
    tile_rows = _tile_rows(generic_tile(content, tree), n_tiles)
    if (tile_rows[:, 0].min(), tile_rows[:, 1].max()) != (first, last):
        raise ValueError("the rows of its tiles differ from its metadata")
    return Fragment(
        name=name,
        schema=schema,
        rows=(first, last),
        n_last=of_last,
        tile_rows=tile_rows,
        bounds=np.concatenate([offsets, ends], axis=1),
    )


def _offsets(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the offsets of tiles in a file."""
    if Fields(content).number("Q") != n_tiles:
        raise ValueError("its tile offsets do not match its tiles")
    return np.frombuffer(content, "<i8", n_tiles, offset=8).astype(np.int64)


def _tile_rows(content: bytes, n_tiles: int) -> NDArray[np.int64]:
    """Return the smallest and largest row of each tile, from the leaves of the R-tree."""
    fields = Fields(content)
    _, n_levels = fields.numbers("II")
    extents = b""
    for _ in range(n_levels):
        extents = fields.bytes(32 * fields.number("Q"))
    found = np.frombuffer(extents, "<i8").astype(np.int64).reshape(-1, 4)[:, :2]
    if len(found) != n_tiles:
        raise ValueError("its tile extents do not match its tiles")
    return found
