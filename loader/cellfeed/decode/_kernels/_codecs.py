"""Codecs: each is described once, here, and has a function in `_decompression`; and casts."""

import ctypes
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

# C functions that compiled code calls, and their addresses.
#
# The decompressors are in the shared libraries of well-maintained packages. Their addresses are
# arguments of the kernels, not constants in them, so that compiled kernels can be cached on disk.

_c_functions: list[tuple[str, str | None]] = []


def _c_function(name: str, module: str | None = None) -> int:
    """Describe a C function, and return the index of its address in `function_addresses`.

    Parameters
    ----------
    name
        Its symbol.
    module
        The Python module whose shared library contains it; the C library if None.
    """
    _c_functions.append((name, module))
    return len(_c_functions) - 1


PREAD = _c_function("pread")
FADVISE = _c_function("posix_fadvise")
OPEN = _c_function("open")
CLOSE = _c_function("close")
CLOCK = _c_function("clock_gettime")
SEEK = _c_function("lseek")
ERRNO = _c_function("__error" if sys.platform == "darwin" else "__errno_location")
DEFLATE_NEW = _c_function("libdeflate_alloc_decompressor", "deflate._deflate")
DEFLATE_FREE = _c_function("libdeflate_free_decompressor", "deflate._deflate")
ZLIB_DECOMPRESS = _c_function("libdeflate_zlib_decompress", "deflate._deflate")
GZIP_DECOMPRESS = _c_function("libdeflate_gzip_decompress", "deflate._deflate")
CRC32 = _c_function("libdeflate_crc32", "deflate._deflate")
CRC32C = _c_function("crc32c_value", "google_crc32c._crc32c")
ZSTD_NEW = _c_function("ZSTD_createDCtx", "numcodecs.zstd")
ZSTD_FREE = _c_function("ZSTD_freeDCtx", "numcodecs.zstd")
ZSTD_DECOMPRESS = _c_function("ZSTD_decompressDCtx", "numcodecs.zstd")
ZSTD_START_STREAM = _c_function("ZSTD_initDStream", "numcodecs.zstd")
ZSTD_STREAM = _c_function("ZSTD_decompressStream", "numcodecs.zstd")
BLOSC_VALIDATE = _c_function("blosc_cbuffer_validate", "numcodecs.blosc")
BLOSC_DECOMPRESS = _c_function("blosc_decompress_ctx", "numcodecs.blosc")
LZ4_DECOMPRESS = _c_function("LZ4_decompress_safe", "numcodecs.blosc")
LZ4_DECOMPRESS_HEAD = _c_function("LZ4_decompress_safe_partial", "numcodecs.blosc")
LZF_DECOMPRESS = _c_function("lzf_decompress", "h5py.h5z")
N_FUNCTIONS = len(_c_functions)


@cache
def function_addresses() -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the address of each C function, int64; 0 where a library lacks it."""
    return np.array([_address(name, module) for name, module in _c_functions], np.int64)


def _address(name: str, module: str | None) -> int:
    try:
        library = None if module is None else _library_file(module)
        function = getattr(ctypes.CDLL(library), name)
    except (AttributeError, ImportError, OSError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _library_file(module: str) -> str:
    # Looking up its full name would import it, which another thread may be doing.
    package = importlib.util.find_spec(module.rpartition(".")[0])
    folders = None if package is None else package.submodule_search_locations
    spec = importlib.machinery.PathFinder.find_spec(module, folders)
    if package is None or spec is None or spec.origin is None:
        raise ImportError(module)
    return spec.origin


# Every codec's function takes ten integers: the address of the chunk and its size; the address of
# the output and the chunk's size after decompression; the first byte that is wanted and the one
# after the last; and addresses of `function_addresses`, of the decompressors of deflate and of
# Zstandard, and of scratch memory of the size of the output. It returns how many bytes it has
# decompressed, at least up to the last that is wanted, or minus a failure. A chunk whose wanted
# bytes are damaged is decompressed to its end, which shows the damage.
SIGNATURE = f"int64({', '.join(['int64'] * 10)})"


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
        The C functions that decompress them, by their numbers at the top of this module.
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
    *(ZSTD_NEW, ZSTD_FREE, ZSTD_DECOMPRESS, ZSTD_START_STREAM, ZSTD_STREAM),
    hdf5=Hdf5Filter(32015, "zstd", level=0),
    zarr="zstd",
)
BLOSC = _codec(
    *(BLOSC_VALIDATE, BLOSC_DECOMPRESS, LZ4_DECOMPRESS, LZ4_DECOMPRESS_HEAD),
    hdf5=Hdf5Filter(32001, "blosc", level=4),
    zarr="blosc",
)
LZF = _codec(LZF_DECOMPRESS, hdf5=Hdf5Filter(32000, "lzf"))
LZ4 = _codec(LZ4_DECOMPRESS, LZ4_DECOMPRESS_HEAD)  # blocks without a header

HDF5_CODECS = {each.hdf5.number: codec for codec, each in enumerate(_codecs) if each.hdf5}
ZARR_CODECS = {each.zarr: codec for codec, each in enumerate(_codecs) if each.zarr}


def can_decode(codec: int) -> bool:
    """Return whether all functions that a codec needs were found."""
    addresses = function_addresses()
    return all(addresses[function] for function in (PREAD, *_codecs[codec].functions))


def can_verify() -> bool:
    """Return whether the function that computes a CRC32C was found."""
    return bool(function_addresses()[CRC32C])


def hdf5_filter(number: int) -> Hdf5Filter | None:
    """Return the description of an HDF5 filter, None if it is not one of these codecs."""
    return _codecs[HDF5_CODECS[number]].hdf5 if number in HDF5_CODECS else None


def can_cast(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether compiled code can cast elements."""
    is_halved = source == np.float32 and target == np.float16 and source.isnative
    are_plain = _is_plain(source) and _is_plain(target) and target != np.bool_
    return source == target or is_halved or are_plain


def _is_plain(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf" and dtype.isnative and dtype.itemsize <= 8 and dtype != np.float16
