"""What loading the cells, or a shuffled copy of the files, would give.

The estimate for a copy applies the `StageModel` to the changed stages and subtracts the difference
from the measured time. It is a lower bound: changed stages count with the low end of their
interval, and all others with the high end.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path
from typing import Literal

from cellfeed_tuner._bottleneck import Bottleneck, StageName
from cellfeed_tuner._configuration import Configuration

# Smallest speedup from other storage that is worth mentioning.
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
    """What a cell takes in a shuffled copy: seconds of one thread, and stored bytes.

    ``read_seconds`` and ``loaded_seconds`` are what it takes to deliver it from its file and from
    memory, and ``loaded_bytes`` its size there; None if the cells are loaded already, or cannot be.
    """

    encode_seconds: float
    decode_seconds: float
    stored_bytes: float
    read_seconds: float = inf
    loaded_seconds: float | None = None
    loaded_bytes: float | None = None
    available_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAdvice:
    """Cells in memory or a shuffled copy of the files, and how much faster it would be.

    It is estimated from a sample of the cells: loaded and read again, or compressed and
    decompressed as in the copy.

    Parameters
    ----------
    action
        "load": all cells in memory, decoded. "preshuffle": a shuffled copy, read in large blocks.
    block_size
        Block size to read it with.
    least_speedup
        Lower bound of its throughput, divided by the measured one.
    epochs_until_paid
        Upper bound of the number of epochs after which the conversion has saved the time it took;
        None where nothing is converted.
    command
        The command that writes it, or what to call; empty if the files have no paths.
    loaded_bytes, available_bytes
        Memory that loaded cells take, and that is available; 0 for a copy.
    """

    action: Literal["load", "preshuffle"]
    block_size: int
    least_speedup: float
    epochs_until_paid: int | None = None
    command: str = ""
    loaded_bytes: int = 0
    available_bytes: int = 0

    @property
    def sentence(self) -> str:
        """The advice in one sentence."""
        what = f"A shuffled copy, read in blocks of {self.block_size:,},"
        if self.action == "load":
            needed, available = self.loaded_bytes / 1e9, self.available_bytes / 1e9
            what = f"Loaded cells ({needed:,.1f} GB of {available:,.1f} GB of available memory)"
        said = f"{what} would be at least {floor(10 * self.least_speedup) / 10:.1f}x as fast"
        if (n := self.epochs_until_paid) is not None:
            said += f" and worth writing for {'1 epoch' if n == 1 else f'{n:,} epochs'} or more"
        return f"{said}: `{self.command}`" if self.command else f"{said}."


def storage_advice(
    found: Bottleneck,
    store: StoreSample,
    configuration: Configuration,
    block_size: int | None,
    *,
    n_cells: int,
    paths: Sequence[str] = (),
) -> tuple[StorageAdvice, ...]:
    """Return whether the cells are worth loading, and the files worth converting.

    Parameters
    ----------
    found
        Where the time of ``configuration`` goes now.
    store
        What a cell takes in memory, and in the copy.
    block_size
        Block size to read the copy with; None if the files are one.
    n_cells
        Number of cells.
    paths
        The files.
    """
    advice = [_load(found, store, configuration, n_cells)]
    # The stages of a format's own library are unknown.
    if block_size is not None and found.read_amplification is not None:
        advice.append(_preshuffle(found, store, block_size, paths))
    return tuple(each for each in advice if each and each.least_speedup >= LEAST_SPEEDUP)


def _load(
    found: Bottleneck, store: StoreSample, configuration: Configuration, n_cells: int
) -> StorageAdvice | None:
    needed = n_cells * (store.loaded_bytes or 0.0)
    if not store.loaded_seconds or needed > store.available_bytes:
        return None
    return StorageAdvice(
        action="load",
        block_size=configuration.block_size,
        least_speedup=min(found.measured_seconds_per_cell, store.read_seconds)
        / store.loaded_seconds,
        command="collection.load()",
        loaded_bytes=ceil(needed),
        available_bytes=store.available_bytes,
    )


def _preshuffle(
    found: Bottleneck, store: StoreSample, block_size: int, paths: Sequence[str]
) -> StorageAdvice:
    then = 1 + (CELLS_PER_STORE_CHUNK - 1) / block_size  # cells decompressed per cell used
    smaller = then * store.stored_bytes / max(found.stored_bytes, 1.0)
    least_speedup = _least_speedup(
        found, {"reading": smaller}, {"decompressing": then * store.decode_seconds}
    )
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
    return StorageAdvice(
        action="preshuffle",
        block_size=block_size,
        least_speedup=least_speedup,
        epochs_until_paid=paid,
        command=command,
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
