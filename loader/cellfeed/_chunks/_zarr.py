"""Chunked arrays of zarr stores."""

import math
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import ByteStore, threads_until_left
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import ChunkedArray, ChunkLocations, Located
from cellfeed._chunks._grid import in_two_dimensions
from cellfeed._chunks._zarr_layout import ZarrLayout
from cellfeed._errors import FormatError
from cellfeed._tables import KeptTables, Tables

__all__ = ["zarr_array"]

_ABSENT = np.iinfo(np.uint64).max
_CHECKSUM_BYTES = 4
_ENTRY_BYTES = 16
_READERS = 8  # of indexes, which are small and far from each other


def zarr_array(
    layout: ZarrLayout, files: ByteStore, name: str, kept: KeptTables, *, lost_is_zero: bool
) -> ChunkedArray:
    """Return a chunked array; the indexes of all its shards are read, or taken from the cache.

    Parameters
    ----------
    layout, files
        Layout and files of the array.
    name
        Its name in messages.
    kept
        Cached tables of the array from earlier openings.
    lost_is_zero
        See `ChunkedArray`.

    Raises
    ------
    FormatError
        The index of a shard is damaged.
    """
    locations: ChunkLocations = _Files(layout)
    if layout.sharded:
        n_chunks = math.prod(layout.chunk_grid)
        tables = kept.get(f"shards {layout}", n_chunks, lambda: _shards(layout, files, name))
        locations = _Shards(layout, **tables)
    return ChunkedArray(
        name=name,
        shape=in_two_dimensions(layout.shape),
        dtype=layout.dtype,
        chunk_shape=in_two_dimensions(layout.chunk_shape),
        codec=layout.codec,
        delta=layout.delta,
        locations=locations,
        files=files,
        lost_is_zero=lost_is_zero,
    )


@dataclass(frozen=True, slots=True)
class _Files:
    """Locations of chunks with one file each."""

    layout: ZarrLayout

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        decoded = self.layout.decoded_bytes
        is_stored = self.layout.codec == kernels.STORED
        # What cannot be compressed grows by less than this with every codec.
        size = decoded if is_stored else decoded + decoded // 64 + 1024
        return Located(
            files=chunks,
            offsets=np.zeros(len(chunks), np.int64),
            sizes=np.full(len(chunks), size, np.int64),
            flags=np.full(
                len(chunks), kernels.OWN_FILE if is_stored else kernels.WHOLE_FILE, np.int64
            ),
        )


@dataclass(frozen=True, slots=True)
class _Shards:
    """Locations of chunks in shards, at 16 bytes per chunk.

    Parameters
    ----------
    layout
        Layout of the array.
    offsets, sizes
        Offset and size of each chunk in bytes, int64; -1 and 0 for missing chunks.
    is_lost
        Whether the file of each shard is missing.
    """

    layout: ZarrLayout
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    is_lost: NDArray[np.bool_]

    def locate(self, chunks: NDArray[np.int64]) -> Located:
        files = self.layout.files_of(chunks)
        offsets = self.offsets[chunks]
        absent = np.where(self.is_lost[files], kernels.LOST, kernels.ABSENT)
        return Located(
            files=files,
            offsets=offsets,
            sizes=self.sizes[chunks],
            flags=np.where(offsets < 0, absent, 0),
        )


def _shards(layout: ZarrLayout, files: ByteStore, name: str) -> Tables:
    """Read the indexes of all shards; see `_Shards`."""
    inner = layout.chunks_of_a_file
    table = np.full((*layout.chunk_grid, 2), -1, np.int64)
    sizes = files.sizes(np.arange(math.prod(layout.file_grid), dtype=np.int64))
    present = np.flatnonzero(sizes >= 0)

    def read(file: int) -> None:
        entries = _read_index(layout, files, file, int(sizes[file]), name).reshape(*inner, 2)
        position = np.unravel_index(file, layout.file_grid)
        part = tuple(slice(k * n, (k + 1) * n) for k, n in zip(position, inner, strict=True))
        # Chunks of a shard that are outside the array are left out.
        table[part] = entries[tuple(slice(n) for n in table[part].shape[:-1])]

    with threads_until_left(_READERS, "cellfeed-index") as threads:
        list(threads.map(read, present.tolist()))
    table = table.reshape(-1, 2)
    offsets = np.ascontiguousarray(table[:, 0])
    chunk_sizes = np.where(offsets < 0, 0, table[:, 1])
    return {"offsets": offsets, "sizes": chunk_sizes, "is_lost": sizes < 0}


def _read_index(
    layout: ZarrLayout, files: ByteStore, file: int, file_bytes: int, name: str
) -> NDArray[np.int64]:
    """Return offset and size of each chunk of a shard; -1 for missing chunks."""
    n_bytes = math.prod(layout.chunks_of_a_file) * _ENTRY_BYTES
    n_stored = n_bytes + _CHECKSUM_BYTES * layout.index_has_checksum
    first = file_bytes - n_stored if layout.index_at_end else 0
    location = files.location_of(file)
    where = f"{location}: `{name}`, index of the shard (bytes {first} to {first + n_stored})"
    if file_bytes < n_stored:
        msg = f"{location}: `{name}`, the shard is truncated; copy or download it again"
        raise FormatError(msg)
    (found,) = files.read_ranges(*(np.array([each], np.int64) for each in (file, first, n_stored)))
    stored = b"" if found is None else bytes(found)
    if len(stored) < n_stored:
        msg = f"{where}: the file ends before them; {_REMEDY}"
        raise FormatError(msg)
    index = stored[:n_bytes]
    if layout.index_has_checksum:
        checksum = int.from_bytes(stored[n_bytes:], "little")
        if google_crc32c.value(index) != checksum:
            msg = f"{where}: its checksum does not match; {_REMEDY}"
            raise FormatError(msg)
    entries = np.frombuffer(index, "<u8").reshape(-1, 2)
    is_absent = (entries == _ABSENT).all(axis=1)
    limit = np.uint64(file_bytes)
    # Compared without a sum, which could overflow.
    is_inside = (entries[:, 0] <= limit) & (
        entries[:, 1] <= limit - np.minimum(entries[:, 0], limit)
    )
    has_size = entries[:, 1] == layout.decoded_bytes if layout.codec == kernels.STORED else True
    if not (is_absent | is_inside & has_size).all():
        msg = f"{where}: has chunks outside of the file; {_REMEDY}"
        raise FormatError(msg)
    return np.where(is_absent[:, None], -1, entries.astype(np.int64))


_REMEDY = "the file is damaged or truncated, copy or download it again"
