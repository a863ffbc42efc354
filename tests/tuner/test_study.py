"""What is kept of runs, and by what it is found again."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from cellfeed_tuner import Configuration
from cellfeed_tuner._history import cache_folder, read_runs, record

FAST = Configuration(block_size=64, fetch_factor=16)
SLOW = Configuration(block_size=1, fetch_factor=4, num_workers=2)


@pytest.fixture
def kept(trials_of):
    """Keep a run in a folder."""

    def keep(folder, run, **facts):
        record(folder, run, trials_of(run, **facts))

    return keep


def study_in(folder):
    (path,) = folder.glob("*.journal")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    return optuna.load_study(study_name=None, storage=storage)


def test_a_run_is_read_as_it_was_recorded(earlier_run, kept, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3}, labels=["plate", "drug"])
    kept(tmp_path / "new", run)
    (again,) = read_runs(tmp_path / "new")
    assert again == run
    assert again.key.machine.facts == run.key.machine.facts
    assert again.key.data.facts == run.key.data.facts
    assert again.key.versions.facts == run.key.versions.facts


def test_each_configuration_is_a_trial_of_a_study_that_optuna_reads(earlier_run, kept, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3})
    kept(tmp_path, run, pruned={SLOW})
    study = study_in(tmp_path)
    states = {Configuration(**each.params): each.state for each in study.trials}
    assert states == {FAST: TrialState.COMPLETE, SLOW: TrialState.PRUNED}
    assert study.best_params == {"block_size": 64, "fetch_factor": 16, "num_workers": 0}
    assert study.best_value == pytest.approx(1e-5)
    assert tuple(study.best_trial.intermediate_values.values()) == run.trials[FAST]
    assert {"asked", "began", "choice"} <= set(study.user_attrs["run"])


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize(
    "name", ["optimization_history", "intermediate_values", "parallel_coordinate", "edf"]
)
def test_plots_of_optuna_open_the_study(earlier_run, kept, tmp_path, name):
    pytest.importorskip("matplotlib").use("agg")
    kept(tmp_path, earlier_run({FAST: 1e-5, SLOW: 1e-3}))
    plots: Any = optuna.visualization.matplotlib
    assert getattr(plots, f"plot_{name}")(study_in(tmp_path)).has_data()


def test_runs_come_in_their_order_and_by_their_data(earlier_run, kept, tmp_path):
    later = earlier_run({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00")
    first = earlier_run({FAST: 2e-5}, machine="elsewhere")
    other = earlier_run({FAST: 3e-5}, data="others")
    for run in (later, other, first):
        kept(tmp_path, run)
    assert read_runs(tmp_path, first.key.data.digest) == [first, later]
    assert len(read_runs(tmp_path)) == 3


def test_a_run_without_a_choice_is_kept(earlier_run, kept, tmp_path):
    run = earlier_run({FAST: 1e-5}, cells_per_second=None)
    kept(tmp_path, run)
    assert read_runs(tmp_path) == [run]


def test_nothing_is_there_before_the_first_run(tmp_path):
    assert read_runs(tmp_path / "nowhere") == []
    assert not (tmp_path / "nowhere").exists()


def test_a_folder_that_cannot_be_written_is_one_warning(earlier_run, kept, caplog):
    kept(Path("/proc/nowhere"), earlier_run({FAST: 1e-5}))
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert said.name.startswith("cellfeed_tuner")
    assert "/proc/nowhere: cannot be written" in said.getMessage()


def test_a_file_that_a_full_disk_cut_short_is_named(earlier_run, kept, tmp_path, caplog):
    run = earlier_run({FAST: 1e-5})
    kept(tmp_path, run)
    (path,) = tmp_path.glob("*.journal")
    path.write_bytes(path.read_bytes()[:100])
    kept(tmp_path, run)
    (said,) = caplog.records
    assert said.getMessage().startswith(f"{path}: damaged (")
    assert said.getMessage().endswith("), so this run is not kept; delete it")


@pytest.mark.parametrize("content", ["not a journal\n\n", '{"op_code": 0}\n', "[]\n"])
def test_a_garbled_file_is_left_out_with_a_warning(earlier_run, kept, tmp_path, caplog, content):
    run = earlier_run({FAST: 1e-5})
    kept(tmp_path, run)
    garbled = tmp_path / f"{run.key.data.digest}-00000000-00000000.journal"
    garbled.write_text(content)
    assert read_runs(tmp_path) == [run]
    (said,) = caplog.records
    assert garbled.name in said.getMessage()


def test_a_damaged_study_does_not_hide_the_others(earlier_run, kept, tmp_path, caplog):
    run = earlier_run({FAST: 1e-5})
    kept(tmp_path, run)
    study_in(tmp_path).set_user_attr("run", {"asked": {}})
    kept(tmp_path, run)
    assert read_runs(tmp_path) == [run]
    (said,) = (each for each in caplog.records if each.name.startswith("cellfeed_tuner"))
    assert "a study is skipped" in said.getMessage()


def test_a_run_that_was_not_written_to_its_end_does_not_count(earlier_run, kept, tmp_path):
    run = earlier_run({FAST: 1e-5, SLOW: 1e-3})
    kept(tmp_path, run)
    (path,) = tmp_path.glob("*.journal")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]))
    assert read_runs(tmp_path) == []
    kept(tmp_path, run)
    assert read_runs(tmp_path) == [run]


def test_optuna_says_nothing(earlier_run, kept, tmp_path, capfd):
    kept(tmp_path, earlier_run({FAST: 1e-5}))
    read_runs(tmp_path)
    assert capfd.readouterr() == ("", "")
    assert optuna.logging.get_verbosity() == optuna.logging.INFO


def test_processes_may_write_at_the_same_time(earlier_run, kept, tmp_path):
    kept(tmp_path, earlier_run({FAST: 1e-5}))
    script = (
        "import sys\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from cellfeed_tuner._history import read_runs, record\n"
        "from optuna.trial import create_trial\n"
        "folder = Path(sys.argv[1])\n"
        "(run, *_) = read_runs(folder)\n"
        "for number in range(5):\n"
        "    run = replace(run, began=f'2026-11-21 {sys.argv[2]}-{number}')\n"
        "    record(folder, run, [create_trial(value=1e-5, intermediate_values={0: 1e-5})])\n"
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


def test_a_file_that_another_process_is_about_to_fill_is_no_damage(
    earlier_run, kept, tmp_path, caplog
):
    (tmp_path / f"{earlier_run({FAST: 1e-5}).key.name}.journal").touch()
    assert read_runs(tmp_path) == []
    assert not caplog.records
