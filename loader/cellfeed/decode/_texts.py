"""Codecs of zarr for texts of any length, which check how many there are before they decode them.

A chunk begins with the number of its texts, for which numcodecs allocates memory before it reads
them. zarr is told to use these codecs in their place, which decode the same.
"""

from collections.abc import Iterable
from typing import Any

import numcodecs
import numpy as np
import zarr.codecs
import zarr.registry
from numcodecs.compat import ensure_contiguous_ndarray

_COUNT_BYTES = 4  # of the number of texts, and of the length of each


class Texts(numcodecs.VLenUTF8):  # type: ignore[misc]
    """Texts in format v2."""

    def decode(self, buf: Any, out: Any = None) -> Any:
        """Decode a chunk."""
        _check(buf)
        return super().decode(buf, out)


class VLenUTF8Codec(zarr.codecs.VLenUTF8Codec):
    """Texts in format v3; zarr asks for the name of this class."""

    async def decode(self, chunks_and_specs: Iterable[Any]) -> Iterable[Any]:
        """Decode chunks."""
        chunks = [*chunks_and_specs]
        for chunk, _ in chunks:
            if chunk is not None:
                _check(chunk.as_array_like())
        return await super().decode(chunks)


def _check(chunk: Any) -> None:
    """Check that a chunk has bytes for the length of each of its texts.

    Raises
    ------
    ValueError
        It has not.
    """
    content = ensure_contiguous_ndarray(chunk).view(np.uint8)
    n_texts = int.from_bytes(content[:_COUNT_BYTES].tobytes(), "little")
    if _COUNT_BYTES * (1 + n_texts) > content.size:
        raise ValueError(f"a chunk of {content.size:,} bytes cannot have {n_texts:,} texts")


numcodecs.register_codec(Texts)
zarr.registry.register_codec("vlen-utf8", VLenUTF8Codec)
zarr.config.set({"codecs.vlen-utf8": f"{__name__}.{VLenUTF8Codec.__qualname__}"})
