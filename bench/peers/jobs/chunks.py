"""Where the compressed chunks of a one-dimensional array lie, in HDF5 files and zarr shards."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from storage import Matrix

_MISSING = 2**64 - 1  # how a shard's index marks a chunk that holds only the fill value


@dataclass(frozen=True)
class Chunks:
    """The chunks of one array.

    Attributes
    ----------
    n_elements
        Elements of a chunk.
    places
        File, offset and size in bytes of each chunk, in array order; None for a chunk
        that is not stored.
    decompress
        Turns the compressed bytes into elements; does not hold the GIL.
    """

    n_elements: int
    places: list[tuple[str, int, int] | None]
    decompress: Callable[[bytes], object]

    def touched(self, first: int, last: int) -> range:
        """Return the numbers of the chunks that hold the elements from first to last."""
        return range(first // self.n_elements, -(-last // self.n_elements))

    def read(self, number: int) -> bytes:
        """Return a chunk as stored."""
        place = self.places[number]
        if place is None:
            return b""
        path, offset, size = place
        descriptor = os.open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)


def chunks_of_plate(matrix: Matrix) -> list[Chunks]:
    """Return the chunks of ``data`` and of ``indices`` of a gzip file."""
    return [_hdf5_chunks(array) for array in (matrix.data, matrix.indices)]


def _hdf5_chunks(dataset) -> Chunks:
    import deflate  # noqa: PLC0415 - only gzip needs it

    if dataset.compression != "gzip" or dataset.shuffle:
        raise SystemExit(f"limits are known only for plain gzip, not for `{dataset.name}`")
    (n_elements,) = dataset.chunks
    places: list[tuple[str, int, int] | None] = [None] * -(-dataset.size // n_elements)

    def note(chunk) -> None:
        places[chunk.chunk_offset[0] // n_elements] = (
            dataset.file.filename, chunk.byte_offset, chunk.size,
        )  # fmt: skip

    dataset.id.chunk_iter(note)
    n_bytes = n_elements * dataset.dtype.itemsize
    return Chunks(n_elements, places, lambda raw: deflate.zlib_decompress(raw, n_bytes))


def chunks_of_store(part: Path) -> list[Chunks]:
    """Return the chunks of ``data`` and of ``indices`` of a dataset in a shuffled store."""
    return [_shard_chunks(part / "X" / name) for name in ("data", "indices")]


def _shard_chunks(array: Path) -> Chunks:
    from numcodecs import blosc  # noqa: PLC0415 - only zarr stores need it

    blosc.use_threads = False  # we use our own threads
    description = json.loads((array / "zarr.json").read_text())
    (shard_elements,) = description["chunk_grid"]["configuration"]["chunk_shape"]
    sharding = description["codecs"][0]
    inner = [codec["name"] for codec in sharding["configuration"].get("codecs", ())]
    if inner != ["bytes", "blosc"]:
        raise SystemExit(f"limits are known only for blosc shards, not for `{array}`")
    (n_elements,) = sharding["configuration"]["chunk_shape"]
    (size,) = description["shape"]
    places: list[tuple[str, int, int] | None] = []
    for number in range(-(-size // shard_elements)):
        places += _shard_places(array / "c" / str(number), shard_elements // n_elements)
    return Chunks(n_elements, places[: -(-size // n_elements)], blosc.decompress)


def _shard_places(shard: Path, n_chunks: int) -> list[tuple[str, int, int] | None]:
    """Read the index at the end of a shard: offset and size of each chunk, then a checksum."""
    n_bytes = 16 * n_chunks
    with shard.open("rb") as file:
        file.seek(-n_bytes - 4, os.SEEK_END)
        index = np.frombuffer(file.read(n_bytes), dtype="<u8").reshape(n_chunks, 2)
    return [
        None if offset == _MISSING else (str(shard), offset, size)
        for offset, size in index.tolist()
    ]
