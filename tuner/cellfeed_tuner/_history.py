"""Earlier runs: a journal for each dataset, machine and versions, with an Optuna study per run.

A study is written when its run is over, so that no disk is written to while it is measured.
"""

import hashlib
import json
import logging
import platform
import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

with warnings.catch_warnings():
    # Optuna imports tqdm, which misses widgets in a notebook, where no bar is to be shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna

from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from cellfeed import Collection, SamplingStrategy, machine
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._entropy import count_labels
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine import Machine, package_version
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._results import NOTHING_KNOWN, Earlier, SearchedStrategy
from cellfeed_tuner._subject import Selected, label_codes

_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A digest of eight hexadecimal digits, and the plain values that it identifies."""

    digest: str
    facts: Mapping[str, Any] = field(compare=False)


def fingerprint(facts: Mapping[str, Any]) -> Fingerprint:
    """Return the fingerprint of plain values.

    Examples
    --------
    >>> len(fingerprint({"cores": 2, "kernel": "Linux 6"}).digest)
    8
    """
    return Fingerprint(digest(json.dumps(facts, sort_keys=True).encode()), dict(facts))


def digest(content: bytes) -> str:
    """Return eight hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What results belong to."""

    data: Fingerprint
    machine: Fingerprint
    versions: Fingerprint

    @property
    def name(self) -> str:
        """The three digests, that of the data first."""
        return f"{self.data.digest}-{self.machine.digest}-{self.versions.digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run measured: ``cache`` is the state of the page cache that was found."""

    labels: Sequence[str]
    batch_size: int
    cache: str
    ranks: Ranks = field(default_factory=Ranks)

    def is_like(self, other: "Asked") -> bool:
        """Return whether both runs measure the same thing; labels do not matter to throughput."""
        mine, theirs = ((each.batch_size, each.cache, each.ranks) for each in (self, other))
        return mine == theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """One run, and what it measured.

    Parameters
    ----------
    began
        When, in UTC, ISO 8601.
    path
        The first of the files, by which people recognize the collection.
    choice, cells_per_second
        The recommendation and its throughput; None if there was none.
    trials
        Seconds per cell of each replicate of each configuration that did not fail.
    """

    key: Key
    asked: Asked
    began: str
    path: str
    choice: Configuration | None
    cells_per_second: Estimate | None
    trials: Mapping[Configuration, Sequence[float]] = field(default_factory=dict)

    @property
    def date(self) -> str:
        """The day, such as 2026-11-21."""
        return self.began[:10]

    def to_json(self) -> dict[str, Any]:
        """Return all but the key and the trials as plain values."""
        return {
            "asked": asdict(self.asked),
            "began": self.began,
            "path": self.path,
            "choice": self.choice and dict(self.choice),
            "cells_per_second": self.cells_per_second and asdict(self.cells_per_second),
        }

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], **others: Any) -> "EarlierRun":
        """Return a run from the plain values of `to_json` and the key and trials."""
        asked, choice, speed = plain["asked"], plain["choice"], plain["cells_per_second"]
        return cls(
            asked=Asked(**{**asked, "ranks": Ranks(**asked["ranks"])}),
            began=plain["began"],
            path=plain["path"],
            choice=choice and Configuration(**choice),
            cells_per_second=speed and Estimate(**speed),
            **others,
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging every study that it makes or finds."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Before version 5, it warns about samplers that our tests cover.
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)


_logger = logging.getLogger(__name__)


_SUFFIX = ".journal"
_FACTS = ("data", "machine", "versions")
_RUN = "run"
_MEASURED = (TrialState.COMPLETE, TrialState.PRUNED)
# Raised for a full disk, a folder of somebody else, or a damaged file.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OptunaError)


def cache_folder() -> Path:
    """Return the folder in which results are kept, which need not be there."""
    return machine.cache_folder("autotune")


def read_runs(folder: Path, data: str = "*") -> list[EarlierRun]:
    """Return earlier runs, the last one last; an unreadable file is skipped with a warning."""
    runs = list[EarlierRun]()
    for path in sorted(folder.glob(f"{data}-*{_SUFFIX}")):
        try:
            runs += _read(path)
        except _UNUSABLE as error:
            _logger.warning("%s: cannot be read and is skipped (%r)", path, error)
    return sorted(runs, key=lambda run: run.began)


def record(folder: Path, run: EarlierRun, trials: Sequence[FrozenTrial]) -> None:
    """Keep a run and the trials of its study, or warn that this failed.

    Several processes may do so at the same time.
    """
    path = folder / f"{run.key.name}{_SUFFIX}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(path, run, trials)
    except OSError as error:
        _logger.warning("%s: cannot be written (%s), so this run is not kept", folder, error)
    except _UNUSABLE as error:  # such as the rest of a run that a full disk cut short
        _logger.warning("%s: damaged (%r), so this run is not kept; delete it", path, error)


def _read(path: Path) -> list[EarlierRun]:
    digests = zip(_FACTS, path.stem.split("-"), strict=True)
    with quiet():
        storage = _storage(path)
        studies = [
            optuna.load_study(study_name=name, storage=storage)
            for name in optuna.get_all_study_names(storage)
        ]
        finished = [each for each in studies if _RUN in each.user_attrs]
        if not finished:
            return []  # another process is about to write the first
        facts = finished[0].user_attrs
        key = Key(**{name: Fingerprint(digest, facts[name]) for name, digest in digests})
        runs = list[EarlierRun]()
        for each in finished:
            try:
                runs.append(_run(each, key))
            except _UNUSABLE as error:
                _logger.warning("%s: a study is skipped (%r)", path, error)
        return runs


def _run(study: optuna.Study, key: Key) -> EarlierRun:
    trials = {
        Configuration(**each.params): tuple(each.intermediate_values.values())
        for each in study.get_trials(deepcopy=False, states=_MEASURED)
    }
    return EarlierRun.from_json(study.user_attrs[_RUN], key=key, trials=trials)


def _append(path: Path, run: EarlierRun, trials: Sequence[FrozenTrial]) -> None:
    """Write a study, and at the end the facts of its run: without these it does not count."""
    with quiet():
        kept = optuna.create_study(
            study_name=f"{run.began} {uuid4().hex[:8]}", storage=_storage(path)
        )
        for fact in _FACTS:
            kept.set_user_attr(fact, dict(getattr(run.key, fact).facts))
        kept.add_trials(trials)
        kept.set_user_attr(_RUN, run.to_json())


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))


# Which earlier run bears on this one, by fingerprints of data, machine and versions.


def recall(
    runs: Sequence[EarlierRun], key: Key, asked: Asked, space: Container[Configuration]
) -> tuple[list[Configuration], Earlier]:
    """Return the configurations of a space that an earlier run measured, and which run that was.

    The last run of the same machine and versions counts, or else the last of any. Its choice comes
    first, then the fastest.
    """
    alike = [
        run
        for run in runs
        if run.key.data == key.data
        and run.asked.is_like(asked)
        and any(each in space for each in run.trials)
    ]
    if not alike:
        return [], NOTHING_KNOWN
    run = max(alike, key=lambda each: (each.key == key, each.began))
    costs = {each: np.mean(found) for each, found in run.trials.items() if each in space}
    return sorted(costs, key=lambda each: (each != run.choice, costs[each])), _used(run, key)


def _used(run: EarlierRun, key: Key) -> Earlier:
    if run.key.machine != key.machine:
        whose = f"another machine's result ({run.key.machine.facts.get('cpu') or 'unknown'})"
    elif run.key.versions != key.versions:
        whose = "a result of this machine with other versions"
    else:
        whose = "a result of this machine"
    sentence = f"The order of the first measurements follows {whose} of {run.date}."
    return Earlier(use="order", sentence=sentence)


# What reads, decodes and carries cells.
_PACKAGES = ("cellfeed", "deflate", "h5py", "numba", "numcodecs", "torch", "zarr", "zarrs")


def key_of(selected: Selected, label: str, machine: Machine) -> Key:
    """Return the key of results for rows with a label on a machine."""
    collection = selected.collection
    codes = label_codes(collection, label)
    return Key(
        data=data_fingerprint(collection, codes, selected.indices, selected.strategy),
        machine=machine_fingerprint(machine),
        versions=versions_fingerprint(),
    )


def machine_fingerprint(machine: Machine) -> Fingerprint:
    """Return the fingerprint of a machine, which survives a reboot.

    It has no serial numbers and no device names, which may change; of network file systems, it has
    the server's name.
    """
    kernel = re.match(r"\D*\d+", machine.platform.kernel)
    return fingerprint(
        {
            "cpu": machine.cpu.model,
            "architecture": machine.platform.architecture,
            "usable_cores": machine.cpu.usable_cores,
            # Kernels keep a little for themselves, and not always the same.
            "memory_gb": round(machine.memory.total_bytes / 1e9),
            "kernel": kernel[0] if kernel else machine.platform.kernel,
            "storage": [
                {
                    "file_system": each.file_system,
                    "kind": each.kind,
                    "server": each.device if each.kind == "network" else None,
                }
                for each in machine.storage
            ],
        }
    )


def data_fingerprint(
    collection: Collection,
    codes: NDArray[np.integer],
    indices: NDArray[np.int64] | None = None,
    strategy: SamplingStrategy | None = None,
) -> Fingerprint:
    """Return the fingerprint of a collection.

    It does not depend on where local files are; of remote files, it has the URL and the version
    that the server gives.
    """
    selected: dict[str, Any] = {} if indices is None else {"rows": _digest_of_numbers(indices)}
    if strategy is not None:
        known = SearchedStrategy.of(strategy)
        selected["strategy"] = {"name": known.name, **known.parameters}
        for name in known.arrays:
            values = np.asarray(getattr(strategy, name))
            content = np.ascontiguousarray(values.astype(str) if values.dtype == object else values)
            selected["strategy"][name] = digest(content.tobytes() + str(values.dtype).encode())
    if collection.uncached:
        selected["uncached"] = True
    if collection.is_remote:
        found = [f"{each.location} {each.version()}" for each in collection.sources]
        selected["files"] = digest("\n".join(found).encode())
        sizes = np.array([source.file_bytes() for source in collection.sources])
    else:
        sizes = np.array([path.stat().st_size for path in collection.files])
    parts = np.split(codes, np.cumsum(collection.cells_per_location)[:-1])
    counted = [count_labels(part) for part in parts]
    return fingerprint(
        {
            "n_cells": len(collection),
            "n_vars": collection.n_vars,
            "elements": [
                f"{each.name} {each.layout} {each.dtype}" for each in collection.elements.values()
            ],
            "n_files": len(collection.locations),
            "bytes_on_disk": int(sizes.sum()),
            "file_sizes": _digest_of_numbers(sizes),
            "rows_per_chunk": round(collection.rows_per_chunk, 3),
            "bytes_per_cell": round(collection.mean_row_bytes()),
            "label_counts": _digest_of_numbers(
                *(np.append(each.counts, each.n_missing) for each in counted)
            ),
            **selected,
        }
    )


def versions_fingerprint() -> Fingerprint:
    """Return the versions that bear on speed, to the first two numbers of each."""
    versions = {name: package_version(name) for name in _PACKAGES}
    versions["python"] = platform.python_version()
    return fingerprint(
        {name: version and ".".join(version.split(".")[:2]) for name, version in versions.items()}
    )


def _digest_of_numbers(*arrays: NDArray[np.integer]) -> str:
    # The size before the numbers keeps apart what is divided in another way.
    return digest(
        b"".join(np.insert(each, 0, each.size).astype("<i8").tobytes() for each in arrays)
    )
