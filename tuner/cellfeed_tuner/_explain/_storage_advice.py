"""What another layout of the files would give, as far as that can be reckoned.

Both estimates put changed stages together again (see `StageModel`), and take the difference off
the measured time. The least that is plausible counts: changed stages take what they take at
least, and others what they take at most; where stages were measured badly, nothing is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Literal

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._constants import (
    CELLS_PER_STORE_CHUNK,
    CHUNKS_PER_BLOCK,
    LEAST_CHUNK_BYTES,
    LEAST_SPEEDUP,
    PRESHUFFLE_OVERHEAD,
)
from cellfeed_tuner._explain._bottleneck import Bottleneck, StageName
from cellfeed_tuner._planning._cost_model import distinct

__all__ = [
    "StorageAdvice", "StorageLayout", "StoreSample", "amplification", "epochs_until_paid",
    "storage_advice",
]  # fmt: skip


def epochs_until_paid(
    *, conversion_seconds: float, epoch_seconds: float, epoch_seconds_then: float
) -> int | None:
    """Return after how many epochs a converted collection has saved what its conversion took.

    Parameters
    ----------
    conversion_seconds
        What the conversion takes, once.
    epoch_seconds, epoch_seconds_then
        What reading takes for an epoch of the files as they are, and of what they become. Where
        the training step takes longer than reading, it is the step that counts in either.

    Returns
    -------
    None if it is never paid for, since epochs then take as long, or longer.

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
    """How a collection lies in storage, and how many of its cells make a minibatch."""

    n_cells: int
    rows_per_chunk: float
    batch_size: int
    already_shuffled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSample:
    """What a cell takes in a shuffled copy: times of one thread, and bytes in storage."""

    encode_seconds: float
    decode_seconds: float
    stored_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAdvice:
    """Another layout, what it may give, and by what reckoning.

    Parameters
    ----------
    action
        "rechunk": the same files with other chunks. "preshuffle": a shuffled copy, from which
        large blocks are read.
    rows_per_chunk
        Cells of a chunk then.
    block_size
        Block size that is then to be used.
    least_speedup
        How many times the measured throughput it gives at least.
    basis
        What the estimate rests on, in one clause.
    epochs_until_paid
        After how many epochs at most the conversion has saved what it took; None if that was not
        reckoned.
    """

    action: Literal["rechunk", "preshuffle"]
    rows_per_chunk: int
    block_size: int
    least_speedup: float
    basis: str
    epochs_until_paid: int | None = None

    @property
    def sentence(self) -> str:
        """The advice in words."""
        cells = "1 cell" if self.rows_per_chunk == 1 else f"{self.rows_per_chunk:,} cells"
        what = f"Files with about {cells} per chunk"
        if self.action == "preshuffle":
            what = (
                f"A shuffled copy (`cellfeed preshuffle`) mixes equally well in blocks of "
                f"{self.block_size:,}, and"
            )
        tenths = floor(10 * self.least_speedup) / 10
        said = f"{what} should be read at least {tenths:.1f} times as fast ({self.basis})."
        if self.epochs_until_paid is None:
            return said
        epochs = "1 epoch" if self.epochs_until_paid == 1 else f"{self.epochs_until_paid:,} epochs"
        return f"{said} Writing it pays for itself within {epochs}."


def storage_advice(
    found: Bottleneck,
    configuration: Configuration,
    layout: StorageLayout,
    store: StoreSample,
    block_sizes: Sequence[int],
) -> tuple[StorageAdvice, ...]:
    """Return what is worth doing about the files, the best first; often nothing."""
    if found.read_amplification is None:
        return ()  # read through the format's library, of whose stages too little is known
    advice = [_rechunk(found, configuration, layout)]
    if not layout.already_shuffled:
        fetch = layout.batch_size * configuration.fetch_factor
        fitting = [size for size in block_sizes if size <= min(fetch, layout.n_cells)]
        advice.append(_preshuffle(found, store, max(fitting, default=1)))
    worth = [each for each in advice if each is not None and each.least_speedup >= LEAST_SPEEDUP]
    return tuple(sorted(worth, key=lambda each: -each.least_speedup))


def amplification(
    n_cells: int, rows_per_chunk: float, block_size: int, cells_per_fetch: int
) -> float:
    """Return how many cells are decompressed for each one that is used, on average.

    Blocks lie anywhere in chunks, and those of one fetch share chunks; see `distinct`.

    Examples
    --------
    >>> round(amplification(1_000_000_000, 10.0, 1, 64), 4)
    10.0
    >>> round(amplification(1_000_000_000, 10.0, 91, 91), 4)
    1.0989
    """
    n_chunks = max(1.0, n_cells / rows_per_chunk)
    blocks = np.array([max(1.0, cells_per_fetch / block_size)])
    rows = min(block_size, cells_per_fetch)
    touched = 1 + max(0.0, rows - 1) / rows_per_chunk
    n_touched = float(distinct(n_chunks, blocks, touched)[0])
    # Blocks of one fetch are different ones, so never less than what is used.
    return max(1.0, n_touched * rows_per_chunk / cells_per_fetch)


def _rechunk(
    found: Bottleneck, configuration: Configuration, layout: StorageLayout
) -> StorageAdvice | None:
    now = found.decoded_bytes / found.useful_bytes
    least = max(1, round(LEAST_CHUNK_BYTES / max(1.0, found.useful_bytes)))
    rows = max(least, configuration.block_size // CHUNKS_PER_BLOCK)
    if rows >= layout.rows_per_chunk:
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
        least_speedup=_least_speedup(found, {"reading": factor, "decompressing": factor}, {}),
        basis=(
            f"estimated from the layout: {now:.1f} cells are decompressed now for each that is "
            f"used, and {then:.1f} then"
        ),
    )


def _preshuffle(found: Bottleneck, store: StoreSample, block_size: int) -> StorageAdvice:
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
        least_speedup=least_speedup,
        basis="estimated from some of your cells, compressed and decompressed as in such a copy",
        epochs_until_paid=epochs_until_paid(
            conversion_seconds=PRESHUFFLE_OVERHEAD
            * (now + store.encode_seconds / found.model.n_threads),
            epoch_seconds=now,
            epoch_seconds_then=now / least_speedup,
        ),
    )


def _least_speedup(
    found: Bottleneck, factors: Mapping[StageName, float], instead: dict[StageName, float]
) -> float:
    """Return what it gives at least to multiply some stages, and to have others take other seconds.

    Time that the stages do not explain stays as it is.
    """
    before = {
        each.name: each.seconds_per_cell.low
        if each.name in {*factors, *instead}
        else each.seconds_per_cell.high
        for each in found.stages
    }
    after = {name: each * factors.get(name, 1.0) for name, each in before.items()} | instead
    explained = found.model.seconds_per_cell(before)
    rest = max(0.0, found.measured_seconds_per_cell - explained)
    return (explained + rest) / (found.model.seconds_per_cell(after) + rest)
