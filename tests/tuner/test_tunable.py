"""Any loader is tuned: what `autotune` says of it is what it delivers."""

import json
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.tuner import other_loaders
from tests.tuner.other_loaders import BATCH_SIZE, N_ROWS, PLATES, Blocks, PlannedPlates, Plates
from tests.tuner.reports import code_to_paste, html_report, in_words, printed

from cellfeed import CellDataset, FormatError, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, Configuration, Tunable, autotune, measure, theory

RANDOM = theory.random_entropy_bits(np.full(4, N_ROWS // 4), BATCH_SIZE)


def true_bits(configuration: Configuration) -> float:
    """Mean entropy of the plates over very many minibatches."""
    found = list[float]()
    for seed in range(20):
        for rows in Blocks(configuration, 0.0, seed):
            _, counts = np.unique(PLATES[rows], return_counts=True)
            found.append(theory.entropy_bits(counts))
    return float(np.mean(found))


@pytest.fixture(scope="module")
def delivered():
    """A result of a loader whose entropies are not known before it is measured."""
    return autotune(Plates(), budget=30.0, entropy_floor=0.9)


@pytest.fixture(scope="module")
def planned():
    return autotune(PlannedPlates(), budget=30.0, entropy_floor=0.9)


class TestMeasured:
    def test_entropy_is_that_of_what_it_delivers(self, delivered):
        timed = [each for each in delivered.configurations if each.cells_per_second is not None]
        assert timed
        for each in timed:
            bits = each.entropy_bits.expected
            assert bits.value == pytest.approx(true_bits(each.configuration), abs=0.1)
            assert bits.low <= bits.value <= bits.high
            assert each.entropy_bits.random == pytest.approx(RANDOM)
            assert set(each.further_labels) == {"half"}

    def test_what_mixes_too_little_is_not_chosen_however_fast(self, delivered):
        assert delivered.recommended is not None
        chosen = delivered.recommended.configuration
        assert true_bits(chosen) >= 0.9 * RANDOM - 0.05
        assert chosen == Configuration(block_size=8, fetch_factor=8)

    def test_throughput_is_what_it_takes(self, delivered):
        chosen = delivered.recommended
        assert chosen.cells_per_second.value <= 8 / Plates.seconds_per_block
        assert chosen.peak_memory_bytes > 0

    def test_only_what_was_measured_is_shown_and_the_rest_is_counted(self, delivered):
        assert all(each.peak_memory_bytes is not None for each in delivered.configurations)
        assert len(delivered.configurations) + delivered.n_unlisted == 6
        said = " ".join(in_words("untimed", delivered))
        unlisted = f"{delivered.n_unlisted} other configurations were not measured"
        assert (unlisted in said) == (delivered.n_unlisted > 0)


class TestPlanned:
    def test_what_mixes_too_little_is_not_timed(self, planned):
        assert len(planned.configurations) == 6
        by_settings = {each.configuration: each for each in planned.configurations}
        coarse = by_settings[Configuration(block_size=256, fetch_factor=1)]
        assert coarse.status == "below entropy floor"
        assert coarse.cells_per_second is None
        for settings, each in by_settings.items():
            assert each.entropy_bits.expected.value == pytest.approx(true_bits(settings), abs=0.1)

    def test_the_choice_mixes(self, planned):
        assert planned.recommended is not None
        assert true_bits(planned.recommended.configuration) >= 0.9 * RANDOM - 0.05


class TestReports:
    def test_it_is_read_as_it_was_saved(self, delivered, tmp_path):
        delivered.save(tmp_path / "autotune.json")
        again = AutotuneResult.load(tmp_path / "autotune.json")
        assert again == delivered
        plain = json.loads((tmp_path / "autotune.json").read_text())
        assert plain["dataset"]["loader"] == "Plates"

    def test_page_and_terminal_name_the_loader(self, delivered, tmp_path):
        code = code_to_paste(delivered, tmp_path / "autotune.json")
        assert "Plates(...).open(Configuration(block_size=8, fetch_factor=8" in code
        page = html_report(delivered, code=code)
        assert "Plates" in page
        assert "genes" not in page
        assert "Plates does not count it" in page
        assert "block size 8, fetch factor 8" in printed(delivered, tmp_path / "autotune.json")

    def test_cellfeed_takes_no_settings_of_another_loader(self, delivered, small_collection):
        with pytest.raises(FormatError, match="is of Plates, whose settings do not apply"):
            CellDataset.from_autotune(open_collection(small_collection), delivered)


def test_a_setting_of_its_own_is_chosen():
    result = autotune(other_loaders.WithThreads(), budget=30.0, entropy_floor=0.0)
    assert result.recommended is not None
    assert result.recommended.configuration["mode"] == "fast"
    assert "mode fast" in result.recommended.settings
    assert "other settings" in html_report(result, code="")


def test_workers_are_measured_too():
    result = autotune(other_loaders.RowNumbers(), budget=30.0, entropy_floor=0.5)
    assert {each.configuration.num_workers for each in result.configurations} == {0, 1}
    assert result.recommended is not None


def test_what_has_too_short_epochs_is_infeasible_and_nothing_else():
    result = autotune(other_loaders.ShortWithLargeFetches(), budget=30.0, entropy_floor=0.0)
    looked_at = [each for each in result.configurations if each.status == "too few cells"]
    assert looked_at
    for each in looked_at:
        assert each.configuration.fetch_factor == 8
        assert "an epoch has 4 minibatches" in each.note
        assert "needs 8 to be timed" in each.note
    assert result.recommended is not None
    assert result.recommended.configuration.fetch_factor == 1


def test_each_measurement_reads_other_rows():
    settings = Configuration(num_workers=0)
    found = [
        measure(other_loaders.RowNumbers(), settings, seconds=0.1, seed=seed).round_entropy_bits
        for seed in (0, 0, 1)
    ]
    first, again, other = (each["plate"][:8] for each in found)
    assert first == again
    assert first != other


class TestStep:
    def test_what_keeps_training_from_waiting_is_chosen(self):
        """A step of 20 ms: 1,600 rows/s are needed, which all but single rows give."""
        result = autotune(
            PlannedPlates(), budget=30.0, entropy_floor=0.5, step=other_loaders.slow_step
        )
        step_seconds = result.constraints.step_seconds
        assert step_seconds is not None
        assert 0.02 <= step_seconds < 20  # seconds; on a busy machine, longer than asked
        assert result.recommended is not None
        assert result.recommended.waiting is not None
        # The best mixed of those that are fast enough.
        assert result.recommended.configuration.block_size == 1

    def test_a_step_that_fails_is_one_line(self):
        with pytest.raises(ParameterError, match="no training step ended: no such layer"):
            autotune(PlannedPlates(), budget=30.0, step=other_loaders.failing_step)

    def test_one_of_three(self):
        with pytest.raises(ParameterError, match="give one of"):
            autotune(PlannedPlates(), step=other_loaders.slow_step, need=1e3)


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("Unmixed", "the loader does not deliver its plan"),
            ("MixedTooWell", "`labels_of` gives other labels"),
        ],
    )
    def test_what_it_delivers_contradicts_its_plan_or_its_labels(self, name, said):
        result = autotune(getattr(other_loaders, name)(), budget=30.0, entropy_floor=0.5)
        assert result.recommended is None
        assert result.loader_fault is not None
        assert said in result.loader_fault

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("PlansBeyond", "must give rows from 0 to 4,095, but gave"),
            ("FailsToPlan", "`planned_rows` of FailsToPlan failed for .*: IndexError"),
            ("Unpicklable", "cannot be sent to the measuring process .*define it"),
        ],
    )
    def test_a_mistake_in_it_is_one_line(self, name, said):
        with pytest.raises(ParameterError, match=said) as caught:
            autotune(getattr(other_loaders, name)(), budget=30.0, entropy_floor=0.5)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("OfAnotherSize", r"gives plate of shape \(16,\) for a minibatch of 32"),
            ("Unlabelled", r"gives half of shape \(0,\) for a minibatch of 32"),
        ],
    )
    def test_what_it_delivers_is_not_what_it_says(self, name, said):
        with pytest.raises(ParameterError, match=said):
            autotune(getattr(other_loaders, name)(), budget=30.0)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"labels": {}}, "has no `labels`"),
            ({"labels": {"a": [1] * 9, "b": [1]}}, "must have a value for each row"),
            ({"labels": {"a": ["same"] * 4096}}, r"has 1 value\(s\), so there is nothing to mix"),
            ({"labels": {"a": range(4096)}}, "any order looks mixed"),
            ({"batch_size": 0}, "`batch_size >= 1` must hold"),
            ({"batch_size": 4096, "parameters": {"fetch_factor": [2]}}, "even the smallest"),
            ({"parameters": {"mode": []}}, "mode has none"),
            ({"parameters": {"block_size": [0]}}, "`block_size >= 1` must hold"),
        ],
    )
    def test_what_it_has_cannot_be_tuned(self, changes, said):
        tunable: Any = Plates()
        for name, value in changes.items():
            setattr(tunable, name, value)
        with pytest.raises(ParameterError, match=said):
            autotune(tunable)

    @pytest.mark.parametrize(
        "settings", [{"label": "plate"}, {"batch_size": 128}, {"workers": [0]}, {"indices": [1]}]
    )
    def test_what_is_for_collections(self, settings):
        with pytest.raises(ParameterError, match=f"`{next(iter(settings))}` is for collections"):
            autotune(Plates(), **settings)

    def test_no_files_are_not_cold(self):
        with pytest.raises(ParameterError, match="cache='cold' needs `files`"):
            autotune(Plates(), cache="cold")

    def test_a_class_of_the_script_cannot_be_imported(self, monkeypatch):
        monkeypatch.setattr(Plates, "__module__", "__main__")
        with pytest.raises(ParameterError, match="move it to a module of its own"):
            autotune(Plates())


class TestPaths:
    def test_folders_stand_for_their_files(self, tmp_path):
        (tmp_path / "store" / "inner").mkdir(parents=True)
        for name in ("store/inner/b", "store/a", "single"):
            (tmp_path / name).write_bytes(b"x")
        tunable: Tunable = other_loaders.Opened(
            partial(range, 3), files=[tmp_path / "store", tmp_path / "single"]
        )
        names = [str(each.relative_to(tmp_path)) for each in tunable.paths]
        assert names == ["store/a", "store/inner/b", "single"]
