"""The result of ``autotune``."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeVar, cast

import msgspec
import numpy as np

from cellfeed import FormatError, ParameterError, PathError, __version__
from cellfeed_tuner._bottleneck import Bottleneck
from cellfeed_tuner._configuration import Configuration, Setting
from cellfeed_tuner._interval import Estimate, interval, scaled
from cellfeed_tuner._machine import Busy, Machine
from cellfeed_tuner._measuring._page_cache import CacheState
from cellfeed_tuner._ranks import Ranks, Scaling
from cellfeed_tuner._results import (
    ConfigurationResult,
    Constraints,
    Dataset,
    Nearest,
    PrefetchResult,
    Recommended,
    SearchedStrategy,
    StorageOrder,
)
from cellfeed_tuner._storage_advice import StorageAdvice, epochs_until_paid

if TYPE_CHECKING:
    import pandas as pd

# Dataclasses as plain JSON values and back; and files that are replaced atomically.

_Record = TypeVar("_Record")
# Ends of intervals may be infinite; JSON has no infinity, so null stands for it.
INFINITE_IF_NULL = {"low": -math.inf, "high": math.inf}


def to_plain(record: object) -> Any:
    """Return a dataclass as dictionaries, lists and plain values, with None for infinity."""
    return msgspec.json.decode(msgspec.json.encode(record, enc_hook=_item))


def from_plain(kind: type[_Record], plain: object) -> _Record:
    """Return a dataclass from plain values, or raise `msgspec.ValidationError`.

    Unknown names are ignored; absent fields take their defaults.
    """
    return msgspec.convert(_infinite(plain), kind, dec_hook=_configuration)


def _configuration(kind: type, plain: Any) -> object:
    if kind is not Configuration:
        msg = f"{kind.__name__} has no plain value"
        raise NotImplementedError(msg)
    settings = msgspec.convert(plain, dict[str, Setting])
    return Configuration(**cast("dict[str, Any]", settings))


def _item(value: object) -> object:
    if isinstance(value, Configuration):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    msg = f"{value!r} has no plain value"
    raise TypeError(msg)


def _infinite(plain: Any) -> Any:
    if isinstance(plain, dict):
        return {
            name: INFINITE_IF_NULL.get(name) if each is None else _infinite(each)
            for name, each in plain.items()
        }
    return [_infinite(each) for each in plain] if isinstance(plain, list) else plain


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces another once it is complete; on an error, nothing is left of it.

    An `OSError` names the path.

    Examples
    --------
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "result.json"
    >>> with replaced_file(path) as file:
    ...     _ = file.write(b"{}")
    >>> path.read_text()
    '{}'
    """
    target = path.resolve()  # replace the target of a link, not the link
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        unfinished.replace(target)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        unfinished.unlink(missing_ok=True)


SCHEMA = "cellfeed.autotune/4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """A space of configurations that is too large to list.

    Parameters
    ----------
    block_sizes, fetch_factors, workers
        The smallest and the largest of each.
    n_configurations
        Number of configurations in it.
    n_considered
        How many were checked against the constraints.
    """

    block_sizes: tuple[int, int]
    fetch_factors: tuple[int, int]
    workers: tuple[int, int]
    n_configurations: int
    n_considered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """The result of ``autotune``.

    Parameters
    ----------
    machine, dataset, constraints
        The machine, the collection, and the constraints of the search.
    cache
        State of the page cache during measurements; "remote" for files on servers, whose caches
        cannot be controlled; "unknown" if pages that should have been dropped were not.
    configurations
        The grid; for ranges, what was measured.
    recommended
        The recommended configuration, or None.
    nearest
        Where none is feasible, the closest one; None if nothing was measured, or if the loader
        delivered wrong data.
    seconds
        Duration of the run.
    date
        Start of the run, with its offset from UTC.
    storage_order
        Whether the files are already shuffled; None if not checked.
    bottleneck
        Where the time per cell goes in the recommended configuration; None if unknown.
    storage_advice
        What other layouts of the files may give, the best first; often empty.
    ranges
        The space that configurations were taken from; None if all were listed.
    busy
        CPU use by other programs; None if not measured.
    interrupted
        Whether Ctrl-C ended the run early.
    cut_short
        Why measuring ended early otherwise; empty if it did not.
    loader_fault
        The first piece of wrong data that the loader delivered, in words; None if there was none.
        Nothing is recommended then, because any configuration may be affected.
    n_cells_compared
        Delivered cells that were read again through h5py or zarr and compared.
    prefetch_results
        For files on servers, throughput of the recommended configuration by prefetch depth.
    strategy
        The sampling strategy, whose block size was searched; None for
        `cellfeed.BlockShuffling`.
    ranks
        The ranks that it holds for. Those of one machine are measured side by side, and figures
        are their total.
    scaling
        How many ranks are fed; None unless several numbers of ranks were given.
    mixed_less
        Obs columns that are no labels and that the recommended configuration mixes less than labels
        have to be mixed, with their share of random sampling's entropy, the least mixed first: all
        that were opened, and of up to 5 million local cells the others of text or categories.
    n_discarded
        Measurements that do not count because code was compiled in them.
    n_unlisted
        Configurations missing from ``configurations`` because they were not measured, for a loader
        whose entropy is known only by measuring.
    """

    machine: Machine
    dataset: Dataset
    constraints: Constraints
    cache: CacheState | Literal["unknown"]
    configurations: tuple[ConfigurationResult, ...]
    recommended: Recommended | None
    nearest: Nearest | None
    seconds: float
    date: datetime
    storage_order: StorageOrder | None = None
    bottleneck: Bottleneck | None = None
    storage_advice: tuple[StorageAdvice, ...] = ()
    ranges: Ranges | None = None
    busy: Busy | None = None
    interrupted: bool = False
    cut_short: str = ""
    loader_fault: str | None = None
    n_cells_compared: int = 0
    strategy: SearchedStrategy | None = None
    prefetch_results: tuple[PrefetchResult, ...] = ()
    n_unlisted: int = 0
    n_discarded: int = 0
    mixed_less: Mapping[str, float] = field(default_factory=dict)
    ranks: Ranks = field(default_factory=Ranks)
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        """Check that nothing is recommended for a loader that delivers wrong data."""
        if self.loader_fault is not None and self.recommended is not None:
            msg = (
                "a loader that delivers wrong data cannot be recommended, but got "
                f"{self.recommended.configuration} and loader_fault={self.loader_fault!r}"
            )
            raise ParameterError(msg)

    @property
    def chosen(self) -> ConfigurationResult | None:
        """The recommended configuration's entry in ``configurations``; None without one."""
        if self.recommended is None:
            return None
        configuration = self.recommended.configuration
        found = (each for each in self.configurations if each.configuration == configuration)
        return next(found, None)

    @property
    def without_workers(self) -> ConfigurationResult | None:
        """The fastest that was timed without workers and meets the constraints."""
        found = {
            each.cells_per_second.value: each
            for each in self.configurations
            if each.cells_per_second is not None
            and not each.configuration.num_workers
            and self.constraints.allow(each)
        }
        return found[max(found)] if found else None

    @property
    def epochs_until_workers_paid(self) -> int | None:
        """After how many epochs the recommended workers, started once, have saved their start.

        Compared with `without_workers`; None without workers, or if they are not known to pay.
        """
        chosen, other = self.recommended, self.without_workers
        if chosen is None or other is None or not chosen.configuration.num_workers:
            return None
        if chosen.cells_per_second is None or other.cells_per_second is None:
            return None
        n_cells = self.dataset.n_visited * self.ranks.n_local / self.ranks.n_total
        return epochs_until_paid(
            conversion_seconds=chosen.start_seconds,
            epoch_seconds=n_cells / other.cells_per_second.value,
            epoch_seconds_then=n_cells / chosen.cells_per_second.value,
        )

    @property
    def sentence(self) -> str:
        """The recommendation with its throughput and basis, or why there is none, in a line."""
        chosen = self.recommended
        if self.loader_fault is not None:
            return f"The loader delivers wrong data: {self.loader_fault}"
        if chosen is None:
            return "No configuration is feasible"
        speed, said = chosen.cells_per_second, chosen.settings
        if speed is not None:
            said += f"; {interval(speed)} {self.dataset.unit}/s{self.ranks.together}"
        return f"{said}, {chosen.basis}"

    def __repr__(self) -> str:
        return f"<AutotuneResult: {self.sentence}>"

    def predicted(self, result: ConfigurationResult) -> Estimate | None:
        """Return cells per second of a configuration that was not measured; None if unknown."""
        speed = self.recommended.cells_per_second if self.recommended else None
        if speed is None or result.relative is None or result.cells_per_second is not None:
            return None
        return scaled(speed, result.relative)

    def table(self) -> "pd.DataFrame":
        """Return the configurations as a table, one per row.

        Columns: the settings; ``known``, what the throughput rests on ("compared", "timed",
        "predicted", or empty if it is unknown); ``cells_per_second`` and ``ratio`` (to the
        recommended configuration), each with the ``_low`` and ``_high`` end of its 95 % interval;
        ``n_rounds``; ``share_of_random``, the entropy of the label that is mixed least as a share
        of random sampling's; of each label ``<label>_bits`` (expected), ``_bits_measured``,
        ``_bits_random``, ``_bits_lower_bound`` and ``_bits_upper_bound``; ``peak_memory_bytes``;
        ``read_amplification`` (see `read_amplification`); ``is_recommended``; ``status`` and
        ``note``. What is not known is NaN.
        """
        import pandas as pd  # noqa: PLC0415 - nothing else here needs it

        return pd.DataFrame([self._row(each) for each in self.configurations])

    def _row(self, each: ConfigurationResult) -> dict[str, Any]:
        speed = each.cells_per_second
        known: str = each.status if speed else ""
        if speed is None and (speed := self.predicted(each)) is not None:
            known = "predicted"
        row: dict[str, Any] = {**each.configuration, "known": known}
        for name, estimate in (("cells_per_second", speed), ("ratio", each.relative)):
            row[name] = estimate.value if estimate else math.nan
            row[f"{name}_low"] = estimate.low if estimate else math.nan
            row[f"{name}_high"] = estimate.high if estimate else math.nan
        row |= {"n_rounds": each.n_rounds, "share_of_random": each.share_of_random}
        for label, found in each.labels.items():
            bits = found.entropy_bits
            row |= {
                f"{label}_bits": bits.expected.value,
                f"{label}_bits_measured": bits.measured.value if bits.measured else math.nan,
                f"{label}_bits_random": bits.random_alike,
                f"{label}_bits_lower_bound": bits.bounds[0],
                f"{label}_bits_upper_bound": bits.bounds[1],
            }
        amplification = self.read_amplification(each)
        return row | {
            "peak_memory_bytes": each.peak_memory_bytes or math.nan,
            "read_amplification": math.nan if amplification is None else amplification,
            "is_recommended": each is self.chosen,
            "status": each.status,
            "note": each.note,
        }

    def pareto_front(self) -> tuple[ConfigurationResult, ...]:
        """Return what nothing beats in both throughput and entropy, highest entropy first."""
        timed = [
            (each.share_of_random, each.cells_per_second.value, each)
            for each in self.configurations
            if each.cells_per_second is not None
        ]
        front, fastest = list[ConfigurationResult](), 0.0
        for _, speed, each in sorted(timed, key=lambda found: found[:2], reverse=True):
            if speed > fastest:
                front.append(each)
                fastest = speed
        return tuple(front)

    def read_amplification(self, result: ConfigurationResult) -> float | None:
        """Return bytes read per delivered cell, divided by the stored size of a cell.

        Bytes are those read from storage; with a warm or unknown page cache, those requested from
        the system. None if unknown.
        """
        read, stored = result.bytes_read_per_cell, self.dataset.stored_bytes_per_cell
        if read is None or stored <= 0:
            return None
        return (read.from_storage if self.cache == "cold" else read.asked) / stored

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, in the schema ``cellfeed.autotune/4``."""
        return {"schema": SCHEMA, "version": __version__, **to_plain(self)}

    def save(self, path: Path | str) -> None:
        """Write the result as JSON, replacing the file only when it is complete.

        Raises
        ------
        OSError
            The disk is full, or the folder is missing or not writable; names the path.
        """
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        with replaced_file(Path(path)) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: Path | str) -> "AutotuneResult":
        """Read a result written by `save`.

        Raises
        ------
        PathError
            The file does not exist.
        FormatError
            It is not a result of ``autotune``, or has another schema.
        """
        path = Path(path)
        if not path.is_file():
            msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
            raise PathError(msg)
        plain = None
        try:
            plain = json.loads(path.read_text("utf-8"))
            schema = plain["schema"]
            if schema == SCHEMA:
                return from_plain(cls, plain)
        except (
            ValueError, KeyError, TypeError, RecursionError, msgspec.ValidationError
        ) as error:  # fmt: skip
            why = str(error) if isinstance(plain, dict) else "no JSON object"
            if isinstance(error, KeyError):
                why = f"{error} is missing"
            msg = f"{path}: not a result of autotune ({why}); give the file that it wrote"
            raise FormatError(msg) from error
        msg = f"{path}: has schema {schema!r} instead of {SCHEMA!r}; run autotune again"
        raise FormatError(msg)


class AutotuneInterrupted(KeyboardInterrupt):
    """`autotune` was interrupted after its first measurements.

    A `KeyboardInterrupt`, so callers stop too unless they catch it and use ``result``.

    Parameters
    ----------
    result
        The result so far; its ``interrupted`` is true.
    """

    def __init__(self, result: AutotuneResult) -> None:
        super().__init__("this exception's `result` has what was measured so far")
        self.result = result
