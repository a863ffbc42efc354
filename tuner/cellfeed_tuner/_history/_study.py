"""Earlier runs, in Optuna studies: one journal file for each data set, machine and versions.

The planner decides what is measured, so trials are added when a run is over, and nothing is
written to a disk while it is measured.
"""

import logging
import warnings
from pathlib import Path
from typing import Any
from uuid import uuid4

with warnings.catch_warnings():
    # Optuna imports tqdm, which misses widgets in a notebook, where no bar is to be shown.
    warnings.filterwarnings("ignore", message="IProgress not found")
    import optuna

from optuna.distributions import BaseDistribution, IntDistribution
from optuna.exceptions import OptunaError
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from cellfeed import machine
from cellfeed_tuner._configuration import Configuration
from cellfeed_tuner._history._digest import Fingerprint
from cellfeed_tuner._history._earlier_run import EarlierRun, EarlierTrial, Key
from cellfeed_tuner._quiet_optuna import quiet

__all__ = ["cache_folder", "read_runs", "record"]

_logger = logging.getLogger(__name__)

_SUFFIX = ".journal"
_MOST = 1 << 40
_SPACE: dict[str, BaseDistribution] = {
    "block_size": IntDistribution(1, _MOST, log=True),
    "fetch_factor": IntDistribution(1, _MOST, log=True),
    "num_workers": IntDistribution(0, _MOST),
}
_FACTS = ("data", "machine", "versions")
_RUN = "run "
# What comes of a disk that is full or not ours, and of a file that somebody has garbled.
_UNUSABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError, OptunaError)


def cache_folder() -> Path:
    """Return the folder in which results are kept, which need not be there."""
    return machine.cache_folder("autotune")


def read_runs(folder: Path, data: str = "*") -> list[EarlierRun]:
    """Return earlier runs, the last one last.

    A file that cannot be read is left out with a warning.

    Parameters
    ----------
    folder
        Where they are kept; may not exist.
    data
        Digest of a data set whose runs alone are wanted.
    """
    runs = list[EarlierRun]()
    for path in sorted(folder.glob(f"{data}-*{_SUFFIX}")):
        try:
            runs += _read(path)
        except _UNUSABLE as error:
            _logger.warning("%s: cannot be read and is left out (%r)", path, error)
    return sorted(runs, key=lambda run: run.began)


def record(folder: Path, run: EarlierRun) -> None:
    """Keep a run for later ones; a warning says if that cannot be done.

    Other processes may do so at the same time.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _append(folder / f"{run.key.name}{_SUFFIX}", run)
    except _UNUSABLE as error:
        _logger.warning("%s: cannot be written (%s), so this run is not kept", folder, error)


def _read(path: Path) -> list[EarlierRun]:
    with quiet():
        storage = _storage(path)
        if path.stem not in optuna.get_all_study_names(storage):
            return []  # another process is about to make it
        study = optuna.load_study(study_name=path.stem, storage=storage)
        attributes = study.user_attrs
        trials = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    runs = {name: plain for name, plain in attributes.items() if name.startswith(_RUN)}
    if not runs:
        return []
    digests = zip(_FACTS, path.stem.split("-"), strict=True)
    key = Key(**{name: Fingerprint(digest, attributes[name]) for name, digest in digests})
    by_run: dict[str, list[EarlierTrial]] = {name: [] for name in runs}
    for trial in trials:
        by_run.setdefault(trial.user_attrs["run"], []).append(_earlier(trial))
    return [
        EarlierRun.from_json(plain, key=key, trials=tuple(by_run[name]))
        for name, plain in runs.items()
    ]


def _append(path: Path, run: EarlierRun) -> None:
    """Add trials, and then the run: one of which all was not written does not count."""
    name = f"{_RUN}{uuid4().hex}"
    with quiet():
        study = optuna.create_study(
            study_name=path.stem, storage=_storage(path), load_if_exists=True
        )
        known = study.user_attrs
        for fact in _FACTS:
            if fact not in known:
                study.set_user_attr(fact, dict(getattr(run.key, fact).facts))
        for trial in run.trials:
            study.add_trial(_trial(trial, run, name))
        study.set_user_attr(name, run.to_json())


def _trial(trial: EarlierTrial, run: EarlierRun, name: str) -> FrozenTrial:
    configuration = trial.configuration
    attributes: dict[str, Any] = {
        "run": name,
        "time": run.began,
        "load": run.load,
        "cache": run.asked.cache,
        "batch_size": run.asked.batch_size,
        "replicates": list(trial.replicates),
        "others": configuration.others,
    }
    return create_trial(
        params={size: configuration[size] for size in _SPACE},
        distributions=_SPACE,
        value=trial.seconds_per_cell,
        user_attrs=attributes,
    )


def _earlier(trial: FrozenTrial) -> EarlierTrial:
    return EarlierTrial(
        configuration=Configuration(**trial.params, **trial.user_attrs["others"]),
        replicates=tuple(trial.user_attrs["replicates"]),
    )


def _storage(path: Path) -> JournalStorage:
    return JournalStorage(JournalFileBackend(str(path)))
