"""Which codecs can be decoded here."""

from cellfeed._chunks import _kernels as kernels
from cellfeed._chunks._native import has_functions

__all__ = ["can_decode"]

_NEEDED = {
    kernels.STORED: (),
    kernels.LZF: (),
    kernels.ZLIB: (
        "libdeflate_alloc_decompressor",
        "libdeflate_free_decompressor",
        "libdeflate_zlib_decompress",
    ),
    kernels.ZSTD: ("ZSTD_createDCtx", "ZSTD_freeDCtx", "ZSTD_decompressDCtx"),
    kernels.GZIP: (
        "libdeflate_alloc_decompressor",
        "libdeflate_free_decompressor",
        "libdeflate_gzip_decompress",
    ),
    kernels.LZ4: ("LZ4_decompress_safe",),
    kernels.BLOSC: ("blosc_cbuffer_validate", "blosc_decompress_ctx"),
}


def can_decode(codec: int) -> bool:
    """Return whether a codec's library was found."""
    return has_functions("pread", *_NEEDED[codec])
