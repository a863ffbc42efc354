"""What a shuffled copy of the files would give.

The estimate applies the `StageModel` to the changed stages and subtracts the difference from the
measured time. It is a lower bound: changed stages count with the low end of their interval, and all
others with the high end.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from pathlib import Path

from cellfeed_tuner._bottleneck import Bottleneck, StageName

# Smallest speedup from other storage that is worth mentioning. Chosen.
LEAST_SPEEDUP = 1.2
# Time of `preshuffle`, as a multiple of reading and encoding each cell once. Chosen: above the
# conversions that `bench/compare/advice.py` compares it with.
PRESHUFFLE_OVERHEAD = 3.0
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


def folder_of(paths: Sequence[str]) -> Sequence[str]:
    """Return the folder of files in place of all ``.h5ad`` files that it has."""
    folder = Path(paths[0]).parent  # a URL has no such folder
    is_whole = len(paths) > 1 and {*map(str, folder.glob("*.h5ad"))} == {*paths}
    return [str(folder)] if is_whole else paths


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSample:
    """What a cell takes in a shuffled copy: seconds of one thread, and stored bytes."""

    encode_seconds: float
    decode_seconds: float
    stored_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAdvice:
    """A shuffled copy of the files, and how much faster it would be.

    It is estimated from a sample of the cells, compressed and decompressed as in the copy.

    Parameters
    ----------
    block_size
        Block size to read it with.
    least_speedup
        Lower bound of its throughput, divided by the measured one.
    epochs_until_paid
        Upper bound of the number of epochs after which the conversion has saved the time it took.
    command
        The command that writes it; empty if the files have no paths.
    """

    block_size: int
    least_speedup: float
    epochs_until_paid: int | None
    command: str = ""

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        said = (
            f"A shuffled copy, read in blocks of {self.block_size:,}, would be at least "
            f"{floor(10 * self.least_speedup) / 10:.1f}x as fast"
        )
        if (n := self.epochs_until_paid) is not None:
            said += f" and worth writing for {'1 epoch' if n == 1 else f'{n:,} epochs'} or more"
        return f"{said}: `{self.command}`" if self.command else f"{said}."


def storage_advice(
    found: Bottleneck, store: StoreSample, block_size: int, paths: Sequence[str] = ()
) -> tuple[StorageAdvice, ...]:
    """Return whether the files at ``paths`` are worth converting; empty if they are not.

    Parameters
    ----------
    found
        Where the time goes now.
    store
        What a cell takes in the copy.
    block_size
        Block size to read the copy with.
    paths
        The files.
    """
    if found.read_amplification is None:
        return ()  # the stages of the format's own library are unknown
    then = 1 + (CELLS_PER_STORE_CHUNK - 1) / block_size  # cells decompressed per cell used
    smaller = then * store.stored_bytes / max(found.stored_bytes, 1.0)
    least_speedup = _least_speedup(
        found, {"reading": smaller}, {"decompressing": then * store.decode_seconds}
    )
    if least_speedup < LEAST_SPEEDUP:
        return ()
    now, command = found.measured_seconds_per_cell, ""
    if paths:
        files = " ".join(map(shlex.quote, folder_of(paths)))
        command = f"cellfeed preshuffle {files} shuffled"
    paid = epochs_until_paid(
        conversion_seconds=PRESHUFFLE_OVERHEAD
        * (now + store.encode_seconds / found.model.num_threads),
        epoch_seconds=now,
        epoch_seconds_then=now / least_speedup,
    )
    advice = StorageAdvice(
        block_size=block_size, least_speedup=least_speedup, epochs_until_paid=paid, command=command
    )
    return (advice,)


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
