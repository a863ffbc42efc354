"""The machine's limits: how many cells per second if only one kind of work took time.

All usable cores work. Decompression is of chunks that are in memory already: with a block size,
the distinct chunks that a fetch of random blocks touches; without one, every chunk once. The disk
reads files from end to end, several at a time. Memory writes or copies dense minibatches.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from protocol import Job, read_job, report, versions
from storage import Matrix, open_plates, open_store, random_fetches, store_parts

CHUNKS_PER_TASK = 32  # so that handing out work costs nothing measurable
CHUNKS_PER_RUN = 512  # of each array, if every chunk is decompressed once
READ_BYTES = 8 << 20
MINIBATCHES_PER_THREAD = 4  # reused, and together larger than a cache
N_THREADS = len(os.sched_getaffinity(0))
_MISSING = 2**64 - 1  # how a shard's index marks a chunk that holds only the fill value


def matrices_of(job: Job) -> list[Matrix]:
    """Open the plates, or the store."""
    return open_plates(job.plates) if of_plates(job) else open_store(job.store)


def of_plates(job: Job) -> bool:
    """Whether the plates are read rather than a store."""
    return job.settings["storage"] == "h5ad"


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


def chunks_of(job: Job, matrices: list[Matrix]) -> list[list[Chunks]]:
    """Return the chunks of ``data`` and of ``indices`` of each plate, or dataset of the store."""
    if of_plates(job):
        return [[_hdf5_chunks(array) for array in (each.data, each.indices)] for each in matrices]
    parts = store_parts(job.store)
    return [[_shard_chunks(part / "X" / name) for name in ("data", "indices")] for part in parts]


def _hdf5_chunks(dataset) -> Chunks:
    import deflate  # noqa: PLC0415 - only gzip needs it

    if dataset.compression != "gzip" or dataset.shuffle:
        raise SystemExit(f"limits are known only for plain gzip, not for `{dataset.name}`")
    (n_elements,), path = dataset.chunks, dataset.file.filename
    places: list[tuple[str, int, int] | None] = [None] * -(-dataset.size // n_elements)

    def note(chunk) -> None:
        places[chunk.chunk_offset[0] // n_elements] = path, chunk.byte_offset, chunk.size

    dataset.id.chunk_iter(note)
    n_bytes = n_elements * dataset.dtype.itemsize
    return Chunks(n_elements, places, lambda raw: deflate.zlib_decompress(raw, n_bytes))


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
    n_bytes = 16 * (shard_elements // n_elements)
    for number in range(-(-size // shard_elements)):
        shard = array / "c" / str(number)
        with shard.open("rb") as file:  # offset and size of each chunk, then a checksum
            file.seek(-n_bytes - 4, os.SEEK_END)
            index = np.frombuffer(file.read(n_bytes), dtype="<u8").reshape(-1, 2).tolist()
        places += [None if each[0] == _MISSING else (str(shard), *each) for each in index]
    return Chunks(n_elements, places[: -(-size // n_elements)], blosc.decompress)


Work = tuple[float, list[tuple[Chunks, int]]]  # cells, and the chunks that they need


def whole_chunks(
    matrices: list[Matrix], tables: list[list[Chunks]], rng: np.random.Generator
) -> Iterator[Work]:
    """Divide an epoch into runs of neighbouring chunks, in random order."""
    runs = [
        (number, start)
        for number, table in enumerate(tables)
        for start in range(0, len(table[0].places), CHUNKS_PER_RUN)
    ]
    for number, start in (runs[i] for i in rng.permutation(len(runs))):
        matrix, (data, indices) = matrices[number], tables[number]
        if len(data.places) != len(indices.places):
            raise SystemExit("`data` and `indices` must have chunks of the same size")
        chosen = range(start, min(start + CHUNKS_PER_RUN, len(data.places)))
        n_elements = min(chosen.stop * data.n_elements, int(matrix.indptr[-1]))
        n_elements -= start * data.n_elements
        cells = n_elements / matrix.indptr[-1] * matrix.n_rows
        yield cells, [(array, chunk) for array in (data, indices) for chunk in chosen]


def touched_chunks(
    matrices: list[Matrix], tables: list[list[Chunks]], job: Job, rng: np.random.Generator
) -> Iterator[Work]:
    """Divide an epoch into fetches of random blocks, with the chunks that each one touches."""
    for blocks in random_fetches(matrices, job.settings["block_size"], job.fetch_rows, rng):
        touched = set()
        for number, start, stop in blocks:
            first, last = matrices[number].indptr[[start, stop]].tolist()
            for which, array in enumerate(tables[number]):
                chunks = range(first // array.n_elements, -(-last // array.n_elements))
                touched.update((number, which, chunk) for chunk in chunks)
        cells = sum(stop - start for _, start, stop in blocks)
        yield cells, [(tables[number][which], chunk) for number, which, chunk in sorted(touched)]


def decompression(job: Job) -> dict:
    """Decompress until the epoch ends or the time is up, not counting the time to read."""
    rng, matrices = np.random.default_rng(job.seed), matrices_of(job)
    tables = chunks_of(job, matrices)
    if "block_size" in job.settings:
        works = touched_chunks(matrices, tables, job, rng)
    else:
        works = whole_chunks(matrices, tables, rng)
    cells = spent = n_bytes = 0.0
    with ThreadPoolExecutor(N_THREADS) as pool:
        for n_cells, needed in works:
            raws = [(array, array.read(chunk)) for array, chunk in needed]
            tasks = [raws[i : i + CHUNKS_PER_TASK] for i in range(0, len(raws), CHUNKS_PER_TASK)]
            start = time.perf_counter()
            list(pool.map(decompress_all, tasks))
            spent += time.perf_counter() - start
            cells += n_cells
            n_bytes += sum(len(raw) for _, raw in raws)
            if spent >= job.seconds:
                break
    packages = versions(["deflate" if of_plates(job) else "numcodecs"])
    return {"cells": cells, "seconds": spent, "bytes": n_bytes, "threads": N_THREADS,
            "packages": packages}  # fmt: skip


def decompress_all(raws: list[tuple[Chunks, bytes]]) -> None:
    for array, raw in raws:
        if raw:
            array.decompress(raw)


def disk(job: Job) -> dict:
    """Read files from end to end, several at a time, until the time is up."""
    n_cells = sum(matrix.n_rows for matrix in matrices_of(job))
    if of_plates(job):
        paths = [Path(plate) for plate in job.plates]
    else:
        paths = [path for path in Path(job.store).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in paths)
    order = np.random.default_rng(job.seed).permutation(len(paths))
    start = time.perf_counter()
    with ThreadPoolExecutor(N_THREADS) as pool:
        end, least = start + job.seconds, [1] + [0] * (len(paths) - 1)
        n_bytes = sum(pool.map(read_file, [paths[i] for i in order], [end] * len(paths), least))
    seconds = time.perf_counter() - start
    return {"cells": n_cells * n_bytes / size, "seconds": seconds, "bytes": n_bytes}


def read_file(path: Path, end: float, least: int) -> int:
    """Read a file to its end, or until the time is up and at least so many bytes are read.

    Returns the number of bytes.
    """
    buffer = bytearray(READ_BYTES)
    n_bytes = 0
    with path.open("rb", buffering=0) as file:
        while (n_bytes < least or time.perf_counter() < end) and (count := file.readinto(buffer)):
            n_bytes += count
    return n_bytes


def memory(job: Job) -> dict:
    """Write or copy dense minibatches in all threads until the time is up."""
    torch.set_num_threads(1)  # we use our own threads
    n_columns = open_plates(job.plates[:1])[0].n_columns
    start = time.perf_counter()
    with ThreadPoolExecutor(N_THREADS) as pool:
        n_minibatches = sum(pool.map(lambda _: fill(job, n_columns), range(N_THREADS)))
    n_cells, seconds = n_minibatches * job.batch_size, time.perf_counter() - start
    return {"cells": n_cells, "seconds": seconds, "bytes": n_cells * n_columns * 4,
            "threads": N_THREADS, "packages": versions(["torch"])}  # fmt: skip


def fill(job: Job, n_columns: int) -> int:
    """Write or copy minibatches until the time is up, at least once each, and return how many."""
    shape = (job.batch_size, n_columns)
    targets = [torch.ones(shape) for _ in range(MINIBATCHES_PER_THREAD)]
    sources = [torch.ones(shape) for _ in targets] if job.settings["copy"] else []
    n_done = 0
    end = time.perf_counter() + job.seconds
    while n_done == 0 or time.perf_counter() < end:
        for number, target in enumerate(targets):
            if sources:
                target.copy_(sources[number])
            else:
                target.zero_()
        n_done += len(targets)
    return n_done


if __name__ == "__main__":
    job = read_job()
    report(
        {"decompression": decompression, "disk": disk, "memory": memory}[job.settings["limit"]](job)
    )
