"""Earlier runs: a journal for each dataset, machine and versions, with an Optuna study per run.

A study is written when its run is over, so that no disk is written to while it is measured.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

with warnings.catch_warnings():
    # Optuna imports tqdm, which misses widgets in a notebook, where no bar is to be shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna

from msgspec import ValidationError
from optuna.exceptions import ExperimentalWarning, OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from cellfeed import machine
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._ranks import Ranks
from cellfeed_tuner._result import from_plain, to_plain

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
class RunSettings:
    """What a run measured: ``cache`` is the state of the page cache that was found."""

    labels: Sequence[str]
    batch_size: int
    cache: str
    dense: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def is_like(self, other: "RunSettings") -> bool:
        """Return whether both runs measure the same thing; labels do not matter to throughput."""
        mine, theirs = (
            (each.batch_size, each.cache, each.dense, each.ranks) for each in (self, other)
        )
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
    settings: RunSettings
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
        plain: dict[str, Any] = to_plain(replace(self, trials={}))
        del plain["key"], plain["trials"]
        return plain


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Optuna from logging every study that it makes or finds."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Before version 5, it warns about parts of it that our tests cover.
            warnings.simplefilter("ignore", ExperimentalWarning)
            # Not every rival was in every turn of another.
            warnings.filterwarnings("ignore", message="WilcoxonPruner finds steps")
            yield
    finally:
        optuna.logging.set_verbosity(level)


_logger = logging.getLogger(__name__)


_SUFFIX = ".journal"
_FACTS = ("data", "machine", "versions")
_RUN = "run"
_MEASURED = (TrialState.COMPLETE, TrialState.PRUNED)
# Raised for a full disk, a folder of somebody else, or a damaged file.
_UNUSABLE = (
    OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OptunaError,
    ValidationError,  # of msgspec, whose older versions do not derive it from ValueError
)  # fmt: skip


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
    plain = {**study.user_attrs[_RUN], "key": to_plain(key), "trials": {}}
    return replace(from_plain(EarlierRun, plain), trials=trials)


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
