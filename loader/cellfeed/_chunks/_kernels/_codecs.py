"""Codecs: each is described once, here, and has a function in `_decompression`; and casts."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cellfeed._chunks._kernels._functions import (
    BLOSC_DECOMPRESS,
    BLOSC_VALIDATE,
    DEFLATE_FREE,
    DEFLATE_NEW,
    GZIP_DECOMPRESS,
    LZ4_DECOMPRESS,
    PREAD,
    ZLIB_DECOMPRESS,
    ZSTD_DECOMPRESS,
    ZSTD_FREE,
    ZSTD_NEW,
    function_addresses,
)

__all__ = [
    "BLOSC",
    "GZIP",
    "HDF5_CODECS",
    "LZ4",
    "LZF",
    "STORED",
    "ZARR_CODECS",
    "ZLIB",
    "ZSTD",
    "Hdf5Filter",
    "can_cast",
    "can_decode",
    "hdf5_filter",
]


@dataclass(frozen=True, slots=True)
class Hdf5Filter:
    """The HDF5 filter of a codec.

    Parameters
    ----------
    number
        As registered: https://github.com/HDFGroup/hdf5_plugins
    name
        The name that writers of files use.
    level
        Index of the filter's parameter with the compression level, if there is one.
    """

    number: int
    name: str
    level: int | None = None


@dataclass(frozen=True, slots=True)
class _Codec:
    """A codec of chunks.

    Parameters
    ----------
    functions
        The C functions that decompress them, by their indices in `_native`.
    hdf5
        The filter of HDF5, if there is one.
    zarr
        Its name in zarr's format v3, and its id in v2, if there is one.
    """

    functions: tuple[int, ...]
    hdf5: Hdf5Filter | None
    zarr: str | None


_codecs: list[_Codec] = []


def _codec(*functions: int, hdf5: Hdf5Filter | None = None, zarr: str | None = None) -> int:
    """Describe a codec, and return its number, by which compiled functions know it."""
    _codecs.append(_Codec(functions, hdf5, zarr))
    return len(_codecs) - 1


STORED = _codec()  # not compressed
ZLIB = _codec(
    DEFLATE_NEW, DEFLATE_FREE, ZLIB_DECOMPRESS, hdf5=Hdf5Filter(1, "gzip", level=0), zarr="zlib"
)
GZIP = _codec(DEFLATE_NEW, DEFLATE_FREE, GZIP_DECOMPRESS, zarr="gzip")
ZSTD = _codec(
    ZSTD_NEW, ZSTD_FREE, ZSTD_DECOMPRESS, hdf5=Hdf5Filter(32015, "zstd", level=0), zarr="zstd"
)
BLOSC = _codec(
    BLOSC_VALIDATE, BLOSC_DECOMPRESS, hdf5=Hdf5Filter(32001, "blosc", level=4), zarr="blosc"
)
LZF = _codec(hdf5=Hdf5Filter(32000, "lzf"))
LZ4 = _codec(LZ4_DECOMPRESS, zarr="lz4")

HDF5_CODECS = {each.hdf5.number: codec for codec, each in enumerate(_codecs) if each.hdf5}
ZARR_CODECS = {each.zarr: codec for codec, each in enumerate(_codecs) if each.zarr}


def can_decode(codec: int) -> bool:
    """Return whether all functions that a codec needs were found."""
    addresses = function_addresses()
    return all(addresses[function] for function in (PREAD, *_codecs[codec].functions))


def hdf5_filter(number: int) -> Hdf5Filter | None:
    """Return the description of an HDF5 filter, None if it is not one of these codecs."""
    return _codecs[HDF5_CODECS[number]].hdf5 if number in HDF5_CODECS else None


def can_cast(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether compiled code can cast elements."""
    is_halved = source == np.float32 and target == np.float16 and source.isnative
    return source == target or is_halved or (_is_plain(source) and _is_plain(target))


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8 and dtype != np.float16
