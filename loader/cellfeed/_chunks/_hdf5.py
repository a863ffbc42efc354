"""Arrays of HDF5 files as chunks, where the HDF5 library is asked once, for the chunk table."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5z

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import ChunkedArray, ChunkPlaces, ChunkTable, ContiguousChunks
from cellfeed._chunks._codecs import can_decode

__all__ = ["hdf5_array"]

# Registered numbers of filters: https://github.com/HDFGroup/hdf5_plugins
_CODECS = {
    h5z.FILTER_DEFLATE: kernels.ZLIB,
    32000: kernels.LZF,
    32001: kernels.BLOSC,
    32015: kernels.ZSTD,
}
_CONTIGUOUS_CHUNK_ELEMENTS = 1 << 14


def hdf5_array(
    dataset: h5py.Dataset,
    name: str,
    open_files: Callable[[], Sequence[int]],
    paths: Callable[[], Sequence[Path]],
) -> ChunkedArray | None:
    """Return a data set as chunks, None if it is stored in a way that only HDF5 itself knows.

    Parameters
    ----------
    dataset
        One- or two-dimensional.
    name
        What messages call it.
    open_files
        Returns the file's descriptor, in a list of one.
    paths
        Returns the file's path, in a list of one.
    """
    plain = dataset.dtype.kind in "biuf" and dataset.dtype.isnative
    if not plain or dataset.size == 0 or dataset.is_virtual or dataset.external:
        return None
    if dataset.file.userblock_size:  # offsets would count from its end, in some versions
        return None
    filters = _filters(dataset)
    if filters is None:
        return None
    codec, compression, shuffle = filters
    places: ChunkPlaces | None
    if dataset.chunks is None:
        shape: tuple[int, ...] = (int(dataset.size),)
        chunk_shape: tuple[int, ...] = (_CONTIGUOUS_CHUNK_ELEMENTS,)
        places = _contiguous(dataset)
    else:
        shape, chunk_shape = dataset.shape, dataset.chunks
        places = _table(dataset, compression, shuffle)
    if places is None:
        return None
    return ChunkedArray(
        name=name,
        shape=shape,
        dtype=dataset.dtype,
        chunk_shape=chunk_shape,
        codec=codec,
        shuffled=shuffle is not None,
        places=places,
        open_files=open_files,
        paths=paths,
    )


def _filters(dataset: h5py.Dataset) -> tuple[int, int | None, int | None] | None:
    """Return the codec, and the places of compression and shuffling among the filters."""
    created = dataset.id.get_create_plist()
    numbers = [created.get_filter(i)[0] for i in range(created.get_nfilters())]
    shuffle = None
    if numbers[:1] == [h5z.FILTER_SHUFFLE]:
        shuffle, numbers = 0, numbers[1:]
    if not numbers:
        return kernels.STORED, None, shuffle
    codec = _CODECS.get(numbers[0])
    if codec is None or len(numbers) > 1 or not can_decode(codec):
        return None
    return codec, 0 if shuffle is None else 1, shuffle


def _contiguous(dataset: h5py.Dataset) -> ContiguousChunks | None:
    offset = dataset.id.get_offset()
    if offset is None:  # compact, or never written
        return None
    itemsize = dataset.dtype.itemsize
    return ContiguousChunks(
        offset=offset,
        n_bytes=dataset.size * itemsize,
        chunk_bytes=_CONTIGUOUS_CHUNK_ELEMENTS * itemsize,
    )


def _table(
    dataset: h5py.Dataset, compression: int | None, shuffle: int | None
) -> ChunkTable | None:
    chunk_shape = dataset.chunks
    grid = [-(-n // c) for n, c in zip(dataset.shape, chunk_shape, strict=True)]
    n_chunks = int(np.prod(grid))
    offsets = np.full(n_chunks, -1, np.int64)
    sizes = np.zeros(n_chunks, np.uint32)
    masks = np.zeros(n_chunks, np.uint32)
    across = grid[1] if len(grid) > 1 else 1

    def note(chunk: Any) -> None:
        corner = chunk.chunk_offset
        number = corner[0] // chunk_shape[0] * across
        if len(corner) > 1:
            number += corner[1] // chunk_shape[1]
        offsets[number], sizes[number] = chunk.byte_offset, chunk.size
        masks[number] = chunk.filter_mask

    dataset.id.chunk_iter(note)
    if (offsets < 0).any() and dataset.fillvalue != 0:
        return None
    skipped = np.zeros(n_chunks, np.uint8)
    for place, bit in ((compression, kernels.UNCOMPRESSED), (shuffle, kernels.UNSHUFFLED)):
        if place is not None:
            skipped |= np.where(masks >> place & 1, bit, 0).astype(np.uint8)
    return ChunkTable(offsets, sizes, skipped)
