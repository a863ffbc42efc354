"""All that ``autotune`` found."""

import json
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from cellfeed import FormatError, ParameterError, PathError, __version__
from cellfeed_tuner._entropy._label_entropy import StorageOrder
from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner._explain._storage_advice import StorageAdvice
from cellfeed_tuner._history._recall import Earlier
from cellfeed_tuner._interval import interval
from cellfeed_tuner._machine._busy import Busy
from cellfeed_tuner._machine._description import Machine
from cellfeed_tuner._machine._page_cache import CacheState
from cellfeed_tuner._plain import from_plain, replaced_file, to_plain
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results._configuration_result import ConfigurationResult, EntropyBits
from cellfeed_tuner._results._dataset import Dataset, SearchedStrategy
from cellfeed_tuner._results._recommended import Constraints, Nearest, PrefetchResult, Recommended

__all__ = ["SCHEMA", "AutotuneInterrupted", "AutotuneResult", "Ranges"]

SCHEMA = "cellfeed.autotune/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """A space of configurations too large to list, of which a study proposed some.

    Parameters
    ----------
    block_sizes, fetch_factors, workers
        The smallest and the largest of each.
    n_configurations
        How many there are.
    n_considered
        How many were proposed or known, and held against constraints and the cost model.
    """

    block_sizes: tuple[int, int]
    fetch_factors: tuple[int, int]
    workers: tuple[int, int]
    n_configurations: int
    n_considered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneResult:
    """All that ``autotune`` found.

    Parameters
    ----------
    machine, dataset, constraints
        What it was asked about.
    cache
        State of the page cache that throughputs were measured in; "remote" of files on servers,
        whose caches are not under control; "unknown" if pages were to be dropped but stayed.
    configurations
        The grid; of ranges, what was measured.
    recommended
        The choice, or None.
    nearest
        Where there is no choice, what comes nearest; None if nothing was measured, or the loader
        is wrong.
    seconds
        Time that it took.
    date
        When it began, with the offset from UTC.
    storage_order
        Whether the files are shuffled already; None if that was not looked at.
    earlier
        What became of earlier runs' results; None if they were not looked at.
    bottleneck
        Where the time of a cell goes in the chosen configuration; None if there was no time to
        find out.
    storage_advice
        What other layouts of the files may give, the best first; often nothing.
    ranges
        What configurations were proposed from; None if all were listed.
    busy
        How busy other programs kept the machine; None if that was not looked at.
    replicate_spread
        How much replicates of one configuration differed, relative to their mean, over all
        configurations; None if nothing was measured twice.
    interrupted
        Whether Ctrl-C ended the run, so that all of this rests on what was measured by then.
    loader_fault
        What the loader delivered that it should not have, in words; None if nothing was found.
        There is no choice then, since what is wrong may be so in any configuration.
    n_cells_compared
        Delivered cells that were read once more through h5py or zarr, and compared.
    prefetch_results
        What was measured of the choice at several depths of reading ahead, of files on servers.
    strategy
        How cells were visited, of which the block size was searched; in shuffled blocks
        (`cellfeed.BlockShuffling`) if None.
    ranks
        For how many it holds: those of one machine were measured side by side, and all figures
        are of these together.
    n_unlisted
        Configurations that are not in ``configurations``, though all are listed, since nothing was
        measured of them: of a loader whose entropies are known only then.
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
    earlier: Earlier | None = None
    bottleneck: Bottleneck | None = None
    storage_advice: tuple[StorageAdvice, ...] = ()
    ranges: Ranges | None = None
    busy: Busy | None = None
    replicate_spread: float | None = None
    interrupted: bool = False
    loader_fault: str | None = None
    n_cells_compared: int = 0
    strategy: SearchedStrategy | None = None
    prefetch_results: tuple[PrefetchResult, ...] = ()
    n_unlisted: int = 0
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """Check that nothing is recommended of a loader that is wrong."""
        if self.loader_fault is not None and self.recommended is not None:
            msg = (
                "a loader that is wrong cannot be recommended, but got "
                f"{self.recommended.configuration} and loader_fault={self.loader_fault!r}"
            )
            raise ParameterError(msg)

    @property
    def chosen(self) -> ConfigurationResult | None:
        """What is known of the configuration that is recommended; None if none is."""
        if self.recommended is None:
            return None
        configuration = self.recommended.configuration
        found = (each for each in self.configurations if each.configuration == configuration)
        return next(found, None)

    @property
    def n_few_rounds(self) -> int | None:
        """How many rounds the figure of the choice rests on, if too few; else None."""
        chosen = self.chosen
        if chosen is None or self.recommended is None or self.recommended.measured_in_turns:
            return None
        return chosen.n_rounds if chosen.has_few_rounds else None

    def __repr__(self) -> str:
        said = "no configuration is feasible"
        if self.loader_fault is not None:
            said = f"THE LOADER IS WRONG: {self.loader_fault}"
        elif self.recommended is not None:
            speed = interval(self.recommended.cells_per_second)
            few = f", from {self.n_few_rounds} rounds only" if self.n_few_rounds else ""
            said = f"{self.recommended.settings}; {speed} cells/s{self.ranks.together}{few}"
        return f"<AutotuneResult: {said}>"

    def entropies(self, result: ConfigurationResult) -> dict[str, EntropyBits]:
        """Return the entropy of each label in the minibatches of a configuration, by name."""
        further = {name: each.entropy_bits for name, each in result.further_labels.items()}
        return {self.dataset.label: result.entropy_bits} | further

    def pareto_front(self) -> tuple[ConfigurationResult, ...]:
        """Return what nothing else beats both in throughput and in mixing, best mixed first."""
        timed = [
            (each.least_mixed.share_of_random, each.cells_per_second.value, each)
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
        """Return how many times the stored size of a cell is read for each that is delivered.

        Read from storage, or, where the page cache was warm or unknown, asked of the system.
        None if that is not known.
        """
        read, stored = result.bytes_read_per_cell, self.dataset.stored_bytes_per_cell
        if read is None or stored <= 0:
            return None
        return (read.from_storage if self.cache == "cold" else read.asked) / stored

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values, in the schema ``cellfeed.autotune/2``."""
        return {"schema": SCHEMA, "version": __version__, **to_plain(self)}

    def save(self, path: Path | str) -> None:
        """Write the result as JSON: all of it, or nothing, so that an older one stays.

        Raises
        ------
        OSError
            The disk is full, or the folder is missing or cannot be written to; names the path.
        """
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        with replaced_file(Path(path)) as file:
            file.write(text.encode())

    @classmethod
    def load(cls, path: Path | str) -> "AutotuneResult":
        """Read a result that `save` wrote.

        Raises
        ------
        PathError
            There is no such file.
        FormatError
            It is no result of ``autotune``, or of another schema.
        """
        path = Path(path)
        if not path.is_file():
            msg = f"{path}: no such file; make it with `autotune PATH... --label COLUMN`"
            raise PathError(msg)
        plain = None
        try:
            plain = json.loads(path.read_text())
            schema = plain["schema"]
            if schema == SCHEMA:
                return from_plain(cls, plain)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            why = "no JSON" if plain is None else str(error)
            if isinstance(error, KeyError):
                why = f"{error} is missing"
            msg = f"{path}: not a result of autotune ({why}); give the file that it wrote"
            raise FormatError(msg) from error
        msg = f"{path}: has schema {schema!r}, but {SCHEMA!r} is read; run autotune again"
        raise FormatError(msg)


class AutotuneInterrupted(KeyboardInterrupt):
    """`autotune` was interrupted after it had measured something.

    A `KeyboardInterrupt` as any other, so that what calls `autotune` stops too, unless it wants
    to go on with ``result``.

    Parameters
    ----------
    result
        What was found by then; its ``interrupted`` is true.
    """

    def __init__(self, result: AutotuneResult) -> None:
        super().__init__("what was measured by then is in this exception's `result`")
        self.result = result
