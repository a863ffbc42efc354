"""Earlier runs: one journal for each data set, machine and versions, with a study for each run.

Nothing is written to a disk while it is measured: the study of a run is copied when it is over.
"""

import logging
import warnings
from pathlib import Path
from uuid import uuid4

with warnings.catch_warnings():
    # Optuna imports tqdm, which misses widgets in a notebook, where no bar is to be shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna

from optuna.exceptions import OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from cellfeed import machine
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._digest import Fingerprint
from cellfeed_tuner._history._earlier_run import EarlierRun, Key
from cellfeed_tuner._quiet_optuna import quiet

__all__ = ["cache_folder", "read_runs", "record"]

_logger = logging.getLogger(__name__)

_SUFFIX = ".journal"
_FACTS = ("data", "machine", "versions")
_RUN = "run"
_MEASURED = (TrialState.COMPLETE, TrialState.PRUNED)
# What comes of a disk that is full or not ours, and of a file that somebody has garbled.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OptunaError)


def cache_folder() -> Path:
    """Return the folder in which results are kept, which need not be there."""
    return machine.cache_folder("autotune")


def read_runs(folder: Path, data: str = "*") -> list[EarlierRun]:
    """Return earlier runs, the last one last.

    A file that cannot be read is left out with a warning.
    """
    runs = list[EarlierRun]()
    for path in sorted(folder.glob(f"{data}-*{_SUFFIX}")):
        try:
            runs += _read(path)
        except _UNUSABLE as error:
            _logger.warning("%s: cannot be read and is left out (%r)", path, error)
    return sorted(runs, key=lambda run: run.began)


def record(folder: Path, run: EarlierRun, study: optuna.Study) -> None:
    """Keep a run for later ones; a warning says if that cannot be done.

    Other processes may do so at the same time.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(folder / f"{run.key.name}{_SUFFIX}", run, study)
    except _UNUSABLE as error:
        _logger.warning("%s: cannot be written (%s), so this run is not kept", folder, error)


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
        return [
            EarlierRun.from_json(
                each.user_attrs[_RUN],
                key=key,
                trials={
                    Configuration(**trial.params): tuple(trial.user_attrs["replicates"])
                    for trial in each.get_trials(deepcopy=False, states=_MEASURED)
                },
            )
            for each in finished
        ]


def _append(path: Path, run: EarlierRun, study: optuna.Study) -> None:
    """Copy a study, and then say that it is whole: one that is not does not count."""
    with quiet():
        kept = optuna.create_study(
            study_name=f"{run.began} {uuid4().hex[:8]}",
            storage=_storage(path),
            direction=study.direction,
        )
        for fact in _FACTS:
            kept.set_user_attr(fact, dict(getattr(run.key, fact).facts))
        kept.add_trials(study.get_trials(deepcopy=False))
        kept.set_user_attr(_RUN, run.to_json())


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))
