"""What is kept of runs, and by what it is found again."""

import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.trial import TrialState
from tests.tuner.mixing import Selected
from tests.warm import python as warm

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    ClassBalancedSampling,
    Collection,
    Streaming,
    open_collection,
)
from cellfeed_tuner import Configuration, describe_machine
from cellfeed_tuner._fingerprints import (
    data_fingerprint,
    machine_fingerprint,
    versions_fingerprint,
)
from cellfeed_tuner._history import cache_folder, fingerprint, read_runs, record

FAST = Configuration(block_size=64, fetch_factor=16)
SLOW = Configuration(block_size=1, fetch_factor=4, num_workers=2)
COSTS = {FAST: 1e-5, SLOW: 1e-3}


class TestStudies:
    @pytest.fixture
    def keep(self, trials_of):
        """Keep a run in a folder."""

        def keep(folder, run, **facts):
            record(folder, run, trials_of(run, **facts))

        return keep

    @pytest.fixture
    def run(self, earlier_run):
        return earlier_run(COSTS, labels=["plate", "drug"])

    @staticmethod
    def study_in(folder):
        (path,) = folder.glob("*.journal")
        backend = optuna.storages.journal.JournalFileBackend(str(path))
        storage = optuna.storages.JournalStorage(backend)
        return optuna.load_study(study_name=None, storage=storage)

    def test_a_run_is_read_as_it_was_recorded(self, run, keep, tmp_path, capfd):
        assert read_runs(tmp_path / "new") == []
        assert not (tmp_path / "new").exists()
        keep(tmp_path / "new", run)
        (again,) = read_runs(tmp_path / "new")
        assert again == run
        for part in ("machine", "data", "versions"):
            assert getattr(again.key, part).facts == getattr(run.key, part).facts
        assert capfd.readouterr() == ("", "")  # Optuna says nothing
        assert optuna.logging.get_verbosity() == optuna.logging.INFO

    @pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
    def test_each_configuration_is_a_trial_of_a_study_that_optuna_reads(self, run, keep, tmp_path):
        keep(tmp_path, run, pruned={SLOW})
        study = self.study_in(tmp_path)
        states = {Configuration(**each.params): each.state for each in study.trials}
        assert states == {FAST: TrialState.COMPLETE, SLOW: TrialState.PRUNED}
        assert study.best_params == {"block_size": 64, "fetch_factor": 16, "num_workers": 0}
        assert study.best_value == pytest.approx(1e-5)
        assert tuple(study.best_trial.intermediate_values.values()) == run.trials[FAST]
        assert {"settings", "began", "choice"} <= set(study.user_attrs["run"])
        keep(tmp_path / "all", run)
        study = self.study_in(tmp_path / "all")
        pytest.importorskip("matplotlib").use("agg")
        plots: Any = optuna.visualization.matplotlib
        for name in ("optimization_history", "intermediate_values", "parallel_coordinate", "edf"):
            assert getattr(plots, f"plot_{name}")(study).has_data()

    def test_runs_come_in_their_order_and_by_their_data(self, earlier_run, keep, tmp_path):
        later = earlier_run({FAST: 1e-5}, began="2026-11-21T00:00:00.000+00:00")
        first = earlier_run({FAST: 2e-5}, machine="elsewhere", cells_per_second=None)
        other = earlier_run({FAST: 3e-5}, data="others")
        for run in (later, other, first):
            keep(tmp_path, run)
        assert read_runs(tmp_path, first.key.data.digest) == [first, later]
        assert len(read_runs(tmp_path)) == 3

    def test_a_folder_that_cannot_be_written_is_one_warning(self, run, keep, caplog):
        keep(Path("/proc/nowhere"), run)
        (said,) = caplog.records
        assert said.levelno == logging.WARNING
        assert said.name.startswith("cellfeed_tuner")
        assert "/proc/nowhere: cannot be written" in said.getMessage()

    def test_a_file_that_a_full_disk_cut_short_is_named(self, run, keep, tmp_path, caplog):
        keep(tmp_path, run)
        (path,) = tmp_path.glob("*.journal")
        path.write_bytes(path.read_bytes()[:100])
        keep(tmp_path, run)
        (said,) = caplog.records
        assert said.getMessage().startswith(f"{path}: damaged (")
        assert said.getMessage().endswith("), so this run is not kept; delete it")

    @pytest.mark.parametrize("content", ["not a journal\n\n", '{"op_code": 0}\n', "[]\n", ""])
    def test_a_garbled_file_is_left_out_with_a_warning(self, run, keep, tmp_path, caplog, content):
        keep(tmp_path, run)
        garbled = tmp_path / f"{run.key.data.digest}-00000000-00000000.journal"
        garbled.write_text(content)
        assert read_runs(tmp_path) == [run]
        # One that another process is about to fill is no damage.
        assert [garbled.name in each.getMessage() for each in caplog.records] == [True] * bool(
            content
        )

    def test_a_damaged_study_does_not_hide_the_others(self, run, keep, tmp_path, caplog):
        keep(tmp_path, run)
        self.study_in(tmp_path).set_user_attr("run", {"settings": {}})
        keep(tmp_path, run)
        assert read_runs(tmp_path) == [run]
        (said,) = (each for each in caplog.records if each.name.startswith("cellfeed_tuner"))
        assert "a study is skipped" in said.getMessage()

    def test_a_run_that_was_not_written_to_its_end_does_not_count(self, run, keep, tmp_path):
        keep(tmp_path, run)
        (path,) = tmp_path.glob("*.journal")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))
        assert read_runs(tmp_path) == []
        keep(tmp_path, run)
        assert read_runs(tmp_path) == [run]

    def test_one_rank_of_each_of_two_machines_is_not_one_process(self, earlier_run, keep, tmp_path):
        run = earlier_run(COSTS, world_size=2)
        keep(tmp_path, run)
        assert read_runs(tmp_path) == [run]
        assert str(run.settings.ranks) == "1 of 2 ranks"

    @pytest.mark.process
    def test_processes_may_write_at_the_same_time(self, run, keep, tmp_path):
        keep(tmp_path, run)
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
        writers = [warm.Popen([*command, name]) for name in "ab"]
        assert [writer.wait() for writer in writers] == [0, 0]
        runs = read_runs(tmp_path)
        assert len({each.began for each in runs}) == 11
        assert all(each.trials for each in runs)

    def test_the_folder_is_the_users_unless_another_is_given(self, monkeypatch):
        monkeypatch.setenv("CELLFEED_CACHE_DIR", "/given")
        assert cache_folder() == Path("/given/autotune")
        monkeypatch.delenv("CELLFEED_CACHE_DIR")
        monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
        assert cache_folder() == Path("/xdg/cellfeed/autotune")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", "/home/somebody")
        assert cache_folder() == Path("/home/somebody/.cache/cellfeed/autotune")


class TestFingerprints:
    @staticmethod
    def of(path, *, label="plate", indices=None, strategy=None, permuted=False):
        collection = open_collection(path, obs=["plate", "cell_type"])
        column: Any = collection.obs[label]
        codes = column.codes
        codes = np.random.default_rng(0).permutation(codes) if permuted else codes
        strategy = Selected.of(collection, None, strategy).strategy
        return data_fingerprint(collection, codes, indices, strategy)

    @pytest.fixture
    def machine(self, small_collection):
        return describe_machine([small_collection / "plate0.h5ad"])

    def test_a_digest_is_short_and_depends_on_the_facts_alone(self):
        facts = ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1})
        digests = [fingerprint(each).digest for each in facts]
        assert len(digests[0]) == 8
        assert digests[0] == digests[1] != digests[2]

    def test_what_matters_makes_another_dataset(self, small_collection, tmp_path, monkeypatch):
        (tmp_path / "one").mkdir()
        shutil.copy(small_collection / "plate0.h5ad", tmp_path / "one")
        weights = np.ones(4500)
        found = [
            self.of(small_collection),
            self.of(tmp_path / "one"),
            self.of(small_collection, label="cell_type"),
            self.of(small_collection, permuted=True),  # where labels lie counts
            *(self.of(small_collection, indices=np.arange(n)) for n in (4499, 4500)),
            *(
                self.of(small_collection, strategy=each)
                for each in (
                    BlockShuffling(drop_last=True),
                    Streaming(),
                    ClassBalancedSampling("cell_type"),
                    ClassBalancedSampling("cell_type", total_size=99),
                    ClassBalancedSampling("plate"),
                    BlockWeightedSampling(weights=weights),
                    BlockWeightedSampling(weights=weights * np.arange(1, 4501)),
                )
            ),
        ]
        monkeypatch.setattr(Collection, "rows_per_chunk", property(lambda self: 7.0))
        found.append(self.of(small_collection))
        assert len({each.digest for each in found}) == len(found) == 14

    def test_a_copy_and_another_block_size_are_the_same_dataset(self, small_collection, tmp_path):
        shutil.copytree(small_collection, tmp_path / "elsewhere")
        assert self.of(small_collection) == self.of(tmp_path / "elsewhere")
        first, second = (ClassBalancedSampling("cell_type", size) for size in (4, 16))
        assert self.of(small_collection, strategy=first) == self.of(
            small_collection, strategy=second
        )

    def test_facts_are_plain_values(self, small_collection, machine):
        versions = versions_fingerprint()
        for each in (self.of(small_collection), machine_fingerprint(machine), versions):
            assert json.loads(json.dumps(each.facts, allow_nan=False)) == each.facts
        named = {"cellfeed", "h5py", "torch", "zarr", "numcodecs", "deflate"}
        assert named <= versions.facts.keys()
        assert all(each.count(".") == 1 for each in versions.facts.values() if each is not None)

    def test_a_machine_is_the_same_after_an_update_and_with_less_memory_free(self, machine):
        later = replace(
            machine,
            memory=replace(machine.memory, available_bytes=1),
            platform=replace(machine.platform, kernel=f"{machine.platform.kernel}-updated"),
            storage=tuple(replace(each, device="/dev/other") for each in machine.storage),
        )
        assert machine_fingerprint(later) == machine_fingerprint(machine)

    def test_what_matters_to_speed_makes_another_machine(self, machine):
        for change in (
            {"cpu": replace(machine.cpu, usable_cores=0.5)},
            {"cpu": replace(machine.cpu, model="another")},
            {"memory": replace(machine.memory, total_bytes=1)},
            {"platform": replace(machine.platform, kernel="Linux 3.10")},
            {"storage": (replace(machine.storage[0], file_system="other"),)},
        ):
            other: Any = replace(machine, **change)
            assert machine_fingerprint(other) != machine_fingerprint(machine)
