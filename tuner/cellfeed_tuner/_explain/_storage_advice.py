"""What another layout of the files would give, as far as that can be reckoned.

Both estimates put changed stages together again (see `StageModel`), and scale what comes of that
by what the unchanged stages make of the measured time. The least that is plausible counts: where
stages were measured badly, nothing is said.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner._explain._stage_model import StageName
from cellfeed_tuner._explain._store_sample import CELLS_PER_STORE_CHUNK, StoreSample
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._planning._cost_model import distinct

__all__ = ["StorageAdvice", "StorageLayout", "amplification", "storage_advice"]

# A layout that may give less than this times the throughput is not worth the words.
_LEAST_SPEEDUP = 1.2
# A chunk so much smaller than a block costs little beyond the block.
_CHUNKS_PER_BLOCK = 4
# Smaller ones cost more to find and compress than they save.
_LEAST_CHUNK_BYTES = 16_384
# Shuffling reads blocks of at least so many chunks. All of it takes longer than the stages that
# are known of it, by this factor: measured, 2.9 for 200,000 cells and 2 to 3 for 20,000.
_CHUNKS_PER_SHUFFLED_BLOCK, _WHOLE_OVER_STAGES = 8, 3.0
_MINUTE, _HOUR = 60.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageLayout:
    """How a collection lies in storage.

    Parameters
    ----------
    n_cells
        Cells of the collection.
    rows_per_chunk
        Mean number of cells in a chunk.
    batch_size
        Cells of a minibatch.
    already_shuffled
        Whether cells lie in random order.
    """

    n_cells: int
    rows_per_chunk: float
    batch_size: int
    already_shuffled: bool


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
    speedup
        Estimated throughput, relative to what was measured; its interval is what comes of the
        ends of the stages' 95 % intervals.
    cost_seconds
        Estimated time to write the copy; None if it is not known.
    epochs_to_repay
        Epochs after which that time is gained back; None if it is not known.
    basis
        What the estimate rests on, in one clause.
    """

    action: Literal["rechunk", "preshuffle"]
    rows_per_chunk: int
    block_size: int
    speedup: Estimate
    cost_seconds: float | None
    epochs_to_repay: float | None
    basis: str

    @property
    def sentence(self) -> str:
        """The advice in words."""
        if self.action == "rechunk":
            what = (
                f"Files with about {_cells(self.rows_per_chunk)} per chunk may be read about "
                f"{_times(self.speedup)} as fast"
            )
        else:
            what = (
                f"From a shuffled copy (`cellfeed preshuffle`), blocks of {self.block_size:,} mix "
                f"as well, and may be read about {_times(self.speedup)} as fast"
            )
        if self.cost_seconds is not None and self.epochs_to_repay is not None:
            what += (
                f"; it takes about {_duration(self.cost_seconds)} to write, repaid after "
                f"{_epochs(self.epochs_to_repay)}"
            )
        return f"{what} ({self.basis})."


def storage_advice(
    found: Bottleneck,
    configuration: Configuration,
    layout: StorageLayout,
    store: StoreSample,
    block_sizes: Sequence[int],
) -> tuple[StorageAdvice, ...]:
    """Return what is worth doing about the files, the best first; often nothing.

    Parameters
    ----------
    found
        Where the time of a cell goes.
    configuration
        The settings that it goes there with.
    layout
        How the files are laid out.
    store
        What a shuffled copy costs to write and to read.
    block_sizes
        Block sizes that a shuffled copy may be read with.
    """
    if found.read_amplification is None:
        return ()  # read through the format's library, of whose stages too little is known
    advice = [_rechunk(found, configuration, layout)]
    if not layout.already_shuffled:
        fetch = layout.batch_size * configuration.fetch_factor
        fitting = [size for size in block_sizes if size <= min(fetch, layout.n_cells)]
        advice.append(_preshuffle(found, layout, store, max(fitting, default=1)))
    worth = [each for each in advice if each is not None and each.speedup.low >= _LEAST_SPEEDUP]
    return tuple(sorted(worth, key=lambda each: -each.speedup.value))


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
    now = found.read_amplification
    assert now is not None  # noqa: S101 - asked before
    bytes_per_row = found.useful_bytes
    least = max(1, round(_LEAST_CHUNK_BYTES / max(1.0, bytes_per_row)))
    rows = max(least, configuration.block_size // _CHUNKS_PER_BLOCK)
    if rows >= layout.rows_per_chunk:
        return None
    then = amplification(
        layout.n_cells, rows, configuration.block_size,
        layout.batch_size * configuration.fetch_factor,
    )  # fmt: skip
    return StorageAdvice(
        action="rechunk",
        rows_per_chunk=rows,
        block_size=configuration.block_size,
        speedup=_speedup(found, dict.fromkeys(_PER_STORED_BYTE, then / now)),
        cost_seconds=None,
        epochs_to_repay=None,
        basis=(
            f"reckoned from the layout: {now:.1f} cells are decompressed now for each that is "
            f"used, and {then:.1f} then"
        ),
    )


_PER_STORED_BYTE: tuple[StageName, ...] = ("disk", "page cache", "decompression")


def _preshuffle(
    found: Bottleneck, layout: StorageLayout, store: StoreSample, block_size: int
) -> StorageAdvice:
    then = 1 + (CELLS_PER_STORE_CHUNK - 1) / block_size
    smaller = then * store.stored_bytes / max(found.stored_bytes, 1.0)
    decoding = then * store.decode_seconds / found.model.n_threads
    speedup = _speedup(found, {"disk": smaller, "page cache": smaller}, decoding)
    cost = layout.n_cells * _seconds_to_shuffle(found, store)
    gained = layout.n_cells * found.measured_seconds_per_cell * (1 - 1 / speedup.value)
    return StorageAdvice(
        action="preshuffle",
        rows_per_chunk=CELLS_PER_STORE_CHUNK,
        block_size=block_size,
        speedup=speedup,
        cost_seconds=cost,
        epochs_to_repay=cost / gained if gained > 0 else None,
        basis=(
            "reckoned from a sample of your cells that was compressed and decompressed here as "
            "such a copy is"
        ),
    )


def _seconds_to_shuffle(found: Bottleneck, store: StoreSample) -> float:
    """Return seconds for each cell.

    Blocks of many chunks are read, stage after stage; threads encode; what was written is decoded
    once more, to check it.
    """
    stages, model = found.seconds, found.model
    now = found.read_amplification or 1.0
    for name in _PER_STORED_BYTE:
        if name in stages:
            stages[name] *= (1 + 1 / _CHUNKS_PER_SHUFFLED_BLOCK) / now
    encoding = store.encode_seconds / model.cores
    checking = store.decode_seconds / model.cores
    known = sum(max(0.0, each) for each in stages.values()) + encoding + checking
    return _WHOLE_OVER_STAGES * known


def _speedup(
    found: Bottleneck, factors: Mapping[StageName, float], decompression: float | None = None
) -> Estimate:
    """Return what changed stages give.

    Parameters
    ----------
    found
        The stages as they are.
    factors
        By what some of them are multiplied.
    decompression
        What decompression takes instead for each cell; None if it is as it was, or multiplied.
    """

    def ratio(changed: str, unchanged: str) -> float:
        """Put stages together from the ends of their intervals."""
        before, after = dict[StageName, float](), dict[StageName, float]()
        for stage in found.stages:
            is_new = stage.name == "decompression" and decompression is not None
            end = changed if is_new or stage.name in factors else unchanged
            before[stage.name] = getattr(stage.seconds_per_cell, end)
            after[stage.name] = before[stage.name] * factors.get(stage.name, 1.0)
        if decompression is not None:
            after["decompression"] = decompression
        model = found.model
        return model.seconds_per_cell(before) / model.seconds_per_cell(after)

    ends = ratio("low", "high"), ratio("value", "value"), ratio("high", "low")
    return Estimate(ends[1], min(ends), max(ends))


def _times(speedup: Estimate) -> str:
    return f"{speedup.value:.1f} times ({speedup.low:.1f} to {speedup.high:.1f})"


def _cells(number: int) -> str:
    return "1 cell" if number == 1 else f"{number:,} cells"


def _duration(seconds: float) -> str:
    if seconds >= _HOUR:
        return f"{seconds / _HOUR:.1f} hours"
    if seconds >= _MINUTE:
        return f"{seconds / _MINUTE:.0f} min"
    return f"{max(1.0, seconds):.0f} s"


def _epochs(number: float) -> str:
    whole = max(1, int(np.ceil(number)))
    return "one epoch" if whole == 1 else f"{whole:,} epochs"
