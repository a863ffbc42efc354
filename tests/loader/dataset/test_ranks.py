"""What each rank reads: of torchrun, of Lightning's Trainer, and of processes that are forked."""

import json
import multiprocessing
import os
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loader.dataset.torchrun import assert_divided, skip_without_ranks, torchrun
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.process

N_ROWS, N_RANKS = 101, 2
# When the dataset is made, whose DataLoader it is, and how workers start; what a server forks
# gets a copy of the dataset alone.
CASES = [
    *(
        f"{made} {kind} {method}"
        for made in ("before", "after")
        for kind in ("own", "plain")
        for method in ("0", "fork")
    ),
    "before own forkserver",
    "after plain forkserver",
]


@pytest.mark.smoke
def test_two_ranks_of_torchrun(tmp_path):
    """Nobody gives a seed; the state that one of them saves is that of both."""
    ranks = torchrun(
        tmp_path,
        2,
        """
        before = make()
        dist.init_process_group("gloo")
        found["epochs"] = [epoch(before.loader()) for _ in range(2)]
        for k, minibatch in enumerate(before.loader(), 1):
            if k == 3:
                break
        states = [before.state_dict()]
        dist.broadcast_object_list(states)
        resumed = make()
        resumed.load_state_dict(states[0])
        before.set_epoch(2)
        found["third"], found["rest"] = epoch(before), epoch(resumed)
        """,
    )
    for epochs in zip(*(rank["epochs"] for rank in ranks), strict=True):
        assert_divided(epochs, N_ROWS)
    assert ranks[0]["epochs"][0] != ranks[0]["epochs"][1]
    for rank in ranks:
        assert rank["rest"] == rank["third"][3:]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks say and get, before and after they meet."""
    return torchrun(
        tmp_path_factory.mktemp("ranks"),
        N_RANKS,
        f"cases = {CASES!r}",
        """
        import multiprocessing
        import anndata
        import pandas as pd
        from cellfeed import open_collection

        multiprocessing.set_forkserver_preload(["cellfeed.dataset", "torch.distributed"])
        for name, case in {
            "iteration": list,
            "loader": lambda dataset: list(dataset.loader(1)),
            "length": len,
            "plan": lambda dataset: dataset.plan(epoch=0),
        }.items():
            with warned() as found[name]:
                dataset = make(seed=0)
                case(dataset)
                case(dataset)
        with warned() as found["explicit"]:
            list(make(rank=0, world_size=1, seed=0))
        with warned() as found["made"]:
            made = {case: make(seed=0) for case in cases if case.startswith("before")}
            drawn = {way: make() for way in ("0", "2", "plain", "looked at", "used")}
            found["seen"] = [drawn["looked at"].seed]
            given = {
                "swapped": make(rank=1 - rank, world_size=2, seed=0),
                "more": make(rank=0, world_size=4, seed=0),
            }
            alone = make(rank=0, world_size=1, seed=0)
            persistent = make(seed=0).loader(1, persistent_workers=True)
            too_few = make(9, drop_last=True, seed=0)
        with warned():
            list(persistent)
            persistent.set_epoch(0)
            next(iter(drawn["used"]))
        with warned() as found["joined"]:
            dist.init_process_group("gloo")
            list(make(seed=0))

        for name, dataset in given.items():
            found[name] = [refusal(case, dataset) for case in (len, list)]
        found["swapped late"] = refusal(make, rank=1 - rank, world_size=2, seed=0)
        found["alone"] = epoch(alone)
        found["too few"] = refusal(list, too_few)
        found["persistent"] = [epoch(persistent)]

        found["lengths"], found["ranks"] = {}, []
        for case in cases:
            _, kind, method = case.split()
            dataset = made.get(case) or make(seed=0)
            options = {} if method == "0" else {
                "num_workers": 2 if method == "fork" else 1,
                "multiprocessing_context": method,
                "persistent_workers": case != "before plain fork",
            }
            if kind == "own":
                loader = dataset.loader(**options)
            else:
                loader = DataLoader(dataset, batch_size=None, **options)
                found["not told"] = refusal(list, loader) if options else None
                loader = DataLoader(dataset, batch_size=None, **options)
            found[case], found["lengths"][case] = [], len(loader)
            for number in range(2):
                if kind == "own" or number == 0 or not options.get("persistent_workers"):
                    dataset.set_epoch(number)
                found[case].append(epoch(loader))
            plan = dataset.plan(epoch=0)
            found["ranks"] += [[dataset.rank, dataset.world_size], [plan.rank, plan.world_size]]

        found["drawn plan"] = refusal(drawn["plain"].plan, epoch=0)
        found["drawn peek"] = refusal(drawn["plain"].peek)
        for way in ("0", "2"):
            loader = drawn[way].loader(int(way))
            found[f"drawn {way}"] = [epoch(loader) for _ in range(2)]
        found["seen"].append(drawn["looked at"].seed)
        found["looked at"] = [epoch(drawn["looked at"]) for _ in range(2)]
        found["used"] = refusal(list, drawn["used"])
        found["seeds"] = [drawn[way].seed for way in ("0", "2", "looked at")]

        dataset = make(seed=0)
        found["peeked"] = [np.asarray(each).tolist() for each in dataset.peek(2)]
        if rank == 0:
            dataset.loader(2).peek(1)
        found["after"] = epoch(dataset)[:2]
        found["streams"] = epoch(make(seed=0, streams=4))
        found["no multiple"] = refusal(list, make(seed=0, streams=4).loader()) or refusal(
            lambda: list(make(seed=0, streams=3))
        )

        # Datasets that differ between ranks.
        names = [f"g{k}" for k in range(6)]
        adata = anndata.AnnData(np.ones((9, 6)), var=pd.DataFrame(index=names))
        adata.layers["counts"] = adata.X
        datasets = {
            "n_rows": make(101 - rank, seed=0),
            "block_size": CellDataset(np.arange(101), BlockShuffling(4 + rank), 8, 2, seed=0),
            "seed": make(seed=rank),
            "epoch": make(seed=0),
            "streams": make(seed=0, streams=2 + 2 * rank),
            "after minibatches": make(seed=0),
            "proportions": InterleavedDatasets(
                [make(seed=0), make(50, seed=0)], [1 + rank, 2 - rank], n_minibatches=5
            ),
            "same": make(seed=0),
        }
        datasets["epoch"].set_epoch(rank)
        stopped = make(seed=0, rank=rank, world_size=2)
        for _ in zip(range(1 + rank), stopped):
            pass
        datasets["after minibatches"].load_state_dict(stopped.state_dict())

        for name, options in {
            "genes": {"genes": names[:2][:: 1 - 2 * rank]},
            "elements": {"elements": [["X"], ["layers/counts"]][rank]},
            "same genes": {"genes": names[:2]},
        }.items():
            collection = open_collection(adata, **options)
            datasets[name] = CellDataset(collection, BlockShuffling(2), 2, seed=0)
        collection, dtype = open_collection(adata), ["float32", "float64"][rank]
        datasets["dtype"] = CellDataset(collection, BlockShuffling(2), 2, seed=0, dtype=dtype)
        found["differing"] = {}
        for name, dataset in datasets.items():
            found["differing"][name] = refusal(list, dataset)
        """,
    )


@pytest.mark.parametrize("case", [*CASES, "drawn 0", "drawn 2", "looked at"])
def test_ranks_share_the_rows_of_every_epoch(ranks, case):
    """Whenever the dataset is made; a seed that nobody gave becomes that of all ranks."""
    epochs = [rank[case] for rank in ranks]
    for number in range(2):
        assert_divided([each[number] for each in epochs], N_ROWS)
    assert epochs[0][0] != epochs[0][1]
    for rank, delivered in zip(ranks, epochs, strict=True):
        assert {*map(len, delivered)} == {rank["lengths"].get(case, 7)}


def test_a_dataset_says_which_rank_it_is_now(ranks):
    for number, rank in enumerate(ranks):
        assert rank["ranks"] == [[number, N_RANKS]] * len(rank["ranks"]) != []


class TestASeedThatNobodyGave:
    def test_is_that_of_the_first_rank_from_the_first_epoch_on(self, ranks):
        assert ranks[0]["seen"] == ranks[1]["seen"] == [None, None]
        assert ranks[0]["seeds"] == ranks[1]["seeds"]
        assert None not in ranks[0]["seeds"]

    @pytest.mark.parametrize("way", ["drawn plan", "drawn peek"])
    def test_is_unknown_until_ranks_begin(self, ranks, way):
        for rank in ranks:
            assert rank[way].startswith("this process drew `seed` for itself")
            assert rank[way].endswith("give `seed`")

    def test_is_refused_where_it_was_in_use(self, ranks):
        assert ranks[0]["used"] == ranks[1]["used"]
        assert ranks[0]["used"].startswith("ranks begin different epochs: seed=")


def test_peeking_counts_as_nothing_and_needs_no_other_rank(ranks):
    for rank in ranks:
        assert rank["peeked"] == rank["after"]


def test_streams_are_delivered_together_as_by_one_rank(ranks):
    alone = CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, 2, seed=0, streams=4)
    joined = [a + b for a, b in zip(*(rank["streams"] for rank in ranks), strict=True)]
    assert joined == [np.asarray(each).tolist() for each in alone]
    assert "`streams` must be a multiple of the number of ranks" in ranks[0]["no multiple"]


def test_workers_of_another_loader_have_to_be_told_the_epoch(ranks):
    for rank in ranks:
        assert "call `set_epoch(epoch)` before each epoch" in rank["not told"]


class TestByItself:
    @pytest.mark.parametrize("way", ["iteration", "loader", "length", "plan"])
    def test_a_process_that_should_have_met_others_is_warned_once(self, ranks, way):
        for rank in ranks:
            (said,) = rank[way]
            assert said.startswith("WORLD_SIZE=2, but torch.distributed is not initialised")
            assert "initialise it first, or give `rank` and `world_size`" in said

    @pytest.mark.parametrize("way", ["explicit", "made", "joined"])
    def test_nothing_is_said_where_it_is_meant_or_may_come_yet(self, ranks, way):
        assert [rank[way] for rank in ranks] == [[], []]

    def test_a_rank_may_read_everything_if_it_says_so(self, ranks):
        for rank in ranks:
            assert sorted(chain(*rank["alone"])) == list(range(N_ROWS))


def test_ranks_that_are_given_are_refused_where_torch_distributed_has_others(ranks):
    for number, rank in enumerate(ranks):
        given = f"rank={1 - number} and world_size=2 were given, but torch.distributed has "
        for said in [*rank["swapped"], rank["swapped late"]]:
            assert said.startswith(given + f"rank {number} of 2; leave both out")
        for said in rank["more"]:
            assert said.startswith("rank=0 and world_size=4 were given, but torch.distributed")


def test_ranks_that_met_late(ranks):
    """Also where workers persist, which are told the rank in each request."""
    for rank in ranks:
        assert rank["too few"].startswith("none of 9 rows is left")
    assert_divided([rank["persistent"][0] for rank in ranks], N_ROWS)


DIFFERENCES = {
    "n_rows": "n_rows=101 on rank 0, n_rows=100 on rank 1",
    "block_size": "block_size=4 on rank 0, block_size=5 on rank 1",
    "seed": "seed=0 on rank 0, seed=1 on rank 1",
    "epoch": "epoch=0 on rank 0, epoch=1 on rank 1",
    "streams": "streams=2 on rank 0, streams=4 on rank 1",
    "after minibatches": "after minibatches=1 on rank 0, after minibatches=2 on rank 1",
    "proportions": "proportions=['1', '2'] on rank 0, proportions=['2', '1'] on rank 1",
    "genes": "read.genes=",
    "elements": "read.elements=['X'] on rank 0, read.elements=['layers/counts'] on rank 1",
    "dtype": "read.dtype=['float32'] on rank 0, read.dtype=['float64'] on rank 1",
}


def test_a_difference_is_the_same_error_on_all_ranks(ranks):
    first, last = (rank["differing"] for rank in ranks)
    assert first == last
    assert first.pop("same") is first.pop("same genes") is None
    assert {*first} == {*DIFFERENCES}
    for name, difference in DIFFERENCES.items():
        assert "\n" not in first[name]
        assert first[name].startswith("ranks begin different epochs: ")
        assert difference in first[name]


def test_a_second_group_does_not_hear_what_the_first_said(tmp_path):
    """Whose store may be the same, with all that is in it."""
    ranks = torchrun(
        tmp_path,
        2,
        """
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, is_master=rank == 0)
        for name in "ab":
            within = dist.PrefixStore(name, store)
            dist.init_process_group("gloo", store=within, rank=rank, world_size=2)
            dist.barrier()
            group = dist.group.WORLD
            kept = dist.PrefixStore("kept", store)

            class Group:
                size, rank = group.size, group.rank
                get_group_store = lambda self: kept

            from cellfeed.dataset._ranks import begin_together

            found[name] = begin_together(Group(), {"seed": [name, None][rank]})
            dist.barrier()
            dist.destroy_process_group()
        """,
    )
    assert [[rank["a"], rank["b"]] for rank in ranks] == [[{"seed": "a"}, {"seed": "b"}]] * 2


def test_who_does_not_come_is_named(tmp_path):
    """In the error after the timeout of the group, with what to do."""
    ranks = torchrun(
        tmp_path,
        3,
        """
        from datetime import timedelta

        dist.init_process_group("gloo", timeout=timedelta(seconds=4))
        if rank != 2:
            found["said"] = refusal(list, make(seed=0))
        time.sleep(0 if rank != 2 else 6)
        dist.barrier = lambda: None
        """,
    )
    for rank in ranks[:2]:
        assert rank["said"].startswith("rank 2 of 3 did not begin an epoch with the others within")
        assert "`peek(n)`" in rank["said"]
        assert "rank=0, world_size=1" in rank["said"]


def train(dataset, rank, meeting_point, answers):
    """What a process does that is started with a dataset."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group(
        "gloo", init_method=meeting_point, rank=rank, world_size=N_RANKS
    )
    loaders = [dataset, dataset.loader(2, multiprocessing_context="fork")]
    found = [[np.asarray(batch).tolist() for batch in loader] for loader in loaders]
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    answers.put((rank, found))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_children_that_get_the_dataset_count_epochs_by_themselves(tmp_path, method):
    """As ranks that are started with the dataset do; they may meet in a file."""
    skip_without_ranks()
    dataset = CellDataset(np.arange(N_ROWS), BlockShuffling(4), 8, 2)
    dataset.set_epoch(5)
    context: Any = multiprocessing.get_context(method)
    answers, place = context.Queue(), f"file://{tmp_path}/meet"
    children = [
        context.Process(target=train, args=(dataset, rank, place, answers))
        for rank in range(N_RANKS)
    ]
    for child in children:
        child.start()
    found = dict(answers.get(timeout=500) for _ in children)
    for child in children:
        child.join()
    for epochs in zip(found[0], found[1], strict=True):
        assert_divided(epochs, N_ROWS)


_LIGHTNING = """
import json, sys
import numpy as np
from cellfeed import BlockShuffling, CellDataset
from tests.loader.frameworks.test_lightning import Model, trainer

loaders = [
    CellDataset(np.arange(101), BlockShuffling(4), 8, 2).loader(workers) for workers in (0, 2)
]
found = []
for loader in loaders:
    model, by = Model(), trainer(devices=2, strategy="ddp", max_epochs=2)
    by.fit(model, train_dataloaders=loader)
    n = len(loader)
    assert by.num_training_batches == n
    found.append([model.seen[:n], model.seen[n:]])
with open(f"{sys.argv[1]}/{by.global_rank}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.slow
def test_ranks_of_lightning(tmp_path):
    """The dataset is made long before Lightning starts the other rank and they meet."""
    pytest.importorskip("pytorch_lightning")
    pytest.importorskip("cellfeed.frameworks.lightning")
    skip_without_ranks()
    script = tmp_path / "script.py"
    script.write_text(_LIGHTNING)
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    warm.output_of(
        *(script, tmp_path),
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(paths)},
    )
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    for epochs in zip(*of_ranks, strict=True):  # without worker processes, and with two
        for number in range(2):
            assert_divided([each[number] for each in epochs], N_ROWS)
        assert epochs[0][0] != epochs[0][1]
