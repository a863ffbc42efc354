"""The matrix of an archive, which stores each cell in a frame of its own."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._chunks import ChunkedArray, ChunkReads, ContiguousChunks, SlowRead, chunk_codec
from cellfeed._runs import Runs, expand
from cellfeed._sources._base import DirectCsr
from cellfeed._sources._cellstream._archive import Archive
from cellfeed._sources._cellstream._tables import read_var

__all__ = ["CellFrames"]

_FLOATS = frozenset(map(np.dtype, ("float32", "float64")))
_ANNOUNCED_BYTES = 1 << 14  # cells whose frames lie within this many bytes are announced together
_LARGEST = 1 << 24  # float32 represents integers up to this exactly


class CellFrames(DirectCsr):
    """The frames of an archive's cells.

    Values are float32, as cellstream returns them, or float64 if float32 may not represent them.

    Parameters
    ----------
    archive
        The archive.
    """

    decodes_to = _FLOATS

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        opened = archive()
        manifest, self.shape = opened.manifest, opened.shape
        is_wide = manifest["value_dtype_on_disk"] == "float64" or (
            manifest["value_dtype_on_disk"] == "uint32"
            and np.iinfo(manifest["x_data_dtype_min"]).max > _LARGEST
        )
        self.dtype = np.dtype(np.float64 if is_wide else np.float32)
        self.is_canonical = bool(manifest.get("indices_canonical", False))
        self._stored = ChunkedArray(
            name=f"{archive.location}: `X`",
            shape=(opened.payload.size,),
            dtype=np.dtype(np.uint8),
            chunk_shape=(_ANNOUNCED_BYTES,),
            codec=chunk_codec("none"),
            locations=ContiguousChunks(opened.first, opened.payload.size, _ANNOUNCED_BYTES),
            files=archive,
        )

    def var_names(self) -> NDArray[np.object_]:
        """Return the names of the genes."""
        return read_var(self._archive).index.to_numpy(object)

    def stored_bytes(self) -> int:
        """Return the size in bytes of the frames, and of the tables that locate them."""
        tables = 2 * 8 * (self.shape[0] + 1)
        return int(self._archive().payload.size) + tables

    def codec(self) -> str:
        """Return the compression of frames."""
        return str(self._archive().manifest["codec"])

    def slow_read(self, dtype: np.dtype[Any]) -> SlowRead | None:  # noqa: ARG002 - any is cast to
        """Return why cells are not decoded in place; None if they are."""
        if self._archive().decode is not None:
            return None
        reason = "its compiled decoder is missing or does not support these values"
        return SlowRead("cellstream", reason, "install its current wheel")

    def row_lengths(self, runs: Runs) -> NDArray[np.int64]:
        """Return the number of nonzeros of each cell."""
        return _differences(self._archive().indptr, expand(runs))

    def stored_rows(self, rows: NDArray[np.int64]) -> ChunkReads:
        """Return the bytes of cells; see `DirectCsr`."""
        offsets = self._archive().offsets
        nowhere = np.zeros(rows.size, np.int64)
        reads = self._stored.reads_of_ranges(
            offsets[rows], _differences(offsets, rows), nowhere, self._stored.dtype
        )
        return reads.without_placing()

    def decode_rows(
        self, rows: NDArray[np.int64], indices: NDArray[Any], data: NDArray[Any]
    ) -> None:
        """Decode cells one after the other; see `DirectCsr`."""
        opened = self._archive()
        self._archive.check_unchanged()
        try:
            if opened.decode is not None:
                opened.decode(rows, data, indices)
                return
            found = self._archive.gather(rows, data.dtype)
        except Exception as error:  # describing it takes longer than many calls
            with self._archive.failures_named(f"cells {rows.min()} to {rows.max()}"):
                raise error from None
        indices[:], data[:] = found.indices, found.data


def _differences(pointers: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    return pointers[rows + 1] - pointers[rows]
