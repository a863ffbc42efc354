"""Chunked arrays of HDF5 files, whose chunk tables are read once from the HDF5 library."""

import ctypes
import math
import uuid
import zlib
from array import array
from collections.abc import Callable, Sequence
from functools import cache

import h5py
import numpy as np
from h5py import h5d, h5t, h5z
from h5py._objects import phil  # the lock that all of h5py takes: HDF5 is not thread-safe
from numpy.typing import NDArray

from cellfeed.bytes import ByteStore
from cellfeed.bytes._tables import CachedTables, Tables, are_many, pack, unpack
from cellfeed.decode._array import (
    CHUNK_ELEMENTS,
    ChunkedArray,
    ChunkLocations,
    ChunkTable,
    Pieces,
    chunk_grid,
    holds_whole_rows,
    in_two_dimensions,
)
from cellfeed.decode._decoder import SlowRead
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import BLOSC, HDF5_CODECS, STORED, can_decode, hdf5_filter

# Columns of the list of an array's chunks.
_ADDRESS, _SIZE, _MASK, _N_COLUMNS = range(4)


def list_chunks(
    dataset: h5py.Dataset, chunk_shape: Sequence[int], grid: Sequence[int]
) -> NDArray[np.int64]:
    """Return byte offset, size and filter mask of each chunk, in C order of the grid.

    Parameters
    ----------
    dataset
        A chunked dataset.
    chunk_shape, grid
        Shape of a chunk, and number of chunks along each dimension.

    Returns
    -------
    int64, shape (n_chunks, 3); -1 for missing chunks.

    Raises
    ------
    ValueError
        A chunk is outside of the array or of the file.
    """
    found, outside = array("q"), "it has a chunk outside of the array or of the file"
    try:
        dataset.id.chunk_iter(
            lambda chunk: found.extend(
                (*chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask)
            )
        )
    except OverflowError:
        raise ValueError(outside) from None
    listed = np.array(found, np.int64).reshape(-1, len(grid) + _N_COLUMNS)
    places = listed[:, : len(grid)] // chunk_shape
    if listed.min(initial=0) < 0 or (places >= grid).any():
        raise ValueError(outside)
    table = np.full((math.prod(grid), _N_COLUMNS), -1, np.int64)
    table[np.ravel_multi_index((*places.T,), grid)] = listed[:, len(grid) :]
    return table


_NO_CODECS = (h5z.FILTER_SHUFFLE, h5z.FILTER_FLETCHER32)
_BLOSC_COMPRESSOR = 6  # position among the filter's parameters
_BLOSC_SNAPPY = 3
_RAW_EDGES = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
_TWO = 2  # dimensions of a matrix, whose chunks may hold parts of rows


def hdf5_tables(dataset: h5py.Dataset, cached: Callable[[], CachedTables]) -> Tables | None:
    """Return how a dataset is stored, for `hdf5_array`; None if `hdf5_slow_read` gives a reason.

    Parameters
    ----------
    dataset
        A dataset with one or more dimensions; with three or more, rows are flattened.
    cached
        Returns cached tables of the array from earlier openings; called if it has many chunks.
    """
    known = _known(dataset)
    if isinstance(known, SlowRead):
        return None
    codec, is_shuffled = known
    described = {
        "dtype": dataset.dtype.str,
        "codec": codec,
        "shuffled": is_shuffled,
    }
    if dataset.chunks is None:
        n, offset = int(dataset.size), int(dataset.id.get_offset())
        return pack(described | {"shape": [n], "chunk_shape": [CHUNK_ELEMENTS], "offset": offset})
    described["shape"] = in_two_dimensions(dataset.shape)
    described["chunk_shape"] = in_two_dimensions(dataset.chunks)
    n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
    if not are_many(n_chunks):
        return {**pack(described), **_table(dataset, codec, is_shuffled)}
    depends_on = f"chunks {dataset.shape} {dataset.dtype.str} {dataset.chunks} {_filters(dataset)}"
    found = cached().get(depends_on, n_chunks, lambda: _table(dataset, codec, is_shuffled))
    return {**pack(described), **found}


def hdf5_array(tables: Tables, name: str, files: ByteStore, *, lost_is_zero: bool) -> ChunkedArray:
    """Return a dataset as a chunked array, without opening it.

    Parameters
    ----------
    tables
        `hdf5_tables` of the dataset.
    name
        Its name in messages.
    files
        The file, with number 0.
    lost_is_zero
        See `ChunkedArray`.
    """
    described = unpack(tables)
    dtype, shape = np.dtype(described["dtype"]), tuple(described["shape"])
    locations: ChunkLocations
    if "offset" in described:
        locations = Pieces.one(described["offset"], shape[0], dtype.itemsize)
    else:
        locations = ChunkTable(tables["offsets"], tables["sizes"], tables["flags"])
    return ChunkedArray(
        name=name,
        shape=shape,
        dtype=dtype,
        chunk_shape=tuple(described["chunk_shape"]),
        codec=described["codec"],
        shuffled=described["shuffled"],
        locations=locations,
        files=files,
        lost_is_zero=lost_is_zero,
    )


def hdf5_slow_read(dataset: h5py.Dataset) -> SlowRead | None:
    """Return why `hdf5_tables` returns None, from metadata alone; None if it does not.

    Parameters
    ----------
    dataset
        A dataset with one or more dimensions.
    """
    known = _known(dataset)
    return known if isinstance(known, SlowRead) else None


def hdf5_codec(dataset: h5py.Dataset) -> str:
    """Return the compression of a dataset, such as "gzip 4" or "none".

    Parameters
    ----------
    dataset
        Any dataset; an unknown filter has the name that is stored in the file.
    """
    names = [_name(*each) for each in _filters(dataset) if each[0] not in _NO_CODECS]
    return ", ".join(names) or "none"


def _name(number: int, _flags: int, parameters: tuple[int, ...], name: bytes) -> str:
    """Return the name of a filter, and its compression level."""
    known = hdf5_filter(number)
    if known is None:
        said = name.decode(errors="replace").split(";")[0].strip()
        return said.removeprefix("HDF5 ").removesuffix(" filter") or f"filter {number}"
    if known.level is None or known.level >= len(parameters):
        return known.name
    return f"{known.name} {parameters[known.level]}"


def _known(dataset: h5py.Dataset) -> tuple[int, bool] | SlowRead:
    """Return codec and whether bytes are shuffled if cellfeed decodes a dataset; else the reason.

    The filters are shuffling, if any, and compression, if any.
    """
    dtype = dataset.dtype
    if not dtype.isnative:
        remedy = f"write it as {dtype.newbyteorder('=')}"
        return _slow("its numbers are big-endian", remedy)
    if dtype.kind not in "biuf" or not _is_stored_as_in_memory(dataset):
        return _slow(f"its numbers must be converted to {dtype}", f"write it as {dtype}")
    if dataset.size == 0:
        return _slow("it is empty")
    if dataset.is_virtual or dataset.external:
        return _slow("its values are in other files")
    return _slow_layout(dataset) or _known_filters(dataset)


def _slow(reason: str, *remedy: str) -> SlowRead:
    return SlowRead("h5py", reason, *remedy)


def _is_stored_as_in_memory(dataset: h5py.Dataset) -> bool:
    """Return whether bytes need no conversion; bfloat16, for example, is read as float32."""
    types = [dataset.id.get_type(), h5t.py_create(dataset.dtype)]
    stored, in_memory = (
        each.get_super() if each.get_class() == h5t.ENUM else each for each in types
    )
    return bool(stored.equal(in_memory))


def _slow_layout(dataset: h5py.Dataset) -> SlowRead | None:
    """Return why only HDF5 can locate the bytes; None if they are at known offsets."""
    if dataset.chunks is not None:
        return _slow_chunks(dataset)
    if dataset.id.get_create_plist().get_layout() == h5d.COMPACT:
        return _slow("it is stored in its own header (compact)")
    n_bytes = dataset.size * dataset.dtype.itemsize
    if dataset.id.get_offset() is None or dataset.id.get_storage_size() != n_bytes:
        return _slow("it was never written completely")
    return None


def _slow_chunks(dataset: h5py.Dataset) -> SlowRead | None:
    if dataset.maxshape[0] is not None and None in dataset.maxshape[1:]:
        # HDF5 gives wrong offsets of chunks then.
        return _slow("it is resizable in its second dimension but not in its first")
    if dataset.ndim > _TWO and not holds_whole_rows(dataset.shape, dataset.chunks):
        return _slow("its chunks have parts of rows", "write it in chunks of whole rows")
    if _has_raw_edges(dataset):
        return _slow("its chunks at the edge are not filtered")
    n_chunks = math.prod(chunk_grid(dataset.shape, dataset.chunks))
    if not _is_filled_with_zeros(dataset) and dataset.id.get_num_chunks() < n_chunks:
        return _slow("its missing chunks are not zero")
    return None


def _has_raw_edges(dataset: h5py.Dataset) -> bool:
    """Return whether chunks that reach beyond the array are stored unfiltered.

    Their filter masks do not say so, and h5py has no function for it.
    """
    if all(size % chunk == 0 for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)):
        return False
    created = dataset.id.get_create_plist()
    if not created.get_nfilters():
        return False
    try:  # of the library that h5py uses
        get_options = ctypes.CDLL(h5py.h5d.__file__).H5Pget_chunk_opts
    except (AttributeError, OSError):
        return False
    get_options.argtypes, options = (ctypes.c_int64, ctypes.c_void_p), ctypes.c_uint()
    with phil:
        ended = get_options(created.id, ctypes.byref(options))
    return ended >= 0 and bool(options.value & _RAW_EDGES)


def _is_filled_with_zeros(dataset: h5py.Dataset) -> bool:
    """Return whether missing chunks are read as zeros."""
    defined = dataset.id.get_create_plist().fill_value_defined()
    if defined == h5d.FILL_VALUE_USER_DEFINED:
        return bool(dataset.fillvalue == 0)
    return bool(defined == h5d.FILL_VALUE_DEFAULT)


def _known_filters(dataset: h5py.Dataset) -> tuple[int, bool] | SlowRead:
    filters = _filters(dataset)
    is_shuffled = [each[0] for each in filters[:1]] == [h5z.FILTER_SHUFFLE]
    filters = filters[is_shuffled:]
    if not filters:
        return STORED, is_shuffled
    names = " with ".join(_name(*each) for each in filters)
    codec = HDF5_CODECS.get(filters[0][0])
    if codec == BLOSC and filters[0][2][_BLOSC_COMPRESSOR:][:1] == (_BLOSC_SNAPPY,):
        names, codec = f"{names} with snappy", None  # the library that is used here lacks it
    if codec is None or len(filters) > 1:
        remedy = "write it again with anndata and compression='gzip'"
        return _slow(f"filter {names} is not supported", remedy)
    if not can_decode(codec):
        return _slow(f"no library that decodes {names} was found", "install cellfeed anew")
    return codec, is_shuffled


def _filters(dataset: h5py.Dataset) -> list[tuple[int, int, tuple[int, ...], bytes]]:
    """Return number, flags, parameters and name of each filter."""
    created = dataset.id.get_create_plist()
    return [created.get_filter(i) for i in range(created.get_nfilters())]


def _table(dataset: h5py.Dataset, codec: int, is_shuffled: bool) -> Tables:  # noqa: FBT001
    """Read the locations of chunks from HDF5; see `ChunkTable`."""
    chunk_shape = dataset.chunks
    grid = chunk_grid(dataset.shape, chunk_shape)
    chunk_bytes = math.prod(chunk_shape) * dataset.dtype.itemsize
    listed = list_chunks(dataset, chunk_shape, grid)
    offsets = listed[:, _ADDRESS].copy()
    if dataset.file.userblock_size and not _counts_user_block():
        offsets[offsets >= 0] += dataset.file.userblock_size
    # What cannot be compressed grows, but not to twice its size.
    dtype = np.uint32 if 2 * chunk_bytes < 1 << 32 else np.int64
    largest = np.iinfo(dtype).max
    if listed[:, _SIZE].max() > largest:
        raise ValueError(f"it has chunks of more than {largest} bytes")
    sizes = np.where(offsets < 0, 0, listed[:, _SIZE]).astype(dtype)
    masks = np.where(offsets < 0, 0, listed[:, _MASK])
    if (offsets < 0).any() and not _is_filled_with_zeros(dataset):
        raise ValueError(
            "it has fewer chunks than its index states"
        )  # `_slow_layout` asked how many
    if codec == STORED and (sizes[offsets >= 0] != chunk_bytes).any():
        # HDF5 itself would read whatever is in memory behind a smaller one.
        raise ValueError(f"it has chunks that are not {chunk_bytes} bytes long")
    # A bit of a mask for each filter that was skipped, in the order of the filters.
    skipped = [fields.UNSHUFFLED] * is_shuffled + [fields.UNCOMPRESSED] * (codec != STORED)
    flags = np.zeros(len(offsets), np.uint8)
    for position, bit in enumerate(skipped):
        flags |= np.where(masks >> position & 1, bit, 0).astype(np.uint8)
    return {"offsets": offsets, "sizes": sizes, "flags": flags}


# Texts of any length, which HDF5 keeps elsewhere in the file: an array has references to them.

_REFERENCE = np.dtype([("length", "<u4"), ("collection", "<u8"), ("number", "<u4")])
_ADDRESS_BYTES = 8
_MOST_CHECKED = 1 << 22  # texts of an array; larger ones are read in part


def longest_text(dataset: h5py.Dataset, read: Callable[[int, int], bytes]) -> int:
    """Return the length of the longest text of an array in bytes, as its references state it.

    HDF5 allocates memory for a text before it compares this length with that of the text itself.

    Parameters
    ----------
    dataset
        Any dataset.
    read
        Given an offset and a number of bytes, reads these from the file.

    Returns
    -------
    0 if there are no such texts or very many of them, or if their references are neither plain nor
    gzip-compressed.
    """
    text = h5py.check_string_dtype(dataset.dtype)
    if text is None or text.length is not None or not 0 < dataset.size <= _MOST_CHECKED:
        return 0
    filters = [each[0] for each in _filters(dataset)]
    has_usual_addresses = dataset.file.id.get_create_plist().get_sizes()[0] == _ADDRESS_BYTES
    if dataset.is_virtual or dataset.external or not has_usual_addresses:
        return 0
    parts = list[bytes]()
    if dataset.chunks is None:
        if dataset.id.get_offset() is not None:
            parts.append(read(dataset.id.get_offset(), dataset.size * _REFERENCE.itemsize))
    elif filters in ([], [h5z.FILTER_DEFLATE]):
        chunks = list[tuple[int, ...]]()
        dataset.id.chunk_iter(lambda chunk: chunks.append(chunk.chunk_offset))
        n_bytes = math.prod(dataset.chunks) * _REFERENCE.itemsize
        for each in chunks:
            mask, part = dataset.id.read_direct_chunk(each)
            if filters and not mask:
                part = zlib.decompressobj().decompress(part, n_bytes)
            parts.append(part)
    n_bytes = _REFERENCE.itemsize
    references = (
        np.frombuffer(part, _REFERENCE, len(part) // n_bytes)
        for part in parts
        if len(part) >= n_bytes
    )
    return max((int(each["length"].max()) for each in references), default=0)


@cache
def _counts_user_block() -> bool:
    """Return whether HDF5 counts offsets of chunks from the start of a file or its user block.

    Versions differ, so this is tested with two files that differ only in their user block, as
    files of MuData have one.
    """
    return _first_chunk(user_block=512) > _first_chunk(user_block=0)


def _first_chunk(*, user_block: int) -> int:
    # HDF5 refuses a second file of one name while the first is open, as in another thread.
    name, options = uuid.uuid4().hex, {"driver": "core", "backing_store": False}
    with h5py.File(name, "w", userblock_size=user_block, **options) as file:
        dataset = file.create_dataset("chunked", data=np.zeros(1), chunks=(1,))
        file.flush()
        return int(dataset.id.get_chunk_info(0).byte_offset)
