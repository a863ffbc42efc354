"""Any loader is tuned: what `autotune` says of it is what it delivers."""

import json
from functools import cache, partial
from itertools import islice, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tuner import other_loaders
from tests.tuner.measured_here import MeasuringProcess, measure_here
from tests.tuner.mixing import Label, LoaderPlans, Mixing
from tests.tuner.other_loaders import BATCH_SIZE, N_ROWS, PLATES, Blocks, PlannedPlates, Plates
from tests.tuner.reports import code_to_paste, html_report, in_words, printed

from cellfeed import CellDataset, FormatError, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, Configuration, autotune, measure, theory
from cellfeed_tuner._entropy import by_round
from cellfeed_tuner._interval import Estimate, mean_with_interval
from cellfeed_tuner._results import ConfigurationResult, EntropyBits, LabelResult

RANDOM = theory.random_entropy_bits(np.full(4, N_ROWS // 4), BATCH_SIZE)


@cache
def true_bits(configuration: Configuration) -> float:
    """Mean entropy of the plates over many minibatches."""
    found = list[float]()
    for seed in range(8):
        for rows in Blocks(configuration, 0.0, seed):
            _, counts = np.unique(PLATES[rows], return_counts=True)
            found.append(theory.entropy_bits(counts))
    return float(np.mean(found))


@pytest.fixture(scope="module", autouse=True)
def here():
    with pytest.MonkeyPatch.context() as patch:
        measure_here(patch)
        yield


def tuned(loader, **settings):
    return autotune(loader, **{"budget": 600.0, "entropy_floor": 0.5} | settings)


@pytest.fixture(scope="module")
def delivered(here):
    """A result of a loader whose entropies are not known before it is measured."""
    return tuned(Plates(), entropy_floor=0.9)


@pytest.fixture(scope="module")
def planned(here):
    return tuned(PlannedPlates(), entropy_floor=0.9)


class TestMeasured:
    def test_entropy_is_that_of_what_it_delivers(self, delivered):
        timed = [each for each in delivered.configurations if each.cells_per_second is not None]
        assert timed
        for each in timed:
            plate = each.labels["plate"].entropy_bits
            bits = plate.expected
            assert bits.value == pytest.approx(true_bits(each.configuration), abs=0.15)
            assert bits.low <= bits.value <= bits.high
            assert plate.random == pytest.approx(RANDOM)
            assert set(each.labels) == {"plate", "half"}

    def test_what_mixes_too_little_is_not_chosen_however_fast(self, delivered):
        chosen = delivered.recommended
        assert chosen.configuration == Configuration(block_size=8, fetch_factor=8)
        assert true_bits(chosen.configuration) >= 0.9 * RANDOM - 0.05
        assert chosen.cells_per_second.value <= 8 / Plates.seconds_per_block
        assert chosen.peak_memory_bytes > 0

    def test_only_what_was_measured_is_shown_and_the_rest_is_counted(self, delivered):
        assert all(each.peak_memory_bytes is not None for each in delivered.configurations)
        assert len(delivered.configurations) + delivered.n_unlisted == 6
        said = " ".join(in_words("untimed", delivered))
        unlisted = f"{delivered.n_unlisted} other configurations were not timed"
        assert (unlisted in said) == (delivered.n_unlisted > 0)

    def test_of_a_plan_what_mixes_too_little_is_not_timed(self, planned):
        by_settings = {each.configuration: each for each in planned.configurations}
        assert len(by_settings) == 6
        coarse = by_settings[Configuration(block_size=256, fetch_factor=1)]
        assert (coarse.status, coarse.cells_per_second) == ("below entropy floor", None)
        for settings, each in by_settings.items():
            expected = each.labels["plate"].entropy_bits.expected
            assert expected.value == pytest.approx(true_bits(settings), abs=0.1)
        assert true_bits(planned.recommended.configuration) >= 0.9 * RANDOM - 0.05

    def test_each_measurement_reads_other_rows(self):
        loader, settings = other_loaders.RowNumbers(), Configuration(num_workers=0)
        first, again, other = (
            measure(loader, settings, seconds=0.01, seed=seed).round_entropy_bits["plate"][:8]
            for seed in (0, 0, 1)
        )
        assert first == again
        assert first != other


class TestFaults:
    """Whether a loader is called wrong, by the entropies of the first minibatches of it."""

    SETTINGS = tuple(
        Configuration(block_size=b, fetch_factor=f) for b, f in [(1, 1), (8, 8), (256, 1)]
    )

    def mixing(self, tunable: Plates) -> Mixing:
        label = Label.of_values("plate", PLATES)
        return Mixing([label], LoaderPlans(tunable), entropy_floor=0.5)

    def fault(self, mixing: Mixing, settings: Configuration, bits: NDArray[np.float64]) -> str:
        entropy = EntropyBits(
            measured=mean_with_interval(bits), expected=Estimate(0.0, 0.0, 2.0), random=RANDOM
        )
        result = ConfigurationResult(
            configuration=settings, status="timed", n_rounds=len(bits) - 1,
            labels={"plate": LabelResult(entropy_bits=entropy)},
        )  # fmt: skip
        return mixing.fault(result)

    def bits_of(self, settings: Configuration, seed: int, n_rounds: int) -> NDArray[np.float64]:
        rows = islice(Blocks(settings, 0.0, seed), n_rounds * settings.fetch_factor)
        counts = [np.unique(PLATES[each], return_counts=True)[1] for each in rows]
        return by_round(
            np.array([theory.entropy_bits(each) for each in counts]), len(counts) // n_rounds
        )

    @pytest.mark.slow
    @pytest.mark.parametrize("tunable", [Plates(), PlannedPlates()])
    @pytest.mark.parametrize("settings", SETTINGS)
    def test_a_correct_one_is_not_however_few_its_minibatches(self, tunable, settings):
        """Of two minibatches, one pair in forty has 1.985 bits each, more than expected."""
        mixing = self.mixing(tunable)
        for seed, n_rounds in product(range(100), [2, 3, 5, 16]):
            assert self.fault(mixing, settings, self.bits_of(settings, seed, n_rounds)) == ""

    def test_one_that_does_not_deliver_its_plan_is(self):
        (fine, coarse, unmixed), planned = self.SETTINGS, self.mixing(PlannedPlates())
        for promised, delivered in ((fine, unmixed), (unmixed, coarse)):
            found = self.fault(planned, promised, self.bits_of(delivered, 0, 16))
            assert "does not deliver its plan" in found
        other_labels = self.fault(self.mixing(Plates()), fine, np.full(64, 2.0))
        assert "`labels_of` gives other labels" in other_labels


class TestReports:
    def test_page_and_terminal_name_the_loader(self, delivered, tmp_path):
        path = tmp_path / "autotune.json"
        delivered.save(path)
        assert AutotuneResult.load(path) == delivered
        assert json.loads(path.read_text())["dataset"]["loader"] == "Plates"
        code = code_to_paste(delivered, path)
        assert "Plates(...).open(Configuration(block_size=8, fetch_factor=8" in code
        page = html_report(delivered, code=code)
        assert "genes" not in page
        assert "Plates does not count it" in page
        assert "block size 8, fetch factor 8" in printed(delivered, path)

    def test_cellfeed_takes_no_settings_of_another_loader(self, delivered, small_collection):
        with pytest.raises(FormatError, match="is of Plates, whose settings do not apply"):
            CellDataset.from_autotune(open_collection(small_collection), delivered)


class TestSettings:
    def test_one_of_its_own_is_chosen(self):
        result = tuned(other_loaders.WithThreads(), entropy_floor=0.0)
        assert result.recommended.configuration["mode"] == "fast"
        assert "mode fast" in result.recommended.settings
        assert '<th scope="col">mode</th>' in html_report(result, code="")

    @pytest.mark.process
    @pytest.mark.smoke
    def test_workers_are_measured_too(self, monkeypatch):
        """A whole run of a user's own loader, in a measuring process."""
        monkeypatch.setattr("cellfeed_tuner._autotune.MeasuringProcess", MeasuringProcess)
        result = tuned(other_loaders.RowNumbers())
        assert {each.configuration.num_workers for each in result.configurations} == {0, 1}
        assert result.recommended is not None

    def test_what_has_too_short_epochs_is_infeasible_and_nothing_else(self):
        result = tuned(other_loaders.ShortWithLargeFetches(), entropy_floor=0.0)
        looked_at = [each for each in result.configurations if each.status == "too few cells"]
        assert looked_at
        for each in looked_at:
            assert each.configuration.fetch_factor == 8
            assert "an epoch has 4 minibatches" in each.note
            assert "needs 8 to be timed" in each.note
        assert result.recommended.configuration.fetch_factor == 1

    @pytest.mark.slow
    def test_what_keeps_training_from_waiting_is_chosen(self):
        """A step of 20 ms: 1,600 rows/s are needed, which all but single rows give."""
        result = tuned(PlannedPlates(), step=other_loaders.slow_step)
        assert 0.02 <= result.constraints.step_seconds < 20  # on a busy machine, longer than asked
        assert result.recommended.waiting is not None
        # The best mixed of those that are fast enough.
        assert result.recommended.configuration.block_size == 1


class TestMistakes:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("Unmixed", "the loader does not deliver its plan"),
            ("MixedTooWell", "`labels_of` gives other labels"),
        ],
    )
    def test_what_it_delivers_contradicts_its_plan_or_its_labels(self, name, said):
        result = tuned(getattr(other_loaders, name)())
        assert result.recommended is None
        assert said in result.loader_fault

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("PlansBeyond", "must give rows from 0 to 4,095, but gave"),
            ("FailsToPlan", "`planned_rows` of FailsToPlan failed for .*: IndexError"),
            ("OfAnotherSize", r"gives plate of shape \(16,\) for a minibatch of 32"),
            ("Unlabelled", r"gives half of shape \(0,\) for a minibatch of 32"),
        ],
    )
    def test_a_mistake_in_it_is_one_line(self, name, said):
        with pytest.raises(ParameterError, match=said) as caught:
            tuned(getattr(other_loaders, name)())
        assert "\n" not in str(caught.value)

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
        ("settings", "said"),
        [
            ({"label": "plate"}, "`label` is for collections"),
            ({"batch_size": 128}, "`batch_size` is for collections"),
            ({"workers": [0]}, "`workers` is for collections"),
            ({"indices": [1]}, "`indices` is for collections"),
            ({"cache": "cold"}, "cache='cold' needs `files`"),
            ({"step": other_loaders.slow_step, "need": 1e3}, "give one of"),
            ({"step": other_loaders.failing_step}, "no training step ended: no such layer"),
        ],
    )
    def test_arguments_that_do_not_go_with_it(self, settings, said):
        with pytest.raises(ParameterError, match=said):
            autotune(PlannedPlates(), **settings)

    def test_a_class_of_the_script_cannot_be_imported(self, monkeypatch):
        monkeypatch.setattr(Plates, "__module__", "__main__")
        with pytest.raises(ParameterError, match="move it to a module of its own"):
            autotune(Plates())


def test_folders_stand_for_their_files(tmp_path):
    (tmp_path / "store" / "inner").mkdir(parents=True)
    for name in ("store/inner/b", "store/a", "single"):
        (tmp_path / name).write_bytes(b"x")
    files = [tmp_path / "store", tmp_path / "single"]
    tunable = other_loaders.Opened(partial(range, 3), files=files)
    names = [str(each.relative_to(tmp_path)) for each in tunable.paths]
    assert names == ["store/a", "store/inner/b", "single"]
