"""Chunked arrays of zarr stores."""

import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import FormatError
from cellfeed.bytes import ByteStore, cancellable_threads
from cellfeed.bytes._tables import CachedTables, Tables
from cellfeed.decode._array import (
    ChunkedArray,
    ChunkLocations,
    Located,
    chunk_grid,
    holds_whole_rows,
    in_two_dimensions,
)
from cellfeed.decode._decoder import SlowRead
from cellfeed.decode._kernels import _fields as fields
from cellfeed.decode._kernels._codecs import STORED, ZARR_CODECS, can_decode, can_verify

# The layout of a zarr array in its files, from its metadata; formats v2 and v3.

_CHECKSUM = "crc32c"
_NO_CODECS = {"bytes", _CHECKSUM, "transpose"}
_OF_NUMCODECS = "numcodecs."
_SHARDING = "sharding_indexed"
_FILTERS = {"astype", "delta"}
_V2 = 2  # of the format
_TWO = 2  # dimensions of a matrix, whose chunks may hold parts of rows
_UNKNOWN = "is not supported"
_MOST_SHARDS = 1 << 22  # each is looked for when the array is opened

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZarrLayout:
    """Locations and encoding of the chunks of a zarr array.

    Parameters
    ----------
    shape
        Shape of the array.
    dtype
        Dtype of the elements in chunks, which may be narrower than the array's.
    file_shape
        Shape of a file: a chunk, or a shard.
    chunk_shape
        Shape of the unit of encoding: a chunk, or a chunk within a shard.
    codec
        Compression, one of the kernels' codecs.
    delta
        Whether each element of a chunk is stored as its difference from the previous one.
    checksummed
        Whether a CRC32C follows the bytes of each chunk.
    prefix, separator
        Prefix of the names of files within the array's folder, and separator of the positions in
        the grid.
    sharded
        Whether a file contains many chunks, and an index of them.
    index_at_end
        Whether the index is at the end of the shard.
    index_has_checksum
        Whether a CRC32C of the index follows it.
    """

    shape: Shape
    dtype: np.dtype[Any]
    file_shape: Shape
    chunk_shape: Shape
    codec: int
    delta: bool
    checksummed: bool = False
    prefix: str
    separator: str
    sharded: bool = False
    index_at_end: bool = True
    index_has_checksum: bool = False

    @property
    def file_grid(self) -> Shape:
        """Number of files along each dimension."""
        return chunk_grid(self.shape, self.file_shape)

    @property
    def chunk_grid(self) -> Shape:
        """Number of chunks along each dimension, except chunks of shards outside of the array."""
        return chunk_grid(self.shape, self.chunk_shape)

    @property
    def chunks_of_a_file(self) -> Shape:
        """Number of chunks in one file along each dimension."""
        return chunk_grid(self.file_shape, self.chunk_shape)

    @property
    def decoded_bytes(self) -> int:
        """Size of an uncompressed chunk in bytes."""
        return math.prod(self.chunk_shape) * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int | None:
        """Size of each chunk in its file in bytes; None if chunks are compressed."""
        if self.codec != STORED:
            return None
        return self.decoded_bytes + fields.CHECKSUM_BYTES * self.checksummed

    def files_of(self, chunks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of each chunk's file, in C order of the grid."""
        positions = np.unravel_index(chunks, self.chunk_grid)
        files = [k // n for k, n in zip(positions, self.chunks_of_a_file, strict=True)]
        return np.ravel_multi_index(files, self.file_grid).astype(np.int64)

    def file_names(self, files: NDArray[np.int64]) -> NDArray[np.bytes_]:
        """Return the names of files within the array's folder."""
        names: Any = np.bytes_(self.prefix.encode())
        for dimension, position in enumerate(np.unravel_index(files, self.file_grid)):
            if dimension:
                names = np.char.add(names, self.separator.encode())
            names = np.char.add(names, position.astype("S20"))
        return np.asarray(names)

    def file_name(self, file: int) -> str:
        """Return the name of a file within the array's folder."""
        return str(self.file_names(np.array([file], np.int64))[0].decode())


def zarr_layout(metadata: Mapping[str, Any]) -> ZarrLayout | SlowRead:
    """Return the layout of an array, or the reason why only zarr can read it.

    Parameters
    ----------
    metadata
        Metadata of the array, as parsed JSON.
    """
    try:
        return _known_layout(metadata)
    except _SlowError as error:
        return SlowRead("zarr", *error.args)


class _SlowError(Exception):
    """Only zarr can read an array; the arguments are the reason and the remedy of `SlowRead`."""


def _known_layout(metadata: Mapping[str, Any]) -> ZarrLayout:
    shape = _shape(metadata["shape"])
    if not shape or 0 in shape:
        raise _SlowError("it is empty" if shape else "it is a single number")
    codecs, sharding = _encoding(metadata)
    numbers, file_shape, prefix, separator = _grid(metadata, shape)
    dtype = _known_numbers(numbers, metadata["fill_value"])
    chunk_shape, index = file_shape, dict[str, bool]()
    if sharding is not None:
        chunk_shape, index = _shape(sharding["chunk_shape"]), _index(sharding)
    checksummed = codecs[-1][0] == _CHECKSUM
    if checksummed and not can_verify():
        raise _SlowError("no library that verifies its checksums was found")
    codecs = [(_short(name), options) for name, options in codecs]
    names = [name for name, _ in codecs]
    if "bytes" in names:
        n_filters = names.index("bytes")
    else:
        n_filters = next((k for k, name in enumerate(names) if name not in _FILTERS), len(names))
    stored, delta = _filtered(codecs[:n_filters], dtype)
    layout = ZarrLayout(
        shape=shape,
        dtype=stored,
        file_shape=file_shape,
        chunk_shape=chunk_shape,
        codec=_codec(codecs[n_filters : -1 if checksummed else None], stored),
        delta=delta,
        checksummed=checksummed,
        prefix=prefix,
        separator=separator,
        **index,
    )
    if len(shape) > _TWO and not holds_whole_rows(shape, layout.chunk_shape):
        raise _SlowError("its chunks have parts of rows", "write it in chunks of whole rows")
    if layout.sharded and math.prod(layout.file_grid) > _MOST_SHARDS:
        raise _SlowError(f"it has more than {_MOST_SHARDS:,} shards")
    return layout


def _grid(metadata: Mapping[str, Any], shape: Shape) -> tuple[Any, Shape, str, str]:
    """Return the name of the dtype; and `ZarrLayout`'s shape, prefix and separator of files."""
    if metadata["zarr_format"] == _V2:
        if len(shape) > 1 and metadata["order"] != "C":
            raise _SlowError("its chunks are in Fortran order")
        separator = metadata.get("dimension_separator", ".")
        return metadata["dtype"], _shape(metadata["chunks"]), "", separator
    grid, key = metadata["chunk_grid"], metadata["chunk_key_encoding"]
    if grid["name"] != "regular" or key["name"] not in {"default", "v2"}:
        raise _SlowError(f"chunks that are {grid['name']}, {key['name']} {_UNKNOWN}")
    if metadata.get("storage_transformers"):
        raise _SlowError(f"a storage transformer {_UNKNOWN}")
    is_default = key["name"] == "default"
    separator = _options(key).get("separator", "/" if is_default else ".")
    prefix = f"c{separator}" if is_default else ""
    file_shape = _shape(grid["configuration"]["chunk_shape"])
    return metadata["data_type"], file_shape, prefix, separator


_Codecs = Sequence[tuple[str, Mapping[str, Any]]]  # names and options, in the order of writing


def _encoding(metadata: Mapping[str, Any]) -> tuple[_Codecs, Mapping[str, Any] | None]:
    """Return the codecs of chunks, and the options of sharding if shards contain the chunks.

    Names of codecs of numcodecs begin with its name: its CRC32C is another than zarr's.
    """
    if metadata["zarr_format"] == _V2:
        compressor = metadata["compressor"]
        return [
            *((_OF_NUMCODECS + each["id"], each) for each in metadata["filters"] or ()),
            ("bytes", {"endian": sys.byteorder}),  # of the dtype, in fact
            *([] if compressor is None else [(_OF_NUMCODECS + compressor["id"], compressor)]),
        ], None
    codecs, sharding = metadata["codecs"], None
    if [each["name"] for each in codecs] == [_SHARDING]:
        sharding = _options(codecs[0])
        codecs = sharding["codecs"]
    return [(each["name"], _options(each)) for each in codecs], sharding


def zarr_codec(metadata: Mapping[str, Any]) -> str:
    """Return the compression of an array, such as "blosc", "zstd, sharded" or "none".

    Parameters
    ----------
    metadata
        Metadata of the array, as parsed JSON.
    """
    codecs, sharding = _encoding(metadata)
    names = [_short(name) for name, _ in codecs if name not in _NO_CODECS] or ["none"]
    return ", ".join([*names, *([] if sharding is None else ["sharded"])])


def _short(name: str) -> str:
    return name.removeprefix(_OF_NUMCODECS)


def _filtered(filters: _Codecs, dtype: np.dtype[Any]) -> tuple[np.dtype[Any], bool]:
    """Return dtype and delta of `ZarrLayout`, from names and options of filters in write order.

    A narrower dtype must be a subset of the wider one, and differences wrap around.
    """
    stored, delta = dtype, False
    for name, options in filters:
        try:
            if name == "astype":
                given, decoded = np.dtype(options["encode_dtype"]), options.get("decode_dtype")
                known = given.kind in "biuf" and np.can_cast(given, stored)
            else:
                given, decoded = np.dtype(options.get("astype") or stored), options["dtype"]
                known = name == "delta" and given == stored and given.kind in "iu"
            known = known and np.dtype(decoded or stored) == stored
        except (KeyError, TypeError):
            known = False
        if not known or delta or not given.isnative:
            raise _SlowError(f"filter {_listed(name for name, _ in filters)} {_UNKNOWN}")
        stored, delta = given, name == "delta"
    return stored, delta


def _index(options: Mapping[str, Any]) -> dict[str, bool]:
    """Return the properties of a shard's index that `ZarrLayout` needs."""
    first, *others = options["index_codecs"]
    is_plain = _is_plain(first["name"], _options(first))
    if not is_plain or [codec["name"] for codec in others] not in ([], [_CHECKSUM]):
        raise _SlowError(f"its index of shards {_UNKNOWN}")
    return {
        "sharded": True,
        "index_at_end": options.get("index_location", "end") == "end",
        "index_has_checksum": bool(others),
    }


def _codec(codecs: _Codecs, dtype: np.dtype[Any]) -> int:
    """Return the compression of chunks."""
    (first, options), *others = codecs
    if not _is_plain(first, options, dtype.itemsize):
        order = options.get("endian")
        is_order = first == "bytes" and order is not None
        raise _SlowError(
            f"its numbers are {order}-endian" if is_order else f"codec {first} {_UNKNOWN}"
        )
    names = [name for name, _ in others]
    if not names:
        return STORED
    codec = ZARR_CODECS.get(names[0])
    if codec is None or len(names) > 1:
        raise _SlowError(f"codec {_listed(names)} {_UNKNOWN}")
    if not can_decode(codec):
        raise _SlowError(f"no library that decodes {names[0]} was found")
    return codec


def _listed(names: Iterable[str]) -> str:
    return " with ".join(names)


def _is_plain(name: str, options: Mapping[str, Any], itemsize: int = 8) -> bool:
    """Return whether a codec stores elements in their form in memory."""
    return name == "bytes" and (itemsize == 1 or options.get("endian") == sys.byteorder)


def _options(named: Mapping[str, Any]) -> Mapping[str, Any]:
    return named.get("configuration") or {}


def _known_numbers(name: Any, fill_value: Any) -> np.dtype[Any]:
    """Return the dtype if elements are numbers in native byte order, with fill value 0."""
    try:
        dtype: np.dtype[Any] = np.dtype(name)
    except (TypeError, ValueError):  # the latter of structured ones
        raise _SlowError(f"dtype {name} {_UNKNOWN}") from None
    if dtype.kind not in "biuf":
        raise _SlowError(f"dtype {dtype} {_UNKNOWN}")
    if not dtype.isnative:
        raise _SlowError("its numbers are big-endian")
    is_number = isinstance(fill_value, int | float)
    if fill_value is not None and not (is_number and fill_value == 0):
        raise _SlowError(f"its missing chunks are {fill_value}, not 0")
    return dtype


def _shape(values: Sequence[int]) -> Shape:
    return tuple(int(n) for n in values)


_ABSENT = np.iinfo(np.uint64).max
_ENTRY_BYTES = 16
_READERS = 8  # of indexes, which are small and far from each other


def zarr_array(
    layout: ZarrLayout, files: ByteStore, name: str, cached: CachedTables, *, lost_is_zero: bool
) -> ChunkedArray:
    """Return a chunked array; the indexes of all its shards are read, or taken from the cache.

    Parameters
    ----------
    layout, files
        Layout and files of the array.
    name
        Its name in messages.
    cached
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
        tables = cached.get(f"shards {layout}", n_chunks, lambda: _shards(layout, files, name))
        locations = _Shards(layout, **tables)
    return ChunkedArray(
        name=name,
        shape=in_two_dimensions(layout.shape),
        dtype=layout.dtype,
        chunk_shape=in_two_dimensions(layout.chunk_shape),
        codec=layout.codec,
        delta=layout.delta,
        checksummed=layout.checksummed,
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
        is_cut = self.layout.codec == STORED and not self.layout.checksummed
        # What cannot be compressed grows by less than this with every codec.
        size = decoded if is_cut else decoded + decoded // 64 + 1024
        return Located(
            files=chunks,
            offsets=np.zeros(len(chunks), np.int64),
            sizes=np.full(len(chunks), size, np.int64),
            flags=np.full(len(chunks), fields.OWN_FILE if is_cut else fields.WHOLE_FILE, np.int64),
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
        absent = np.where(self.is_lost[files], fields.LOST, fields.ABSENT)
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

    with cancellable_threads(_READERS, "cellfeed-index") as threads:
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
    n_stored = n_bytes + fields.CHECKSUM_BYTES * layout.index_has_checksum
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
    size = layout.stored_bytes
    has_size = True if size is None else entries[:, 1] == size
    if not (is_absent | is_inside & has_size).all():
        msg = f"{where}: has chunks outside of the file; {_REMEDY}"
        raise FormatError(msg)
    return np.where(is_absent[:, None], -1, entries.astype(np.int64))


_REMEDY = "the file is damaged or truncated, copy or download it again"


# Silencing zarr's warnings about the codecs of numcodecs.

_FILTER = (
    "ignore",
    re.compile("Numcodecs codecs are not in the Zarr version 3", re.IGNORECASE),
    UserWarning,
    None,
    0,
)


def expect_numcodecs() -> None:
    """Silence zarr's warning that other implementations may not support codecs of numcodecs.

    The filter is permanent, since threads that open stores concurrently would undo each other's.
    """
    if warnings.filters[:1] != [_FILTER]:  # others may have come before it since
        warnings.filterwarnings("ignore", _FILTER[1].pattern, UserWarning)
