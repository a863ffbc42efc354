"""Searching other strategies than shuffled blocks."""

import json
import textwrap
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from tests import commands
from tests.tuner.mixing import BlockPlans, Mixing, Selected, label_of

from cellfeed import (
    BlockShuffling,
    BlockWeightedSampling,
    CellDataset,
    ClassBalancedSampling,
    EpochPlan,
    FormatError,
    GroupedSampling,
    MatchedControls,
    ParameterError,
    SamplingStrategy,
    Streaming,
    open_collection,
)
from cellfeed.spatial import WithNeighbors, to_graph
from cellfeed_tuner import (
    AutotuneResult,
    Configuration,
    autotune,
    label_entropy,
    strategy_entropy,
    theory,
)
from cellfeed_tuner._measuring._timing import DatasetSession
from cellfeed_tuner._recall import data_fingerprint
from cellfeed_tuner._results import SearchedStrategy
from cellfeed_tuner._subject import label_codes

pytestmark = pytest.mark.usefixtures("short_replicates")

TYPES = np.repeat([0, 1, 2], [40_000, 4_000, 400])
PLATES = np.tile(np.repeat([0, 1, 2, 3], 100), 111)
SIZES = [(16, 1), (16, 64), (64, 4)]
SMALL: dict[str, Any] = {
    "block_sizes": [4, 16],
    "fetch_factors": [2, 4],
    "workers": [0],
    "budget": 15.0,
    "entropy_floor": 0.5,
}


def mixing_of(
    strategy: SamplingStrategy, *, labels: dict[str, Any], given: Any = None
) -> tuple[Mixing, Selected]:
    """Replay a strategy over labels of a collection that nobody reads."""
    selected = Selected(range(TYPES.size), strategy=strategy)  # type: ignore[arg-type]
    rows = selected.drawn_rows()
    made = [
        label_of(name, codes, drawn=rows)
        for name, codes in (labels | ({} if given is None else {"given": given})).items()
    ]
    within = made.pop() if given is not None else None
    plans = BlockPlans(TYPES.size, batch_size=64, seed=0, selected=selected, drawn_rows=rows)
    return Mixing(made, within, plans, entropy_floor=0.99), selected


@pytest.mark.parametrize(
    "strategy",
    [
        ClassBalancedSampling(TYPES),
        BlockWeightedSampling(weights=np.array([1.0, 5.0, 50.0])[TYPES]),
        BlockWeightedSampling(weights=np.array([1.0, 5.0, 50.0])[TYPES], total_size=20_000),
        ClassBalancedSampling(TYPES, total_size=900, replace=False),
        BlockShuffling(drop_last=True),
    ],
)
def test_blocks_are_held_against_what_the_strategy_draws(strategy):
    mixing, selected = mixing_of(strategy, labels={"type": TYPES})
    for block_size, fetch_factor in SIZES:
        plan = EpochPlan(
            strategy=replace(strategy, block_size=block_size),
            n_rows=TYPES.size,
            batch_size=64,
            fetch_factor=fetch_factor,
        )
        expected = strategy_entropy(TYPES, plan)
        found = mixing[block_size, fetch_factor]["type"]
        assert found.expected.value == pytest.approx(expected.bits.value, abs=0.02)
        # Draws of an epoch are dealt out, so that a short one gives a little more than endless.
        assert found.random == pytest.approx(expected.random_bits, abs=0.02)
        assert found.homogeneous == pytest.approx(expected.homogeneous_bits, abs=0.02)
    assert selected.n_drawn == strategy.n_positions(TYPES.size)


def test_the_plan_that_is_replayed_is_the_one_that_is_read():
    strategy = ClassBalancedSampling(TYPES, 4, total_size=10_000)
    mixing, _ = mixing_of(strategy, labels={"type": TYPES, "plate": PLATES}, given=PLATES)
    (shuffled,) = label_entropy(TYPES, batch_size=64, block_sizes=[16], fetch_factors=[4])
    found = mixing[16, 4]
    assert found["type"].expected.value > shuffled.bits.value + 0.5
    assert found["plate"].share_of_random > 0.8


def test_balanced_classes_are_held_against_equal_ones():
    found = mixing_of(ClassBalancedSampling(TYPES), labels={"type": TYPES})[0][1, 64]["type"]
    assert found.random == pytest.approx(theory.independent_entropy_bits([1, 1, 1], 64), abs=1e-3)
    assert found.share_of_random > 0.99
    low, high = found.bounds
    assert found.expected.low <= high  # beyond chance
    assert found.expected.high >= low


def test_small_collections_are_held_against_many_epochs(tmp_path):
    rng = np.random.default_rng(0)
    plates = np.repeat([0, 1], [360, 40])
    donors = rng.choice(4, 400, p=[0.9, 0.05, 0.03, 0.02])
    path = tmp_path / "small.h5ad"
    obs = pd.DataFrame({"donor": donors}, [str(k) for k in range(400)])
    ad.AnnData(np.zeros((400, 1), np.float32), obs=obs).write_h5ad(path)
    collection = open_collection(path, obs=["donor"])
    selected = Selected.of(collection, strategy=ClassBalancedSampling(plates))
    label = selected.label("donor", selected.drawn_rows())
    weights = np.bincount(donors, 1 / np.bincount(plates)[plates])
    shares = np.sort(label.target.counts / label.target.n_rows)
    assert shares == pytest.approx(np.sort(weights / weights.sum()), abs=0.002)
    assert label.n_per_epoch == 400


def test_missing_labels_are_held_against_as_many_known_ones():
    labels = np.where(np.random.default_rng(0).random(TYPES.size) < 0.9, -1, TYPES)
    strategy = BlockWeightedSampling(weights=np.array([1.0, 10.0, 100.0])[TYPES])
    found = mixing_of(strategy, labels={"type": labels})[0][1, 64]["type"]
    assert found.random_of_known is not None
    assert found.share_of_random == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("n_missing", [0, 9_000])
def test_sets_are_held_against_random_sets(n_missing):
    groups = TYPES * 4 + PLATES
    plates = PLATES.copy()
    plates[:n_missing] = -1
    strategy = GroupedSampling(groups, set_size=16, weights="equal")
    mixing, _ = mixing_of(strategy, labels={"group": groups, "plate": plates}, given=TYPES)
    for block_size, fetch_factor in product([1, 16], [1, 16]):
        found = mixing[block_size, fetch_factor]
        # A minibatch has four sets, and so at most four groups.
        assert found["group"].random < 2
        assert found["group"].share_of_random == pytest.approx(1, abs=0.01)
        assert found["group"].homogeneous is None
    assert mixing.storage_order(16) is None


def test_streaming_has_no_blocks_to_choose():
    mixing, selected = mixing_of(Streaming(), labels={"type": TYPES})
    assert selected.block_sizes([4, 16]) == (1,)
    assert mixing[1, 64]["type"].share_of_random < 0.1
    assert mixing[1, 64]["type"].homogeneous is None


@pytest.mark.parametrize(
    ("asked", "found"), [([4, 16, 64], [4, 16]), (range(1, 65), [1, 2, 4, 8, 16])]
)
def test_blocks_divide_sets(asked, found):
    selected = mixing_of(GroupedSampling(TYPES, set_size=16), labels={"type": TYPES})[1]
    assert list(selected.block_sizes(asked)) == found
    with pytest.raises(ParameterError, match=r"divide the sets of 16 cells.* \[1, 2, 4, 8, 16\]"):
        selected.block_sizes([3, 64])


@pytest.fixture(scope="module")
def collection(small_collection):
    return open_collection(small_collection, obs=["plate", "cell_type"])


@pytest.fixture(scope="module")
def rows(collection):
    """Rows of which one cell type has a few only."""
    rare = collection.where("cell_type == 'NK'")[::5]
    return np.sort(np.concatenate([rare, collection.where("cell_type != 'NK'")]))


@pytest.fixture(scope="module")
def balanced(short_replicates, collection, rows):
    strategy = ClassBalancedSampling("cell_type", total_size=4_000)
    return autotune(collection, label="cell_type", strategy=strategy, indices=rows, **SMALL)


class TestResult:
    def test_what_was_drawn_is_what_the_plan_says(self, balanced):
        assert balanced.loader_fault is None
        assert balanced.n_cells_compared > 0
        chosen = balanced.chosen
        assert chosen.entropy_bits.random == pytest.approx(
            theory.random_entropy_bits([1333, 1333, 1334], 64), abs=1e-3
        )
        assert chosen.entropy_bits.measured.value > 1.4

    def test_the_dataset_is_described_as_it_lies(self, balanced, rows):
        assert balanced.dataset.selection.n_cells == rows.size
        assert sorted(balanced.dataset.label_counts) == [300, 1500, 1500]

    def test_it_names_the_strategy(self, balanced, tmp_path):
        expected = SearchedStrategy(
            name="ClassBalancedSampling", parameters={"labels": "cell_type", "total_size": 4_000}
        )
        assert balanced.strategy == expected
        balanced.save(tmp_path / "autotune.json")
        assert AutotuneResult.load(tmp_path / "autotune.json").strategy == expected
        plain = json.loads((tmp_path / "autotune.json").read_text())["strategy"]
        assert plain["parameters"]["labels"] == "cell_type"

    def test_training_has_that_strategy(self, balanced, collection, rows):
        dataset = CellDataset.from_autotune(collection, balanced, indices=rows, seed=0)
        expected = ClassBalancedSampling(
            "cell_type",
            balanced.recommended.configuration.block_size,
            indices=rows,
            total_size=4_000,
        ).bound_to(collection)
        found = dataset.strategy
        assert type(found) is ClassBalancedSampling
        assert (found.block_size, found.total_size) == (expected.block_size, expected.total_size)
        assert np.array_equal(found.labels, expected.labels)
        seen = np.concatenate([each.rows for each in dataset])
        counts = np.bincount(label_codes(collection, "cell_type")[seen])
        assert counts.max() - counts.min() <= 2
        assert np.isin(seen, rows).all()

    def test_another_strategy_is_taken_with_a_warning(self, balanced, collection):
        with pytest.warns(UserWarning, match="ClassBalancedSampling, but it is Streaming here"):
            CellDataset.from_autotune(collection, balanced, strategy=Streaming(), seed=0)

    def test_without_theory_and_advice_there_is_a_result(self, collection):
        strategy = GroupedSampling(("plate", "cell_type"), set_size=8)
        result = autotune(collection, label="plate", given="cell_type", strategy=strategy, **SMALL)
        assert result.loader_fault is None
        assert result.storage_order is None
        assert {each.configuration.block_size for each in result.configurations} == {4}
        assert result.chosen is not None
        assert result.chosen.entropy_bits.homogeneous is None
        assert result.chosen.verdict is None
        dataset = CellDataset.from_autotune(collection, result, seed=0)
        assert isinstance(dataset.strategy, GroupedSampling)
        assert (dataset.strategy.set_size, dataset.strategy.block_size) == (8, 4)

    def test_arrays_are_not_held(self, collection):
        weights = np.ones(len(collection))
        strategy = BlockWeightedSampling(weights=weights)
        result = autotune(collection, label="plate", strategy=strategy, **SMALL)
        assert result.strategy == SearchedStrategy(
            name="BlockWeightedSampling", arrays=("weights",)
        )
        assert result.recommended is not None
        size = result.recommended.configuration.block_size
        with pytest.raises(
            ParameterError, match=rf"does not contain the weights of it; .*block_size={size}\)$"
        ):
            CellDataset.from_autotune(collection, result, seed=0)
        strategy = replace(strategy, block_size=size)
        CellDataset.from_autotune(collection, result, strategy=strategy, seed=0)


class TestHistory:
    def test_another_strategy_is_another_dataset(self, collection):
        codes = label_codes(collection, "plate")
        weights = np.ones(len(collection))
        strategies = [
            None,
            BlockShuffling(drop_last=True),
            Streaming(),
            ClassBalancedSampling("cell_type"),
            ClassBalancedSampling("cell_type", total_size=99),
            ClassBalancedSampling("plate"),
            BlockWeightedSampling(weights=weights),
            BlockWeightedSampling(weights=weights * codes),
        ]
        found = [Selected.of(collection, None, each).strategy for each in strategies]
        digests = {data_fingerprint(collection, codes, None, each).digest for each in found}
        assert len(digests) == len(strategies)

    def test_the_same_one_is_the_same_whatever_its_block_size(self, collection):
        codes = label_codes(collection, "plate")
        first, second = (
            data_fingerprint(
                collection,
                codes,
                None,
                Selected.of(collection, None, ClassBalancedSampling("cell_type", size)).strategy,
            )
            for size in (4, 16)
        )
        assert first == second


class TestMistakes:
    @pytest.mark.parametrize(
        ("strategy", "more", "said"),
        [
            (Streaming(indices=[1, 2]), {"indices": [1]}, "rows of its own do not go together"),
            (GroupedSampling("plate", set_size=7), {}, "a block size must divide the sets of 7"),
            (GroupedSampling("plate", set_size=48), {}, "multiple of"),
            (
                BlockWeightedSampling(weights=[1.0, 2.0]),
                {},
                "`weights` must have one value for each",
            ),
            (
                ClassBalancedSampling("plate", total_size=70),
                {},
                "the epoch of ClassBalancedSampling has 70 cells",
            ),
        ],
    )
    def test_they_are_refused_before_anything_is_measured(self, collection, strategy, more, said):
        with pytest.raises(ParameterError, match=said):
            autotune(collection, label="plate", strategy=strategy, **SMALL, **more)

    def test_a_garbled_strategy(self, collection, balanced, tmp_path):
        plain = balanced.to_json()
        kept = {"name": "ClassBalancedSampling", "parameters": {"colour": 1}, "arrays": []}
        for strategy, said in (
            (kept, "in it is damaged"),
            ({"name": "ClassBalancedSampling"}, "not a result of autotune"),
            ("ClassBalancedSampling", "not a result of autotune"),
        ):
            path = tmp_path / "autotune.json"
            path.write_text(json.dumps(plain | {"strategy": strategy}))
            with pytest.raises(FormatError, match=said):
                CellDataset.from_autotune(collection, path, seed=0)

    def test_a_strategy_of_the_users_own_has_to_be_given(self, collection, balanced, tmp_path):
        path = tmp_path / "autotune.json"
        strategy = {"name": "Mine", "parameters": {}, "arrays": []}
        path.write_text(json.dumps(balanced.to_json() | {"strategy": strategy}))
        with pytest.raises(ParameterError, match=r"give strategy=Mine\(\.\.\., block_size="):
            CellDataset.from_autotune(collection, path, seed=0)


class TestCommand:
    def test_it_balances_classes_and_its_code_does(self, small_collection, rows, tmp_path):
        settings = ["--where", "cell_type != 'T'", "--entropy-floor", "0.5", "--output", tmp_path]
        grid = ["--block-sizes", "4", "--fetch-factors", "2", "--workers", "0", "--budget", "600"]
        command = [small_collection, "--label", "plate", "--balance", "cell_type"]
        printed = commands.autotune(*command, *settings, *grid)
        assert printed.exit_code == 0, printed.output
        assert "ClassBalancedSampling" in (tmp_path / "autotune.html").read_text()
        code = printed.stdout.split("To train with it:")[1].split("Wrote")[0]
        scope: dict[str, Any] = {}
        exec(textwrap.dedent(code), scope)
        dataset = scope["dataset"]
        assert type(dataset.strategy) is ClassBalancedSampling
        assert dataset.strategy.block_size == 4
        assert np.array_equal(
            np.asarray(dataset.strategy.indices), scope["collection"].where("cell_type != 'T'")
        )

    def test_code_names_what_a_result_does_not_hold(self):
        strategy = SearchedStrategy(name="BlockWeightedSampling", arrays=("weights",))
        assert (
            strategy.in_python(16, "rows")
            == "BlockWeightedSampling(weights=weights, block_size=16, indices=rows)"
        )


def test_a_configuration_that_never_fills_a_round_fails(collection):
    # `drop_last` leaves out less than a block; where that leaves no whole fetch, it is said.
    strategy = BlockShuffling(drop_last=True)
    result = autotune(
        collection,
        label="plate",
        strategy=strategy,
        **(SMALL | {"block_sizes": [4, 2500], "fetch_factors": [2, 60]}),
    )
    by = {each.configuration: each for each in result.configurations}
    assert result.recommended is not None
    assert by[Configuration(block_size=2500, fetch_factor=60)].cells_per_second is None


@pytest.mark.filterwarnings("ignore:.*settings are predicted:UserWarning")  # on a busy machine
def test_treated_cells_with_controls(collection):
    """Speed and memory include the controls, entropy is that of the treated cells."""
    strategy = MatchedControls(
        BlockShuffling(4), "cell_type", collection.obs["cell_type"].categories[0], ["plate"], k=2
    )
    result = autotune(collection, label="plate", strategy=strategy, **SMALL)
    assert result.loader_fault is None
    assert {each.configuration.block_size for each in result.configurations} == {4, 16}
    assert result.chosen is not None
    assert result.chosen.entropy_bits.homogeneous is not None
    assert result.strategy is not None
    assert result.recommended is not None
    assert (result.strategy.name, result.strategy.arrays) == ("MatchedControls", ("strategy",))
    assert "indices" not in result.strategy.in_python(16, "train")  # they are the inner one's
    with pytest.raises(ParameterError, match=r"give strategy=MatchedControls\(\.\.\., block_size="):
        CellDataset.from_autotune(collection, result)
    tuned = replace(strategy, block_size=result.recommended.configuration.block_size)
    dataset = CellDataset.from_autotune(collection, result, strategy=tuned, seed=0)
    assert len(next(iter(dataset)).controls) == 2 * result.dataset.batch_size
    assert Selected.of(collection, None, strategy).rows_per_cell == 3


def test_the_size_of_a_minibatch_is_that_of_cells_and_controls(collection):
    """What waits for a slow training loop takes this much memory."""
    first = collection.obs["cell_type"].categories[0]
    strategy = MatchedControls(BlockShuffling(4), "cell_type", first, ["plate"], k=2)
    pairs = next(iter(CellDataset(collection, strategy, 8, 2, seed=0)))
    size_of = object.__new__(DatasetSession).size_of
    alone = replace(pairs, controls=None)
    assert size_of(alone) >= 4 * pairs.X.values().numel()
    assert size_of(pairs) == size_of(alone) + size_of(pairs.controls)
    assert size_of(replace(alone, neighbors=pairs.controls)) == size_of(pairs)


def summed(minibatch):
    """A training step on matched pairs."""
    assert len(minibatch.controls) == len(minibatch)
    return float(minibatch.X.sum() + minibatch.controls.X.sum())


def summed_graph(minibatch):
    """A training step on a graph."""
    graph = to_graph(minibatch)
    assert graph.edge_index.shape[1] > graph.n_seeds
    return float(graph.nodes.X.sum())


@pytest.mark.filterwarnings("ignore:.*settings are predicted:UserWarning")  # on a busy machine
@pytest.mark.parametrize("kind", ["pairs", "neighbours"])
def test_cells_in_company_with_a_step(collection, kind):
    """The step of a training has what the loader delivers, and so has what follows the advice."""
    treated = MatchedControls(
        BlockShuffling(4), "cell_type", collection.obs["cell_type"].categories[0], ["plate"]
    )
    near = np.arange(len(collection))[:, None] + np.array([-1, 1])
    near[0, 0] = near[-1, 1] = -1
    strategy: Any
    strategy, step = {
        "pairs": (treated, summed),
        "neighbours": (WithNeighbors(BlockShuffling(4), near), summed_graph),
    }[kind]
    options = SMALL | {"budget": 60.0}  # code may have to be compiled
    result = autotune(collection, label="plate", strategy=strategy, step=step, **options)
    assert result.loader_fault is None
    assert result.recommended is not None
    tuned = replace(strategy, block_size=result.recommended.configuration.block_size)
    dataset = CellDataset.from_autotune(collection, result, strategy=tuned, seed=0)
    assert step(next(iter(dataset))) > 0


def test_what_is_no_minibatch_cannot_be_checked(collection):
    near = np.arange(len(collection))[:, None]
    with pytest.raises(ParameterError, match=r"delivers Graph.*call it in `step`"):
        autotune(
            collection,
            label="plate",
            strategy=WithNeighbors(BlockShuffling(4), near),
            make_dataset=partial(CellDataset, batch_transform=to_graph),
            step=len,
            **SMALL,
        )
