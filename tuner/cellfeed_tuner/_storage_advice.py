"""What other layouts of the files would give.

Both estimates apply the `StageModel` to the changed stages and subtract the difference from the
measured time. They are lower bounds: changed stages count with the low end of their interval, and
all others with the high end.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path
from typing import Literal

from cellfeed_tuner._bottleneck import Bottleneck, StageName
from cellfeed_tuner._configuration import Configuration

# Smallest speedup from other storage that is worth mentioning. Chosen.
LEAST_SPEEDUP = 1.2
# Chunks per block in rewritten files. Chosen: smaller chunks cost little outside the block.
CHUNKS_PER_BLOCK = 4
# Time of `preshuffle`, as a multiple of reading and encoding each cell once. Chosen: above the
# conversions that `bench/compare/advice.py` compares it with.
PRESHUFFLE_OVERHEAD = 3.0
# Smallest chunk size, in bytes, that is advised. Chosen: smaller chunks cost more to find than
# they save.
LEAST_CHUNK_BYTES = 16_384
# Cells per chunk of a shuffled copy. Source: `cellfeed.preshuffle`.
CELLS_PER_STORE_CHUNK = 64


def epochs_until_paid(
    *, conversion_seconds: float, epoch_seconds: float, epoch_seconds_then: float
) -> int | None:
    """Return after how many epochs a conversion has saved the time it took.

    Parameters
    ----------
    conversion_seconds
        Duration of the conversion.
    epoch_seconds, epoch_seconds_then
        Duration of an epoch before and after the conversion. If training is slower than reading,
        pass the time of training.

    Returns
    -------
    Number of epochs; None if epochs do not become faster.

    Examples
    --------
    >>> epochs_until_paid(conversion_seconds=120, epoch_seconds=60, epoch_seconds_then=20)
    3
    >>> epochs_until_paid(conversion_seconds=120, epoch_seconds=60, epoch_seconds_then=60) is None
    True
    """
    saved = epoch_seconds - epoch_seconds_then
    return max(1, ceil(conversion_seconds / saved)) if saved > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """How a collection is stored, and its batch size.

    ``element_bytes`` are those of a value of X, with its column if it is sparse.
    """

    n_cells: int
    rows_per_chunk: float
    batch_size: int
    already_shuffled: bool
    stored_as: str = "csr"
    element_bytes: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSample:
    """What a cell takes in a shuffled copy: seconds of one thread, and stored bytes."""

    encode_seconds: float
    decode_seconds: float
    stored_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAdvice:
    """Another storage layout, and how much faster it would be.

    Parameters
    ----------
    action
        "rechunk": the same files with smaller chunks. "preshuffle": a shuffled copy, read in
        large blocks.
    rows_per_chunk
        Cells per chunk of the new layout.
    block_size
        Block size to use with it.
    least_speedup
        Lower bound of its throughput, divided by the measured one.
    basis
        What the estimate is based on, in one clause.
    epochs_until_paid
        Upper bound of the number of epochs after which the conversion has saved the time it took;
        None if not estimated.
    command
        The command that writes it; empty if there is none.
    """

    action: Literal["rechunk", "preshuffle"]
    rows_per_chunk: int
    block_size: int
    least_speedup: float
    basis: str
    epochs_until_paid: int | None = None
    command: str = ""

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        cells = "1 cell" if self.rows_per_chunk == 1 else f"{self.rows_per_chunk:,} cells"
        what = f"Files with about {cells} per chunk"
        if self.action == "preshuffle":
            what = f"A shuffled copy, read in blocks of {self.block_size:,},"
        tenths = floor(10 * self.least_speedup) / 10
        said = f"{what} would be at least {tenths:.1f}x as fast"
        if (n := self.epochs_until_paid) is not None:
            said += f" and worth writing for {'1 epoch' if n == 1 else f'{n:,} epochs'} or more"
        return f"{said}: `{self.command}`" if self.command else f"{said}."


def storage_advice(
    found: Bottleneck,
    configuration: Configuration,
    layout: StorageLayout,
    store: StoreSample,
    block_sizes: Sequence[int],
    paths: Sequence[str] = (),
) -> tuple[StorageAdvice, ...]:
    """Return which layouts of the files at ``paths`` are worth converting to, the best first."""
    if found.read_amplification is None:
        return ()  # the stages of the format's own library are unknown
    advice = [_rechunk(found, configuration, layout, paths)]
    if not layout.already_shuffled:
        fetch = layout.batch_size * configuration.fetch_factor
        fitting = [size for size in block_sizes if size <= min(fetch, layout.n_cells)]
        advice.append(_preshuffle(found, store, max(fitting, default=1), paths))
    worth = [each for each in advice if each is not None and each.least_speedup >= LEAST_SPEEDUP]
    return tuple(sorted(worth, key=lambda each: -each.least_speedup))


def amplification(
    n_cells: int, rows_per_chunk: float, block_size: int, cells_per_fetch: int
) -> float:
    """Return how many cells are decompressed per cell used, on average.

    Blocks start anywhere in a chunk, and blocks of one fetch may share chunks: of P chunks, B
    blocks that touch t each touch ``P (1 - (1 - t / P)^B)``.

    Examples
    --------
    >>> round(amplification(1_000_000_000, 10.0, 1, 64), 4)
    10.0
    >>> round(amplification(1_000_000_000, 10.0, 91, 91), 4)
    1.0989
    """
    n_chunks = max(1.0, n_cells / rows_per_chunk)
    blocks = max(1.0, cells_per_fetch / block_size)
    rows = min(block_size, cells_per_fetch)
    touched = 1 + max(0.0, rows - 1) / rows_per_chunk
    n_touched: float = n_chunks * (1 - (1 - min(1.0, touched / n_chunks)) ** blocks)
    # The blocks of a fetch are distinct, so all of them are decompressed.
    return max(1.0, n_touched * rows_per_chunk / cells_per_fetch)


def _rechunk(
    found: Bottleneck, configuration: Configuration, layout: StorageLayout, paths: Sequence[str]
) -> StorageAdvice | None:
    now = found.decoded_bytes / found.useful_bytes
    least = max(1, round(LEAST_CHUNK_BYTES / max(1.0, found.useful_bytes)))
    rows = max(least, configuration.block_size // CHUNKS_PER_BLOCK)
    if rows >= layout.rows_per_chunk or now == 0:  # nothing is decompressed
        return None
    then = amplification(
        layout.n_cells, rows, configuration.block_size,
        layout.batch_size * configuration.fetch_factor,
    )  # fmt: skip
    factor = then / now
    return StorageAdvice(
        action="rechunk",
        rows_per_chunk=rows,
        block_size=configuration.block_size,
        command=_repacking(
            max(1, round(rows * found.useful_bytes / layout.element_bytes)), paths, layout
        ),
        least_speedup=_least_speedup(found, {"reading": factor, "decompressing": factor}, {}),
        basis=(
            f"estimated from the layout: {then:.1f} cells would be decompressed per cell used, "
            f"instead of {now:.1f}"
        ),
    )


def _repacking(elements: int, paths: Sequence[str], layout: StorageLayout) -> str:
    """Return the command of HDF5's tools that writes a copy with other chunks."""
    if not paths or Path(paths[0]).suffix != ".h5ad" or layout.stored_as != "csr":
        return ""
    file = shlex.quote(paths[0])
    copy = shlex.quote(str(Path(paths[0]).with_suffix(".rechunked.h5ad")))
    return f"h5repack -l X/data,X/indices:CHUNK={elements} {file} {copy}"


def _quoted(paths: Sequence[str]) -> str:
    """Return paths for a shell: their folder if they are all that it holds."""
    folder = Path(paths[0]).parent
    if len(paths) > 1 and {*map(str, folder.glob("*.h5ad"))} == {*paths}:
        return shlex.quote(str(folder))
    return " ".join(map(shlex.quote, paths))


def _preshuffle(
    found: Bottleneck, store: StoreSample, block_size: int, paths: Sequence[str]
) -> StorageAdvice:
    then = 1 + (CELLS_PER_STORE_CHUNK - 1) / block_size
    smaller = then * store.stored_bytes / max(found.stored_bytes, 1.0)
    least_speedup = _least_speedup(
        found, {"reading": smaller}, {"decompressing": then * store.decode_seconds}
    )
    now = found.measured_seconds_per_cell
    return StorageAdvice(
        action="preshuffle",
        rows_per_chunk=CELLS_PER_STORE_CHUNK,
        block_size=block_size,
        command=f"cellfeed preshuffle {_quoted(paths)} shuffled" if paths else "",
        least_speedup=least_speedup,
        basis="estimated from a sample of your cells, compressed and decompressed the same way",
        epochs_until_paid=epochs_until_paid(
            conversion_seconds=PRESHUFFLE_OVERHEAD
            * (now + store.encode_seconds / found.model.num_threads),
            epoch_seconds=now,
            epoch_seconds_then=now / least_speedup,
        ),
    )


def _least_speedup(
    found: Bottleneck, factors: Mapping[StageName, float], instead: dict[StageName, float]
) -> float:
    """Return the least speedup from scaling some stages and replacing the time of others.

    Time that the stages do not explain does not change.
    """
    before = {
        each.name: each.seconds_per_cell.low
        if each.name in {*factors, *instead}
        else each.seconds_per_cell.high
        for each in found.stages
    }
    after = {name: each * factors.get(name, 1.0) for name, each in before.items()} | instead
    explained = found.model.seconds_per_cell(before)
    unexplained = max(0.0, found.measured_seconds_per_cell - explained)
    return (explained + unexplained) / (found.model.seconds_per_cell(after) + unexplained)
