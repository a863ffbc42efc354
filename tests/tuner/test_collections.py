"""`autotune` over collections: labels, rows, strategies, settings, steps and storages."""

import html
import json
import os
import re
import textwrap
from collections import Counter
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.sources.arriving import Arriving, Rows
from tests.loader.storages.tenx.written import barcodes, counts, features, write_tenx
from tests.tuner.measured_here import MeasuringProcess, measure_here
from tests.tuner.reports import in_words, said_of
from tests.tuner.simulated import Machine, autotune_on

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    ClassBalancedSampling,
    ColumnError,
    EpochPlan,
    FormatError,
    GroupedSampling,
    MatchedControls,
    ParameterError,
    Streaming,
    open_collection,
)
from cellfeed.sampling import ChunkStarts
from cellfeed.sources import Storage, register
from cellfeed.spatial import WithNeighbors, to_graph
from cellfeed.synthetic import write_tahoe_like
from cellfeed.tokenizers import BinnedValues, MaskTokens, MaskValues, RankTokens
from cellfeed_tuner import (
    AutotuneResult,
    Configuration,
    autotune,
    measure,
    minibatch_entropies,
    theory,
)

QUERY = "plate != 'p0' and cell_type in ['B', 'T']"
GRID: dict[str, Any] = {"block_sizes": [4, 16], "fetch_factors": [2], "workers": [0]}
SMALL: dict[str, Any] = GRID | {"budget": 600.0, "entropy_floor": 0.5}
N_CELLS, BATCH_SIZE, FLOOR = 3000, 16, 0.8
LABELS = {
    "line": np.arange(N_CELLS) // 10 % 4,
    "plate": np.repeat([0, 1, 2], N_CELLS // 3),
    "drug": np.random.default_rng(0).integers(0, 3, N_CELLS),
}


@pytest.fixture(scope="module", autouse=True)
def here():
    with pytest.MonkeyPatch.context() as patch:
        measure_here(patch)
        yield


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A file of cells whose drugs are in random order, while lines and plates are not."""
    path = tmp_path_factory.mktemp("labels") / "cells.h5ad"
    obs = pd.DataFrame({k: pd.Categorical([f"{k}{n}" for n in v]) for k, v in LABELS.items()})
    obs = obs.assign(of_plate=LABELS["plate"], of_cell=np.arange(N_CELLS) / 3)
    obs.index = obs.index.astype(str)
    ad.AnnData(np.ones((N_CELLS, 5), dtype=np.float32), obs=obs).write_h5ad(path)
    return path


def command(output, *arguments):
    """Run the command; its result, and what it printed, as if on one line."""
    ran = commands.autotune(*arguments, "--workers", "0", "--budget", "600", "--output", output)
    assert ran.exit_code == 0, ran.output
    return AutotuneResult.load(output / "autotune.json"), ran.stdout


def pretend(collection, **settings):
    """What is said of a collection that nobody reads: larger blocks and fetches are faster."""

    def cost(each):
        return 1e-5 + 1e-4 / (each.block_size * each.fetch_factor)

    machine = Machine(cost, len(collection), memory=lambda _: 10**8, overhead=0.1)
    return autotune_on(machine, collection, **SMALL | settings)


def reloaded(result, folder):
    result.save(folder / "autotune.json")
    return AutotuneResult.load(folder / "autotune.json")


def trained(collection, result, **settings):
    """The dataset that a result gives, and the rows of an epoch."""
    dataset = CellDataset.from_autotune(collection, result, seed=0, **settings)
    return dataset, np.concatenate([each.rows for each in dataset])


@pytest.mark.slow
class TestLabels:
    """Entropies of several labels, against what is counted by hand."""

    @pytest.fixture(scope="class")
    @classmethod
    def tuned(cls, labelled, tmp_path_factory):
        sizes = ["--block-sizes", "4,32", "--fetch-factors", "2,8", "--batch-size", BATCH_SIZE]
        labels = ["--label", "line", "--label", "plate"]
        output = tmp_path_factory.mktemp("tuned")
        return *command(output, labelled, *labels, *sizes, "--entropy-floor", FLOOR), output

    @pytest.fixture(scope="class")
    @classmethod
    def counted(cls, tuned):
        """Mean entropies of each configuration, of both labels."""

        def bits(values):
            return -sum(c / len(values) * log2(c / len(values)) for c in Counter(values).values())

        def of(block_size, fetch_factor):
            rows = list[Any]()
            for epoch in range(20):
                plan = EpochPlan(
                    strategy=BlockShuffling(block_size), n_rows=N_CELLS, batch_size=BATCH_SIZE,
                    fetch_factor=fetch_factor, epoch=epoch,
                )  # fmt: skip
                order = np.concatenate([plan.delivered_rows(i)[0] for i in range(plan.n_fetches)])
                rows += [*order[: order.size - order.size % BATCH_SIZE].reshape(-1, BATCH_SIZE)]
            return {
                name: np.mean([bits(LABELS[name][each].tolist()) for each in rows])
                for name in ("line", "plate")
            }

        return {
            each.configuration: of(*each.configuration.plan_settings)
            for each in tuned[0].configurations
        }

    def test_entropies_are_those_of_the_minibatches(self, tuned, counted):
        for each in tuned[0].configurations:
            assert list(each.labels) == ["line", "plate"]
            for name, label in each.labels.items():
                expected = label.entropy_bits.expected
                assert expected.value == pytest.approx(counted[each.configuration][name], abs=0.01)
                assert expected.low <= expected.value <= expected.high

    def test_each_label_is_judged_where_it_was_measured(self, tuned):
        measured = [each for each in tuned[0].configurations if each.cells_per_second]
        assert measured
        for each in measured:
            for label in each.labels.values():
                assert label.verdict.kind in {"inside", "outside"}
                own = label.entropy_bits
                values = own.measured.value, own.expected.value
                assert any(f"{value:.3f}" in label.verdict.sentence for value in values)

    def test_the_floor_holds_for_every_label(self, tuned, counted):
        random = {
            name: theory.random_entropy_bits(np.bincount(LABELS[name]), BATCH_SIZE)
            for name in ("line", "plate")
        }
        shares = {each: {k: of[k] / random[k] for k in random} for each, of in counted.items()}
        assert any(each["line"] > FLOOR > each["plate"] for each in shares.values())
        result, printed, _ = tuned
        least = min(shares[result.recommended.configuration].values())
        assert least > FLOOR
        said = re.search(r"at least ([0-9.]+)% of random", printed)
        assert said is not None
        assert float(said[1]) / 100 == pytest.approx(least, abs=0.01)

    def test_labels_are_named_where_they_are_used(self, tuned):
        result, printed, output = tuned
        assert "obs=['line', 'plate']" in printed
        assert list(result.dataset.labels) == ["line", "plate"]
        assert result.dataset.labels["plate"].n_labels == 3
        page = html.unescape((output / "autotune.html").read_text(encoding="utf-8"))
        for name in ("line", "plate"):
            assert f"entropy of {name} / random" in " ".join(page.split())


class TestOtherColumns:
    """What is trained on may be mixed less than the label that is named."""

    def tuned(self, labelled, labels, opened):
        collection = open_collection(labelled, obs=opened)
        sizes = {"batch_size": BATCH_SIZE, "block_sizes": [32], "entropy_floor": 0.95}
        if "plate" in labels:
            sizes["entropy_floor"] = 0.0
        return pretend(collection, label=labels, **sizes)

    def test_the_least_mixed_comes_first_with_the_share_of_its_minibatches(self, labelled):
        result = self.tuned(labelled, ["drug"], ["drug"])
        assert list(result.mixed_less) == ["plate", "line"]
        for name, found in result.mixed_less.items():
            sizes: dict[str, Any] = {"batch_size": BATCH_SIZE, "fetch_factor": 2}
            plans = [
                EpochPlan(strategy=BlockShuffling(32), n_rows=N_CELLS, epoch=epoch, **sizes)
                for epoch in range(20)
            ]
            bits = np.mean([minibatch_entropies(LABELS[name], plan).mean() for plan in plans])
            random = theory.random_entropy_bits(np.bincount(LABELS[name]), BATCH_SIZE)
            assert found == pytest.approx(bits / random, abs=0.03)
        said = " ".join(in_words("mixed_less", result))
        assert said.startswith("Mixed less: plate (")
        assert said.endswith("add `--label plate`.")
        result = replace(result, mixed_less={"cell [red]type": 0.5})  # quoted for a shell
        (said,) = in_words("mixed_less", result)
        assert said == (
            "Mixed less: cell [red]type (50.0%). If you train on it, "
            "add `--label 'cell [red]type'`."
        )
        assert said in said_of(result)

    @pytest.mark.parametrize(
        ("opened", "less"),
        [(["of_plate", "of_cell"], {"of_plate", "plate", "line"}), (list(LABELS), set())],
    )
    def test_numbers_count_if_they_were_opened_and_labels_do_not(self, labelled, opened, less):
        labels = ["drug"] if less else list(LABELS)
        result = self.tuned(labelled, labels, [*dict.fromkeys([*labels, *opened])])
        assert set(result.mixed_less) == less
        assert bool(in_words("mixed_less", result)) == bool(less)


@pytest.mark.slow
def test_dense_minibatches_are_timed_compared_and_pasted(small_collection, tmp_path):
    sizes = ["--block-sizes", "4,16", "--fetch-factors", "2", "--entropy-floor", "0.5"]
    result, printed = command(tmp_path, small_collection, "--label", "plate", "--dense", *sizes)
    assert result.dataset.dense
    assert result.n_cells_compared
    assert result.bottleneck is None or "densifying" in result.bottleneck.seconds
    assert "autotune.json', dense=True, seed=0)" in " ".join(printed.split())


@pytest.mark.slow
class TestRowsOfAStrategy:
    """Classes are balanced among the rows that a query selects."""

    @pytest.fixture(scope="class")
    @classmethod
    def ran(cls, small_collection, tmp_path_factory):
        settings = ["--where", QUERY, "--balance", "cell_type", "--entropy-floor", "0.5"]
        sizes = ["--block-sizes", "4,16", "--fetch-factors", "2"]
        output = tmp_path_factory.mktemp("balanced")
        return *command(output, small_collection, "--label", "plate", *settings, *sizes), output

    @pytest.fixture
    def rows(self, collection):
        return collection.where(QUERY)

    @pytest.mark.smoke
    def test_the_result_is_of_these_rows(self, ran, rows, collection):
        result, _, output = ran
        assert result.loader_fault is None
        assert result.n_cells_compared > 0
        dataset = result.dataset
        assert dataset.n_cells == len(collection)
        assert dataset.selection.n_cells == dataset.n_visited == rows.size
        assert dataset.selection.where == QUERY
        census = dataset.labels["plate"]
        assert (census.n_labels, census.label_entropy_bits) == (2, 1.0)
        measured = [e.labels["plate"].entropy_bits.measured for e in result.configurations]
        bits = [each.value for each in measured if each is not None]
        assert bits
        assert max(bits) <= 1  # two plates; of all three it would be above
        page = (output / "autotune.html").read_text()
        assert f"{rows.size:,} cells where plate" in page
        assert "ClassBalancedSampling" in page

    def test_the_code_trains_on_them(self, ran, rows):
        code = ran[1].split("To train with it:")[1].split("Wrote")[0]
        scope: dict[str, Any] = {}
        exec(textwrap.dedent(code), scope)
        dataset = scope["dataset"]
        assert type(dataset.strategy) is ClassBalancedSampling
        assert dataset.strategy.block_size == ran[0].recommended.configuration.block_size
        assert np.array_equal(np.asarray(dataset.strategy.indices), rows)

    def test_training_has_that_strategy(self, ran, collection, rows):
        dataset, seen = trained(collection, ran[0], indices=rows)
        assert type(dataset.strategy) is ClassBalancedSampling
        counts = np.bincount(collection.obs["cell_type"].codes[seen])
        assert max(counts[[0, 2]]) - min(counts[[0, 2]]) <= 2
        assert np.isin(seen, rows).all()
        with pytest.warns(UserWarning, match="ClassBalancedSampling, but it is Streaming here"):
            trained(collection, ran[0], strategy=Streaming())

    @pytest.mark.parametrize(
        ("strategy", "error", "said"),
        [
            (("ClassBalancedSampling", {"colour": 1}), FormatError, "in it is damaged"),
            ({"name": "ClassBalancedSampling"}, FormatError, "not a result of autotune"),
            ("ClassBalancedSampling", FormatError, "not a result of autotune"),
            (("Mine", {}), ParameterError, r"give strategy=Mine\(\.\.\., block_size="),
        ],
    )
    def test_a_garbled_or_unknown_strategy(self, ran, collection, tmp_path, strategy, error, said):
        if isinstance(strategy, tuple):
            strategy = {"name": strategy[0], "parameters": strategy[1], "arrays": []}
        path = tmp_path / "autotune.json"
        path.write_text(json.dumps(ran[0].to_json() | {"strategy": strategy}))
        with pytest.raises(error, match=said):
            CellDataset.from_autotune(collection, path, seed=0)


def test_rows_alone_are_visited_in_shuffled_blocks(collection, tmp_path):
    rows = collection.where(QUERY)
    result = pretend(collection, label="plate", indices=rows)
    assert result.dataset.selection.where == ""
    assert result.dataset.selection.n_cells == rows.size
    assert reloaded(result, tmp_path).dataset.selection == result.dataset.selection
    assert np.array_equal(np.sort(trained(collection, result, indices=rows)[1]), rows)
    trained(collection, result)  # without a warning


@pytest.mark.slow
def test_a_total_size_is_part_of_the_strategy(collection, tmp_path):
    strategy = ClassBalancedSampling("cell_type", total_size=3_000)
    result = pretend(collection, label="cell_type", strategy=strategy)
    assert result.strategy.name == "ClassBalancedSampling"
    assert result.strategy.parameters == {"labels": "cell_type", "total_size": 3_000}
    again = reloaded(result, tmp_path)
    assert again.strategy == result.strategy
    assert trained(collection, again)[0].strategy.total_size == 3_000
    expected = theory.random_entropy_bits([1000] * 3, 64)
    random = result.chosen.labels["cell_type"].entropy_bits.random
    assert random == pytest.approx(expected, abs=1e-3)


@pytest.mark.slow
def test_sets_have_a_result_without_theory_and_advice(collection):
    strategy = GroupedSampling(("plate", "cell_type"), set_size=8)
    result = pretend(collection, label="plate", strategy=strategy)
    assert result.storage_order is None
    assert {each.configuration.block_size for each in result.configurations} == {4}
    assert result.chosen.labels["plate"].entropy_bits.homogeneous is None
    assert result.chosen.verdicts == []
    found = trained(collection, result)[0].strategy
    assert (type(found), found.set_size, found.block_size) == (GroupedSampling, 8, 4)


@pytest.mark.slow
def test_arrays_are_not_held(collection):
    strategy = BlockWeightedSampling(weights=np.ones(len(collection)))
    result = pretend(collection, label="plate", strategy=strategy)
    size = result.recommended.configuration.block_size
    assert result.strategy.arrays == ("weights",)
    assert result.strategy.in_python(16, "rows") == (
        "BlockWeightedSampling(weights=weights, block_size=16, indices=rows)"
    )
    with pytest.raises(
        ParameterError, match=rf"does not contain the weights of it; .*block_size={size}\)$"
    ):
        trained(collection, result)
    trained(collection, result, strategy=replace(strategy, block_size=size))


@pytest.mark.slow
def test_a_configuration_that_never_fills_a_round_fails(collection):
    # `drop_last` leaves out less than a block; where that leaves no whole fetch, it is said.
    sizes = {"block_sizes": [4, 2500], "fetch_factors": [2, 60]}
    strategy = BlockShuffling(drop_last=True)
    result = autotune(collection, label="plate", strategy=strategy, **SMALL | sizes)
    by = {each.configuration: each for each in result.configurations}
    assert result.recommended is not None
    assert by[Configuration(block_size=2500, fetch_factor=60)].cells_per_second is None


class TestAlignedBlocks:
    @pytest.fixture(scope="class")
    @classmethod
    def tuned(cls, small_collection, tmp_path_factory):
        sizes = ["--block-sizes", 16, "--fetch-factors", 4, "--batch-size", 32]
        settings = ["--num-threads", "1,2", "--align", "--entropy-floor", 0]
        output = tmp_path_factory.mktemp("aligned")
        return command(output, small_collection, "--label", "plate", *sizes, *settings)

    @pytest.mark.slow
    def test_each_is_a_configuration_with_the_entropy_of_its_plan(self, tuned, collection):
        result, printed = tuned
        assert "num threads" in printed
        assert result.loader_fault is None
        assert {tuple(each.configuration.others.items()) for each in result.configurations} == {
            (("align", align), ("num_threads", threads))
            for align in (None, "chunks")
            for threads in (1, 2)
        }
        for each in result.configurations:
            strategy = BlockShuffling(16, align=each.configuration["align"]).bound_to(collection)
            plan = EpochPlan(
                strategy=strategy, n_rows=len(collection), batch_size=32, fetch_factor=4
            )
            bits = minibatch_entropies(collection.obs["plate"].values, plan).mean()
            plate = each.labels["plate"]
            assert plate.entropy_bits.expected.value == pytest.approx(bits, abs=0.05)
            if each.status in {"timed", "compared"}:
                assert plate.verdict.kind in {"inside", "outside"}

    @pytest.mark.slow
    def test_training_takes_them(self, tuned, collection):
        dataset, seen = trained(collection, tuned[0])
        chosen = tuned[0].recommended.configuration
        assert dataset.read_options.num_threads == chosen["num_threads"]
        is_aligned = getattr(dataset.strategy, "align", None) is not None
        assert is_aligned == (chosen["align"] == "chunks")
        assert np.array_equal(np.sort(seen), np.arange(len(collection)))

    def test_a_strategy_may_have_them(self, collection):
        given = BlockShuffling(16, align="chunks")
        result = pretend(
            collection, label="plate", strategy=given, block_sizes=[16], entropy_floor=0.1
        )
        assert result.strategy.in_python(16) == "BlockShuffling(align='chunks', block_size=16)"
        sizes = given.bound_to(collection).block_sizes(len(collection))
        counts = np.bincount(collection.obs["plate"].codes).tolist()
        found = theory.lower_bound_bits(counts, 64, sizes.effective)
        (label,) = result.chosen.labels.values()
        assert label.entropy_bits.lower_bound == pytest.approx(found)
        dataset, seen = trained(collection, result)
        assert isinstance(dataset.strategy.align, ChunkStarts)
        assert np.array_equal(np.sort(seen), np.arange(len(collection)))

    def test_they_are_measured_alone(self, collection):
        settings = Configuration(block_size=16, fetch_factor=4, align="chunks", num_threads=1)
        found = measure(collection, settings, batch_size=32, label="plate", seconds=0.01)
        assert (found.delivery_fault, found.num_threads) == ("", 1)


class TestSteps:
    """A step of training has what the loader delivers, and so has what follows the advice."""

    @pytest.fixture(scope="class")
    @classmethod
    def tahoe(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("plates")
        write_tahoe_like(folder, n_cells=1500, n_genes=60, n_plates=2)
        return open_collection(folder, obs=["plate", "drug"])

    @staticmethod
    def made_with(tahoe, padding):
        names = ["<pad>", "<cls>", "<eos>", "<mask>", *tahoe.var_names]
        ranks = RankTokens(names, max_length=32, padding=padding, masking=MaskTokens())
        return partial(CellDataset, transform=ranks)

    @pytest.mark.parametrize("padding", ["max_length", None, "values"])
    def test_tokens_are_measured(self, tahoe, padding):
        make_dataset = self.made_with(tahoe, padding if padding != "values" else None)
        if padding == "values":
            names = ["<pad>", "<cls>", *tahoe.var_names]
            bins = BinnedValues(names, max_length=20, masking=MaskValues())
            make_dataset = partial(CellDataset, transform=bins)
        found = measure(
            tahoe, Configuration(block_size=4, fetch_factor=2), label="plate", seconds=0.01,
            make_dataset=make_dataset,
        )  # fmt: skip
        assert (found.status, found.delivery_fault) == ("timed", "")

    @pytest.mark.slow
    def test_pairs_of_tokens(self, tahoe):
        """Speed and memory include the controls, entropy is that of the treated cells."""

        def step(minibatch):
            assert len(minibatch.controls) == 2 * len(minibatch)
            for each in (minibatch, minibatch.controls):
                assert each["labels"].shape == each["tokens"].shape

        strategy = MatchedControls(BlockShuffling(4), "drug", "drug_001", ["plate"], k=2)
        options = SMALL | {"batch_size": 16, "strategy": strategy, "step": step}
        make_dataset = self.made_with(tahoe, "longest")
        result: Any = autotune(tahoe, label="plate", make_dataset=make_dataset, **options)
        assert result.loader_fault is None
        assert {each.configuration.block_size for each in result.configurations} == {4, 16}
        (label,) = result.chosen.labels.values()
        assert label.entropy_bits.homogeneous is not None
        assert (result.strategy.name, result.strategy.arrays) == ("MatchedControls", ("strategy",))
        assert "indices" not in result.strategy.in_python(16, "train")  # they are the inner one's
        with pytest.raises(
            ParameterError, match=r"give strategy=MatchedControls\(\.\.\., block_size="
        ):
            CellDataset.from_autotune(tahoe, result)
        tuned = replace(strategy, block_size=result.recommended.configuration.block_size)
        dataset = CellDataset.from_autotune(tahoe, result, strategy=tuned, seed=0)
        assert len(next(iter(dataset)).controls) == 2 * 16

    @pytest.mark.slow
    def test_neighbours(self, collection):
        def step(minibatch):
            graph = to_graph(minibatch)
            assert graph.edge_index.shape[1] > graph.n_seeds
            return float(graph.nodes.X.sum())

        near = np.arange(len(collection))[:, None] + np.array([-1, 1])
        near[0, 0] = near[-1, 1] = -1
        strategy: Any = WithNeighbors(BlockShuffling(4), near)
        result: Any = autotune(collection, label="plate", strategy=strategy, step=step, **SMALL)
        assert result.loader_fault is None
        tuned = replace(strategy, block_size=result.recommended.configuration.block_size)
        dataset = CellDataset.from_autotune(collection, result, strategy=tuned, seed=0)
        assert step(next(iter(dataset))) > 0
        graphs = partial(CellDataset, batch_transform=to_graph)
        with pytest.raises(ParameterError, match=r"delivers Graph.*call it in `step`"):
            autotune(
                collection, label="plate", strategy=strategy, make_dataset=graphs, step=len, **SMALL
            )  # fmt: skip


def open_cells(location, elements):
    counts = np.random.default_rng(0).poisson(0.3, (2000, 30)).astype(np.float32)
    obs = pd.DataFrame({"plate": np.repeat(["a", "b", "c", "d"], 500)})
    return [Arriving(location, {"X": Rows(sp.csr_array(counts), range(30))}, obs)]


@pytest.mark.process
def test_a_storage_that_is_registered(tmp_path, monkeypatch):
    """A whole run of the command: cells at a URL, of which there is no file on this machine."""
    # So that the measuring process finds the source, as it does one that is installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr("cellfeed_tuner._measuring._process.MeasuringProcess", MeasuringProcess)
    register(Storage(name="tuned", open=open_cells, schemes=("test-tuned",)))
    url = "test-tuned://host/cells"
    sizes = ["--block-sizes", "4,16", "--fetch-factors", "2", "--entropy-floor", "0.5"]
    result, printed = command(tmp_path, url, "--label", "plate", *sizes)
    assert f"open_collection('{url}', obs=['plate'])" in printed
    assert result.dataset.paths == (url,)
    assert (result.machine.storage, result.cache) == ((), "unknown")
    assert result.recommended is not None


def test_the_output_of_cell_ranger(tmp_path):
    for k, library in enumerate(["control", "treated"]):
        write_tenx(
            tmp_path / f"{library}.h5", counts(900, 60, k), barcodes=barcodes(900),
            features=features(60), libraries=[library],
        )  # fmt: skip
    collection = open_collection(sorted(tmp_path.glob("*.h5")), obs=["library"])
    configuration = Configuration(block_size=4, fetch_factor=2)
    found = measure(collection, configuration, label="library", seconds=0.01)
    assert (found.status, found.delivery_fault) == ("timed", "")
    assert pretend(collection, label="library").dataset.paths == tuple(
        str(tmp_path / f"{library}.h5") for library in ("control", "treated")
    )


FEW = [*range(10), *range(4000, 4005)]


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"label": []}, ParameterError, "at least one obs column"),
        ({"label": ["plate", "constant"]}, ColumnError, "'constant' has 1 value"),
        ({"num_threads": [0]}, ParameterError, "`num_threads >= 1` must hold"),
        ({"align": ["rows"]}, ParameterError, '`align` must be "chunks" or None'),
        (
            {"align": ["chunks"], "strategy": BlockShuffling(4)},
            ParameterError,
            "`align` is of shuffled blocks",
        ),
        (
            {"indices": "plate == 'p7'"},
            ParameterError,
            "^no cell matches the query \"plate == 'p7'",
        ),
        ({"indices": "tissue == 'lung'"}, ColumnError, "obs has no column 'tissue'"),
        ({"indices": "plate.str"}, ParameterError, "'plate.str' is not allowed"),
        ({"indices": [10**9]}, ParameterError, "^`indices < .* must hold"),
        ({"indices": FEW}, ParameterError, "^the selection has 15 cells, but even the smallest"),
        ({"indices": "plate == 'p1'"}, ColumnError, r"'plate' has 1 value\(s\)"),
        (
            {"indices": [1], "strategy": Streaming(indices=[1, 2])},
            ParameterError,
            "rows of its own do not go together",
        ),
        (
            {"strategy": GroupedSampling("plate", set_size=7)} | GRID,
            ParameterError,
            "a block size must divide the sets of 7",
        ),
        ({"strategy": GroupedSampling("plate", set_size=48)}, ParameterError, "multiple of"),
        (
            {"strategy": BlockWeightedSampling(weights=[1.0, 2.0])},
            ParameterError,
            "`weights` must have one value for each",
        ),
        pytest.param(
            {"strategy": ClassBalancedSampling("plate", total_size=70)} | GRID,
            ParameterError,
            "the epoch of ClassBalancedSampling has 70 cells",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(small_collection, settings, error, said):
    collection = open_collection(small_collection, obs=["plate", "cell_type", "constant"])
    with pytest.raises(error, match=said):
        autotune(collection, **{"label": "plate"} | settings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--where", "plate.values"], "'plate.values' is not allowed"),
    ],
)
def test_on_the_command_line_that_is_one_line(small_collection, tmp_path, options, said):
    ran = commands.autotune(small_collection, "--label", "plate", "--output", tmp_path, *options)
    assert ran.exit_code == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1
