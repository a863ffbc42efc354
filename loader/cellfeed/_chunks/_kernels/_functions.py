"""C functions that compiled code calls, and their addresses.

The decompressors are in the shared libraries of well-maintained packages. Their addresses are
arguments of the kernels, not constants in them, so that compiled kernels can be cached on disk.
"""

import ctypes
import importlib.machinery
import importlib.util
import sys
from functools import cache
from typing import Any

import numpy as np

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
ZSTD_NEW = _c_function("ZSTD_createDCtx", "numcodecs.zstd")
ZSTD_FREE = _c_function("ZSTD_freeDCtx", "numcodecs.zstd")
ZSTD_DECOMPRESS = _c_function("ZSTD_decompressDCtx", "numcodecs.zstd")
ZSTD_START_STREAM = _c_function("ZSTD_initDStream", "numcodecs.zstd")
ZSTD_STREAM = _c_function("ZSTD_decompressStream", "numcodecs.zstd")
BLOSC_VALIDATE = _c_function("blosc_cbuffer_validate", "numcodecs.blosc")
BLOSC_DECOMPRESS = _c_function("blosc_decompress_ctx", "numcodecs.blosc")
BLOSC_GETITEM = _c_function("blosc_getitem", "numcodecs.blosc")
LZ4_DECOMPRESS = _c_function("LZ4_decompress_safe", "numcodecs.blosc")
LZ4_DECOMPRESS_HEAD = _c_function("LZ4_decompress_safe_partial", "numcodecs.blosc")
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
