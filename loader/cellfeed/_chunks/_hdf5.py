"""Arrays of HDF5 files as chunks, where the HDF5 library is asked once, for the chunk table."""

import math

import h5py
import numpy as np
from h5py import h5t, h5z

from cellfeed._bytes import ByteStore
from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._array import (
    ChunkedArray,
    ChunkLocations,
    ChunkTable,
    ContiguousChunks,
)
from cellfeed._chunks._grid import chunk_grid
from cellfeed._chunks._hdf5_chunks import ADDRESS, FILTER_MASK, SIZE, list_chunks
from cellfeed._tables import KeptTables, Tables

__all__ = ["hdf5_array", "hdf5_codec"]

_NO_CODECS = (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32)
_BLOSC_COMPRESSOR = 6  # position among the filter's parameters
_BLOSC_SNAPPY = 3
_CONTIGUOUS_CHUNK_ELEMENTS = 1 << 14


def hdf5_array(
    dataset: h5py.Dataset,
    name: str,
    files: ByteStore,
    kept: KeptTables,
    *,
    lost_is_zero: bool,
) -> ChunkedArray | None:
    """Return a data set as chunks, None if it is stored in a way that only HDF5 itself knows.

    Parameters
    ----------
    dataset
        One- or two-dimensional.
    name
        What messages call it.
    files
        The file, as number 0.
    kept
        Tables of the array from earlier openings.
    lost_is_zero
        See `ChunkedArray`.
    """
    plain = dataset.dtype.kind in "biuf" and _is_stored_as_in_memory(dataset)
    if not plain or dataset.size == 0 or dataset.is_virtual or dataset.external:
        return None
    if dataset.file.userblock_size:  # offsets would count from its end, in some versions
        return None
    filters = _filters(dataset)
    if filters is None:
        return None
    codec, compression, shuffle = filters
    locations: ChunkLocations | None
    if dataset.chunks is None:
        shape: tuple[int, ...] = (int(dataset.size),)
        chunk_shape: tuple[int, ...] = (_CONTIGUOUS_CHUNK_ELEMENTS,)
        locations = _contiguous(dataset)
    else:
        shape, chunk_shape = dataset.shape, dataset.chunks
        locations = _kept_table(dataset, kept, compression, shuffle)
    if locations is None:
        return None
    return ChunkedArray(
        name=name,
        shape=shape,
        dtype=dataset.dtype,
        chunk_shape=chunk_shape,
        codec=codec,
        shuffled=shuffle is not None,
        locations=locations,
        files=files,
        lost_is_zero=lost_is_zero,
    )


def hdf5_codec(dataset: h5py.Dataset) -> str:
    """Return how a data set is compressed: such as "gzip 4" or "none".

    Parameters
    ----------
    dataset
        Of any kind; a filter that is not known here has the name that the file gives it.
    """
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(i) for i in range(created.get_nfilters())]
    return ", ".join(_name(*each) for each in filters if each[0] not in _NO_CODECS) or "none"


def _name(number: int, _flags: int, parameters: tuple[int, ...], name: bytes) -> str:
    """Return what a filter is called, and how hard it tries."""
    known = kernels.hdf5_filter(number)
    if known is None:
        return name.decode(errors="replace").split(";")[0].strip() or f"filter {number}"
    if known.level is None or known.level >= len(parameters):
        return known.name
    return f"{known.name} {parameters[known.level]}"


def _is_stored_as_in_memory(dataset: h5py.Dataset) -> bool:
    """Return whether bytes need no conversion: also bfloat16 reads as float32, for example."""
    if not dataset.dtype.isnative:
        return False
    types = [dataset.id.get_type(), h5t.py_create(dataset.dtype)]
    stored, in_memory = (
        each.get_super() if each.get_class() == h5t.ENUM else each for each in types
    )
    return bool(stored.equal(in_memory))


def _filters(dataset: h5py.Dataset) -> tuple[int, int | None, int | None] | None:
    """Return the codec, and the positions of compression and shuffling among the filters."""
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(i) for i in range(created.get_nfilters())]
    numbers = [each[0] for each in filters]
    shuffle = None
    if numbers[:1] == [h5z.FILTER_SHUFFLE]:
        shuffle, numbers = 0, numbers[1:]
    if not numbers:
        return kernels.STORED, None, shuffle
    codec = kernels.HDF5_CODECS.get(numbers[0])
    if codec is None or len(numbers) > 1 or not kernels.can_decode(codec):
        return None
    if codec == kernels.BLOSC and filters[-1][2][_BLOSC_COMPRESSOR:][:1] == (_BLOSC_SNAPPY,):
        return None  # the library that is used here lacks it
    return codec, 0 if shuffle is None else 1, shuffle


def _contiguous(dataset: h5py.Dataset) -> ContiguousChunks | None:
    offset = dataset.id.get_offset()
    itemsize = dataset.dtype.itemsize
    n_bytes = dataset.size * itemsize
    if offset is None:  # compact, or never written
        return None
    if dataset.id.get_storage_size() != n_bytes:
        return None
    return ContiguousChunks(
        offset=offset,
        n_bytes=n_bytes,
        chunk_bytes=_CONTIGUOUS_CHUNK_ELEMENTS * itemsize,
    )


def _kept_table(
    dataset: h5py.Dataset, kept: KeptTables, compression: int | None, shuffle: int | None
) -> ChunkTable | None:
    if dataset.maxshape[0] is not None and None in dataset.maxshape[1:]:
        return None  # HDF5 gives wrong offsets of chunks if only a dimension after the first grows
    created = dataset.id.get_create_plist()
    filters = [created.get_filter(i) for i in range(created.get_nfilters())]
    depends_on = f"chunks {dataset.shape} {dataset.dtype.str} {dataset.chunks} {filters}"
    n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
    tables = kept.get(depends_on, n_chunks, lambda: _table(dataset, compression, shuffle))
    return None if tables is None else ChunkTable(**tables)


def _table(dataset: h5py.Dataset, compression: int | None, shuffle: int | None) -> Tables | None:
    """Ask HDF5 where the chunks are; see `ChunkTable`."""
    chunk_shape = dataset.chunks
    grid = chunk_grid(dataset.shape, chunk_shape)
    chunk_bytes = math.prod(chunk_shape) * dataset.dtype.itemsize
    listed = list_chunks(dataset, chunk_shape, grid)
    offsets = listed[:, ADDRESS].copy()
    # What cannot be compressed grows, but not to twice its size.
    dtype = np.uint32 if 2 * chunk_bytes < 1 << 32 else np.int64
    largest = np.iinfo(dtype).max
    if listed[:, SIZE].max() > largest:
        raise ValueError(f"there are chunks of more than {largest} bytes")
    sizes = np.where(offsets < 0, 0, listed[:, SIZE]).astype(dtype)
    masks = np.where(offsets < 0, 0, listed[:, FILTER_MASK])
    if (offsets < 0).any() and dataset.fillvalue != 0:
        return None
    if compression is None and (sizes[offsets >= 0] != chunk_bytes).any():
        # HDF5 itself would read whatever is in memory behind a smaller one.
        raise ValueError(f"there are chunks of another size than {chunk_bytes} bytes")
    flags = np.zeros(len(offsets), np.uint8)
    for position, bit in ((compression, kernels.UNCOMPRESSED), (shuffle, kernels.UNSHUFFLED)):
        if position is not None:
            flags |= np.where(masks >> position & 1, bit, 0).astype(np.uint8)
    return {"offsets": offsets, "sizes": sizes, "flags": flags}
