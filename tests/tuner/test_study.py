"""What is kept of runs, and by what it is found again."""

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from cellfeed_tuner import Configuration
from cellfeed_tuner._history._earlier_run import EarlierRun
from cellfeed_tuner._history._study import cache_folder, read_runs, record
from cellfeed_tuner._planning._space import Space

FAST = Configuration(block_size=64, fetch_factor=16)
SLOW = Configuration(block_size=1, fetch_factor=4, num_workers=2)
BROKEN = Configuration(block_size=1, fetch_factor=4, num_workers=1)


def test_a_run_is_read_as_it_was_recorded(earlier_run, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3})
    record(tmp_path / "new", run)
    (again,) = read_runs(tmp_path / "new")
    assert again == run
    assert again.key.machine.facts == run.key.machine.facts
    assert again.key.data.facts == run.key.data.facts
    assert again.key.versions.facts == run.key.versions.facts


def test_ranges_that_were_asked_for_are_read_as_such(earlier_run, tmp_path):
    ranges = Space.of(range(1, 4097), range(1, 513), [0, 2])
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3}, space=ranges)
    record(tmp_path, run)
    (again,) = read_runs(tmp_path)
    assert again == run
    assert again.asked.space == ranges


def test_other_settings_are_read_too(earlier_run, tmp_path):
    settings = Configuration(block_size=4, fetch_factor=4, align="chunks", num_threads=2)
    run = earlier_run({settings: 1e-5})
    record(tmp_path, run)
    (again,) = read_runs(tmp_path)
    assert again.choice == settings
    assert again.trials == run.trials


def test_each_configuration_is_a_trial_of_a_study_that_optuna_reads(earlier_run, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3}, raced={FAST})
    run = replace(run, trials={**run.trials, BROKEN: ()})
    record(tmp_path, run)
    (path,) = tmp_path.glob("*.journal")
    assert path.stem == run.key.name
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    (name,) = optuna.get_all_study_names(storage)
    study = optuna.load_study(study_name=name, storage=storage)
    assert len(study.trials) == 3
    states = {Configuration(**each.params): each.state for each in study.trials}
    state = optuna.trial.TrialState
    assert states == {FAST: state.COMPLETE, SLOW: state.PRUNED, BROKEN: state.FAIL}
    assert study.best_params == {"block_size": 64, "fetch_factor": 16, "num_workers": 0}
    assert study.best_value == pytest.approx(1e-5)
    assert study.best_trial.user_attrs["replicates"] == list(run.trials[FAST])
    looks = study.best_trial.intermediate_values
    assert list(looks.values()) == list(run.trials[FAST])
    assert {"asked", "began", "choice"} <= set(study.user_attrs["run"])


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "name", ["optimization_history", "intermediate_values", "parallel_coordinate", "edf"]
)
def test_plots_of_optuna_open_the_study(earlier_run, tmp_path, name):
    pytest.importorskip("matplotlib").use("agg")
    record(tmp_path, run := earlier_run({FAST: 1e-5, SLOW: 1e-3}))
    path = tmp_path / f"{run.key.name}.journal"
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.load_study(study_name=None, storage=storage)
    plots: Any = optuna.visualization.matplotlib
    assert getattr(plots, f"plot_{name}")(study).has_data()


def test_runs_of_version_0_1_0_are_read(earlier_run, tmp_path):
    """They said whether they were short ones."""
    run = earlier_run({FAST: 1e-5})
    plain = run.to_json() | {"is_short": True}
    again = EarlierRun.from_json(plain, key=run.key, trials=run.trials, raced=run.raced)
    assert again == run


def test_runs_come_in_their_order_and_by_their_data(earlier_run, tmp_path):
    later = earlier_run({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00")
    first = earlier_run({FAST: 2e-5}, machine="elsewhere")
    other = earlier_run({FAST: 3e-5}, data="others")
    for run in (later, other, first):
        record(tmp_path, run)
    assert read_runs(tmp_path, first.key.data.digest) == [first, later]
    assert len(read_runs(tmp_path)) == 3


def test_a_run_without_a_choice_is_kept(earlier_run, tmp_path):
    run = earlier_run({FAST: 1e-5}, cells_per_second=None)
    record(tmp_path, run)
    assert read_runs(tmp_path) == [run]


def test_nothing_is_there_before_the_first_run(tmp_path):
    assert read_runs(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written_is_one_warning(earlier_run, caplog):
    record(Path("/proc/nowhere"), earlier_run({FAST: 1e-5}))
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.name.startswith("cellfeed_tuner")
    assert "/proc/nowhere: cannot be written" in said.getMessage()


@pytest.mark.parametrize("content", ["not a journal\n\n", '{"op_code": 0}\n', "[]\n"])
def test_a_garbled_file_is_left_out_with_a_warning(earlier_run, tmp_path, caplog, content):
    run = earlier_run({FAST: 1e-5})
    record(tmp_path, run)
    garbled = tmp_path / f"{run.key.data.digest}-00000000-00000000.journal"
    garbled.write_text(content)
    assert read_runs(tmp_path) == [run]
    (said,) = caplog.records
    assert garbled.name in said.getMessage()


def test_a_run_that_was_not_written_to_its_end_does_not_count(earlier_run, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3})
    record(tmp_path, run)
    (path,) = tmp_path.glob("*.journal")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert read_runs(tmp_path) == []
    record(tmp_path, run)
    assert read_runs(tmp_path) == [run]


def test_optuna_says_nothing(earlier_run, tmp_path, capfd):
    record(tmp_path, earlier_run({FAST: 1e-5}))
    read_runs(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO


def test_processes_may_write_at_the_same_time(earlier_run, tmp_path):
    record(tmp_path, earlier_run({FAST: 1e-5}))
    script = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from cellfeed_tuner._history._study import read_runs, record\n"
        "folder = Path(sys.argv[1])\n"
        "(run, *_) = read_runs(folder)\n"
        "for number in range(5):\n"
        "    record(folder, replace(run, began=f'2026-11-21 {sys.argv[2]}-{number}'))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    writers = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [writer.wait() for writer in writers] == [0, 0]
    runs = read_runs(tmp_path)
    assert len({run.began for run in runs}) == 11
    assert all(len(run.trials) == 1 for run in runs)


def test_the_folder_is_the_users_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("CELLFEED_CACHE_DIR", "/given")
    assert cache_folder() == Path("/given/autotune")
    monkeypatch.delenv("CELLFEED_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/cellfeed/autotune")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/cellfeed/autotune")


def test_a_file_that_another_process_is_about_to_fill_is_no_damage(earlier_run, tmp_path, caplog):
    (tmp_path / f"{earlier_run({FAST: 1e-5}).key.name}.journal").touch()
    assert read_runs(tmp_path) == []
    assert not caplog.records
