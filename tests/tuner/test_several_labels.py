"""``autotune`` over several labels, against entropies that are counted by hand."""

import html
import json
import re
from collections import Counter
from dataclasses import replace
from math import log2

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from tests import commands
from tests.tuner.mixing import BlockPlans, Mixing, label_of
from tests.tuner.reports import in_words, said_of

from cellfeed import BlockShuffling, ColumnError, EpochPlan, ParameterError, open_collection
from cellfeed_tuner import AutotuneResult, autotune, theory

pytestmark = pytest.mark.usefixtures("short_replicates")

N_CELLS, BATCH_SIZE, N_EPOCHS, FLOOR = 3000, 16, 20, 0.8
LABELS = {
    "line": np.arange(N_CELLS) // 10 % 4,
    "plate": np.repeat([0, 1, 2], N_CELLS // 3),
    "drug": np.random.default_rng(0).integers(0, 3, N_CELLS),
}
SIZES = [(block_size, fetch_factor) for block_size in (4, 32) for fetch_factor in (2, 8)]


def bits(values) -> float:
    n = len(values)
    return -sum(c / n * log2(c / n) for c in Counter(values).values())


def bits_within(values, given) -> float:
    """Mean entropy over the values of the other label, by how often they occur."""
    pairs = list(zip(values, given, strict=True))
    parts = [[a for a, b in pairs if b == value] for value in set(given)]
    return sum(len(part) * bits(part) for part in parts) / len(pairs)


def minibatches(block_size, fetch_factor, epoch):
    """The rows of an epoch's full minibatches, as its plan has them."""
    plan = EpochPlan(
        strategy=BlockShuffling(block_size), n_rows=N_CELLS, batch_size=BATCH_SIZE,
        fetch_factor=fetch_factor, epoch=epoch,
    )  # fmt: skip
    order = np.concatenate([plan.delivered_rows(i)[0] for i in range(plan.n_fetches)])
    return order[: order.size - order.size % BATCH_SIZE].reshape(-1, BATCH_SIZE)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "cells.h5ad"
    obs = pd.DataFrame(
        {
            name: pd.Categorical([f"{name}{code}" for code in codes])
            for name, codes in LABELS.items()
        },
        index=[str(cell) for cell in range(N_CELLS)],
    )
    ad.AnnData(np.ones((N_CELLS, 5), dtype=np.float32), obs=obs).write_h5ad(path)
    return path


@pytest.fixture(scope="module")
def tuned(short_replicates, file, tmp_path_factory):
    """What the command printed, and the JSON that it wrote."""
    output = tmp_path_factory.mktemp("tuned")
    grid = ["--block-sizes", "4,32", "--fetch-factors", "2,8", "--workers", "0"]
    settings = ["--batch-size", BATCH_SIZE, "--entropy-floor", FLOOR, "--budget", "600"]
    labels = ["--label", "line", "--label", "plate", "--given", "drug"]
    arguments = [file, *labels, *grid, *settings, "--output", output]
    printed = commands.autotune(*arguments)
    assert printed.exit_code == 0, printed.output
    page = html.unescape((output / "autotune.html").read_text(encoding="utf-8"))
    return printed.stdout, json.loads((output / "autotune.json").read_text()), page


@pytest.fixture(scope="module")
def said(tuned):
    """What it printed, as if on one line."""
    return " ".join(tuned[0].split())


@pytest.fixture(scope="module")
def page(tuned):
    """What the page says, as if on one line."""
    return " ".join(tuned[2].split())


@pytest.fixture(scope="module")
def counted():
    """Mean entropies of each configuration, by hand: of both labels, and of one within another."""
    found = {}
    for sizes in SIZES:
        rows = [each for epoch in range(N_EPOCHS) for each in minibatches(*sizes, epoch)]
        line, plate, drug = ([codes[each].tolist() for each in rows] for codes in LABELS.values())
        found[sizes] = {
            "line": np.mean([bits(each) for each in line]),
            "plate": np.mean([bits(each) for each in plate]),
            "within": np.mean([bits_within(a, b) for a, b in zip(line, drug, strict=True)]),
        }
    return found


def by_sizes(result):
    return {
        (each["configuration"]["block_size"], each["configuration"]["fetch_factor"]): each
        for each in result["configurations"]
    }


def test_every_label_has_the_entropy_that_its_minibatches_have(tuned, counted):
    for sizes, each in by_sizes(tuned[1]).items():
        plate = each["further_labels"]["plate"]
        for label, name in ((each, "line"), (plate, "plate")):
            expected = label["entropy_bits"]["expected"]["value"]
            assert expected == pytest.approx(counted[sizes][name], abs=0.01)
        within = each["conditional_entropy_bits"]
        assert within["given"] == "drug"
        expected = within["expected"]
        assert expected["value"] == pytest.approx(counted[sizes]["within"], abs=0.01)
        assert expected["low"] <= expected["value"] <= expected["high"]


def test_every_label_is_measured_and_judged(tuned):
    judged = [each for each in tuned[1]["configurations"] if each["verdict"] is not None]
    assert judged
    for each in tuned[1]["configurations"]:
        assert each["verdict"] is not None or each["status"] != "measured"
    for each in judged:
        plate = each["further_labels"]["plate"]
        for label in (each, plate):
            assert label["verdict"]["kind"] in {"inside", "outside", "assumptions"}
            own = [label["entropy_bits"][name]["value"] for name in ("measured", "expected")]
            assert any(f"{value:.3f}" in label["verdict"]["sentence"] for value in own)


def test_the_first_label_is_measured_within_the_other(tuned, counted):
    for sizes, each in by_sizes(tuned[1]).items():
        within = each["conditional_entropy_bits"]
        if each["status"] != "measured":  # or from too few minibatches to compare
            assert within["measured"] is None or each["status"] == "not enough samples"
            continue
        assert within["measured"]["value"] == pytest.approx(counted[sizes]["within"], abs=0.1)


def test_the_floor_holds_for_every_label(tuned, counted):
    random = {
        name: theory.random_entropy_bits(np.bincount(LABELS[name]), BATCH_SIZE)
        for name in ("line", "plate")
    }
    shares = {
        sizes: {name: entropies[name] / random[name] for name in random}
        for sizes, entropies in counted.items()
    }
    by_second_alone = [
        sizes for sizes, each in shares.items() if each["line"] > FLOOR > each["plate"]
    ]
    assert by_second_alone
    recommended = tuned[1]["recommended"]
    sizes = recommended["configuration"]
    chosen = shares[sizes["block_size"], sizes["fetch_factor"]]
    assert min(chosen.values()) > FLOOR
    said = re.search(r"with at least ([0-9.]+)% of random", recommended["reason"])
    assert said is not None
    assert float(said[1]) / 100 == pytest.approx(min(chosen.values()), abs=0.01)


def test_labels_are_named_where_they_are_used(tuned, said, page):
    result = tuned[1]
    assert "obs=['line', 'plate']" in said
    assert result["dataset"]["label"] == "line"
    assert result["dataset"]["further_labels"]["plate"]["n_labels"] == 3
    assert "line within drug: " in page


@pytest.mark.parametrize(
    ("names", "shuffled"),
    [(["drug"], True), (["plate"], False), (["drug", "plate"], False), (["drug", "drug"], True)],
)
def test_files_are_shuffled_only_if_they_are_by_every_label(names, shuffled):
    labels = [label_of(name, LABELS[name]) for name in names]
    plans = BlockPlans(N_CELLS, batch_size=BATCH_SIZE, seed=0)
    order = Mixing(labels, None, plans, entropy_floor=0.99).storage_order(256)
    assert order is not None
    assert order.already_shuffled == shuffled
    assert order.block_size == 256


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"label": []}, "at least one obs column"),
        ({"label": ["line", "plate"], "given": "plate"}, "beside the labels, but got 'plate'"),
    ],
)
def test_labels_that_make_no_sense_are_refused(file, settings, said):
    collection = open_collection(file, obs=list(LABELS))
    with pytest.raises(ParameterError, match=said):
        autotune(collection, **settings)


def test_there_is_nothing_to_mix_within_one_value(small_collection):
    collection = open_collection(small_collection, obs=["plate", "constant"])
    with pytest.raises(ColumnError, match="'constant' has 1 value"):
        autotune(collection, label="plate", given="constant")


def test_on_the_command_line_that_is_one_line(file, tmp_path):
    arguments = [file, "--label", "line", "--given", "line", "--output", tmp_path]
    printed = commands.autotune(*arguments)
    assert printed.exit_code == 2
    assert "`given` must be an obs column beside the labels" in printed.stderr
    assert printed.stderr.count("\n") == 1


def tuned_in_large_blocks(collection, label):
    return autotune(
        collection, label=label, batch_size=BATCH_SIZE, block_sizes=[32], fetch_factors=[2],
        workers=[0], budget=600.0, entropy_floor=0.0 if "plate" in label else 0.95,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(short_replicates, file):
    """A result for cells whose drugs are in random order, while lines and plates are not."""
    return tuned_in_large_blocks(open_collection(file, obs=["drug"]), "drug")


class TestOtherColumns:
    """What is trained on may be mixed less than the label that is named."""

    @pytest.mark.parametrize("name", ["line", "plate"])
    def test_entropy_is_that_of_its_minibatches(self, result, name):
        random = theory.random_entropy_bits(np.bincount(LABELS[name]), BATCH_SIZE)
        counted = np.mean(
            [
                bits(LABELS[name][rows].tolist())
                for epoch in range(N_EPOCHS)
                for rows in minibatches(32, 2, epoch)
            ]
        )
        assert result.mixed_less[name] == pytest.approx(counted / random, abs=0.02)

    def test_the_least_mixed_comes_first(self, result):
        assert list(result.mixed_less) == ["plate", "line"]
        assert max(result.mixed_less.values()) < 0.95

    def test_it_is_said_how_to_name_them(self, result, tmp_path):
        said = " ".join(in_words("mixed_less", result))
        assert said.startswith("Other obs columns are mixed less")
        assert said.endswith("name it too: `--label drug --label plate`.")
        result.save(tmp_path / "autotune.json")
        assert AutotuneResult.load(tmp_path / "autotune.json") == result

    def test_names_are_quoted_for_a_shell(self, result):
        result = replace(result, mixed_less={"cell [red]type": 0.5})
        (said,) = in_words("mixed_less", result)
        assert said.startswith("Another obs column is mixed less, with 50% of random sampling's")
        assert said.endswith("name it too: `--label drug --label 'cell [red]type'`.")
        assert said in said_of(result)

    def test_labels_are_none_of_them(self, file):
        result = tuned_in_large_blocks(open_collection(file, obs=list(LABELS)), list(LABELS))
        assert result.mixed_less == {}
        assert in_words("mixed_less", result) == []

    def test_numbers_count_if_they_were_opened(self, tmp_path):
        numbers = {"of_plate": LABELS["plate"], "of_cell": np.arange(N_CELLS) / 3}
        drug = pd.Categorical(LABELS["drug"].astype(str))
        obs = pd.DataFrame({"drug": drug, **numbers})
        obs.index = obs.index.astype(str)
        ad.AnnData(np.ones((N_CELLS, 5), np.float32), obs=obs).write_h5ad(tmp_path / "a.h5ad")
        for opened, found in ((["of_plate", "of_cell"], ["of_plate"]), ([], [])):
            collection = open_collection(tmp_path / "a.h5ad", obs=["drug", *opened])
            assert list(tuned_in_large_blocks(collection, "drug").mixed_less) == found
