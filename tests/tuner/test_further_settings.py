"""Threads and aligned blocks as settings beside the three that every loader has."""

import numpy as np
import pytest
from tests import commands

from cellfeed import BlockShuffling, CellDataset, EpochPlan, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, Configuration, autotune, measure, minibatch_entropies

pytestmark = pytest.mark.usefixtures("short_replicates")

BATCH_SIZE = 32


@pytest.fixture(scope="module")
def tuned(short_replicates, small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    return autotune(
        collection, label="plate", batch_size=BATCH_SIZE, block_sizes=[16], fetch_factors=[4],
        workers=[0], num_threads=[1, 2], align=[None, "chunks"], budget=600.0, entropy_floor=0.0,
    )  # fmt: skip


def test_each_is_a_configuration(tuned):
    found = {tuple(each.configuration.others.items()) for each in tuned.configurations}
    assert found == {
        (("align", align), ("num_threads", threads))
        for align in (None, "chunks") for threads in (1, 2)
    }  # fmt: skip
    assert tuned.loader_fault is None
    assert tuned.recommended is not None


def test_each_that_was_measured_is_judged_by_blocks_of_its_own(tuned):
    measured = [each for each in tuned.configurations if each.status == "measured"]
    assert measured
    assert {each.verdict and each.verdict.kind for each in measured} <= {"inside", "assumptions"}


def test_entropy_is_that_of_the_plan_of_each(tuned, small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    for each in tuned.configurations:
        strategy = BlockShuffling(16, align=each.configuration["align"]).bound_to(collection)
        plan = EpochPlan(
            strategy=strategy, n_rows=len(collection), batch_size=BATCH_SIZE, fetch_factor=4
        )
        bits = minibatch_entropies(collection.obs["plate"].values, plan).mean()
        assert each.entropy_bits.expected.value == pytest.approx(bits, abs=0.05)


def test_training_takes_them(tuned, small_collection, tmp_path):
    collection = open_collection(small_collection, obs=["plate"])
    tuned.save(tmp_path / "autotune.json")
    assert AutotuneResult.load(tmp_path / "autotune.json") == tuned
    dataset = CellDataset.from_autotune(collection, tmp_path / "autotune.json", seed=0)
    chosen = tuned.recommended.configuration
    assert dataset.num_threads == chosen["num_threads"]
    is_aligned = getattr(dataset.strategy, "align", None) is not None
    assert is_aligned == (chosen["align"] == "chunks")
    rows = np.concatenate([each.rows for each in dataset])
    assert sorted(rows) == list(range(len(collection)))


def test_what_is_measured_alone_has_them(small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    settings = Configuration(block_size=16, fetch_factor=4, align="chunks", num_threads=1)
    found = measure(collection, settings, batch_size=BATCH_SIZE, label="plate", seconds=0.1)
    assert found.delivery_fault == ""
    assert found.n_threads == 1


def test_the_command_tries_them(small_collection, tmp_path):
    grid = ["--block-sizes", "4", "--fetch-factors", "4", "--workers", "0", "--budget", "600"]
    ran = commands.autotune(
        *(small_collection, "--label", "plate", "--output", tmp_path, *grid),
        *("--num-threads", "1,2", "--align", "--entropy-floor", "0"),
    )
    assert ran.exit_code == 0, ran.output
    found = AutotuneResult.load(tmp_path / "autotune.json")
    assert {each.configuration["align"] for each in found.configurations} == {None, "chunks"}
    assert {each.configuration["num_threads"] for each in found.configurations} == {1, 2}
    assert "num threads" in ran.stdout


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_threads": [0]}, "`num_threads >= 1` must hold"),
        ({"align": ["rows"]}, '`align` must be "chunks" or None'),
        ({"align": ["chunks"], "strategy": BlockShuffling(4)}, "`align` is of shuffled blocks"),
    ],
)
def test_what_cannot_be(settings, said, small_collection):
    collection = open_collection(small_collection, obs=["plate"])
    with pytest.raises(ParameterError, match=said):
        autotune(collection, label="plate", **settings)
