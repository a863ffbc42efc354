"""What each rank reads, with real processes: torch.distributed, and Lightning's Trainer."""

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.warm import python as warm

from cellfeed import BlockShuffling, CellDataset, ParameterError

pytest.importorskip("torch")

N_ROWS, N_RANKS, N_EPOCHS = 101, 2, 2
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

# A rank's script begins with this, and ends by saying what it found.
PROLOGUE = """
    import json, multiprocessing, os, sys, warnings
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader
    from cellfeed import BlockShuffling, CellDataset, ParameterError

    rank, meeting_point = int(sys.argv[1]), sys.argv[2]
    warnings.filterwarnings("ignore", message=".*multi-threaded.*")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message="ranks are not compared where another")

    def make(seed=0, **options):
        return CellDataset(np.arange(101), BlockShuffling(4), 8, 2, seed=seed, **options)

    def join():
        dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=2)

    def refusal(function, *arguments, **options):
        try:
            function(*arguments, **options)
        except (ParameterError, RuntimeError) as error:
            return str(error)

    def epochs(loader):
        return [[np.asarray(batch).tolist() for batch in loader] for _ in range(2)]

    found = {}
"""
EPILOGUE = """
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))
"""


def run_ranks(
    folder: Path, body: str, arguments: Sequence[str] = (), **environment: str
) -> list[dict[str, Any]]:
    """Run a script as two processes that meet, and return what each of them found."""
    known = "ignore:ranks are not compared where another:UserWarning"  # in workers, too
    python = sys.executable, "-W", "error::UserWarning", "-W", known, "-c"
    script = "".join(map(textwrap.dedent, (PROLOGUE, body, EPILOGUE)))
    processes = [
        warm.Popen(
            [*python, script, str(rank), meeting_point, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | environment,
        )
        for meeting_point in [f"file://{folder}/meet"]
        for rank in range(N_RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]


def assert_is_divided(epochs_of_ranks: list[list[list[int]]]) -> None:
    """Each rank has its own rows, all rows are there, and one is repeated to make ranks equal."""
    for epoch in zip(*epochs_of_ranks, strict=True):
        assert len({len(minibatches) for minibatches in epoch}) == 1
        rows = Counter(row for minibatches in epoch for each in minibatches for row in each)
        assert len(rows) == N_ROWS
        assert rows.total() == N_ROWS + N_ROWS % N_RANKS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """What two ranks got of datasets made before and after they met, in every way."""
    return run_ranks(
        tmp_path_factory.mktemp("ranks"),
        """
        multiprocessing.set_forkserver_preload(["cellfeed._dataset", "torch.distributed"])
        made = {case: make() for case in sys.argv[3:] if case.startswith("before")}
        join()
        found = {"lengths": {}, "epochs": {}, "ranks": []}
        for case in sys.argv[3:]:
            _, kind, method = case.split()
            dataset = made.get(case) or make()
            options = {} if method == "0" else {
                "num_workers": 2 if method == "fork" else 1,
                "multiprocessing_context": method,
                "persistent_workers": case != "before plain fork",
            }
            if kind == "own":
                loader = dataset.loader(**options)
            else:
                loader = DataLoader(dataset, batch_size=None, **options)
            found["epochs"][case], found["lengths"][case] = epochs(loader), len(loader)
            plan = dataset.plan(epoch=0)
            found["ranks"] += [[dataset.rank, dataset.world_size], [plan.rank, plan.world_size]]
        """,
        CASES,
    )


@pytest.mark.parametrize("case", CASES)
def test_ranks_share_the_rows_whenever_the_dataset_is_made(ranks, case):
    epochs = [rank["epochs"][case] for rank in ranks]
    assert_is_divided(epochs)
    for rank, delivered in zip(ranks, epochs, strict=True):
        length = rank["lengths"][case]
        assert [len(minibatches) for minibatches in delivered] == [length] * N_EPOCHS
    assert epochs[0][0] != epochs[0][1]


def test_a_dataset_says_which_rank_it_is_now(ranks):
    for number, rank in enumerate(ranks):
        assert rank["ranks"] == [[number, N_RANKS]] * len(rank["ranks"]) != []


@pytest.fixture(scope="module")
def seeds(tmp_path_factory) -> list[dict[str, Any]]:
    """What became of seeds that were drawn before ranks met."""
    return run_ranks(
        tmp_path_factory.mktemp("seeds"),
        """
        drawn = {way: make(seed=None) for way in ("0", "2", "plain", "looked at")}
        seen = drawn["looked at"].seed
        used = make(seed=None)
        next(iter(used))
        join()
        found["0"] = epochs(drawn["0"])
        found["seed"] = drawn["0"].seed
        found["2"] = epochs(drawn["2"].loader(2))
        length = len(drawn["plain"])
        found["plan"] = refusal(drawn["plain"].plan, epoch=0)
        found["plain"] = refusal(epochs, DataLoader(drawn["plain"], batch_size=None, num_workers=1))
        found["used"] = refusal(list, used)
        found["looked at"] = refusal(list, drawn["looked at"])
        late = make(seed=None)
        found["late"] = late.seed
        found["late plain"] = epochs(DataLoader(late, batch_size=None, num_workers=2))
        """,
    )


class TestASeedThatNobodyGave:
    @pytest.mark.parametrize("way", ["0", "2", "late plain"])
    def test_becomes_that_of_all_ranks_when_an_epoch_begins(self, seeds, way):
        assert_is_divided([rank[way] for rank in seeds])

    @pytest.mark.parametrize("way", ["seed", "late"])
    def test_is_said(self, seeds, way):
        assert seeds[0][way] == seeds[1][way]

    @pytest.mark.parametrize("way", ["plan", "plain"])
    def test_is_refused_where_ranks_cannot_agree(self, seeds, way):
        for rank in seeds:
            assert "this process drew `seed` for itself" in rank[way]
            assert "give `seed`, or iterate over `dataset.loader()`" in rank[way]

    @pytest.mark.parametrize("way", ["used", "looked at"])
    def test_is_refused_where_it_was_in_use(self, seeds, way):
        for rank in seeds:
            assert "\n" not in rank[way]
            assert "has already used a seed that it drew for itself" in rank[way]
            assert rank[way].endswith("give `seed`")


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> list[dict[str, Any]]:
    """What ranks that are given say, and a process that is by itself among several."""
    return run_ranks(
        tmp_path_factory.mktemp("others"),
        """
        class Caught(list):
            def __enter__(self):
                self.catcher = warnings.catch_warnings(record=True)
                self.log = self.catcher.__enter__()
                warnings.simplefilter("always")
                return self
            def __exit__(self, *problem):
                self += [str(each.message) for each in self.log
                         if "WORLD_SIZE" in str(each.message)]
                self.catcher.__exit__(*problem)

        cases = {
            "iteration": lambda dataset: list(dataset),
            "loader": lambda dataset: list(dataset.loader(1)),
            "length": len,
            "plan": lambda dataset: dataset.plan(epoch=0),
        }
        for name, case in cases.items():
            with Caught() as found[name]:
                dataset = make()
                case(dataset)
                case(dataset)
        with Caught() as found["explicit"]:
            list(make(rank=0, world_size=1))
        with Caught() as found["made"]:
            make()
        given = {"swapped": make(rank=1 - rank, world_size=2), "more": make(rank=0, world_size=4)}
        alone = make(rank=0, world_size=1)
        persistent = make().loader(1, persistent_workers=True)
        with Caught():
            list(persistent)
        too_few = CellDataset(np.arange(9), BlockShuffling(4), 8, 2, drop_last=True, seed=0)
        with Caught() as found["joined"]:
            join()
            list(make())
        for name, dataset in given.items():
            found[name] = [refusal(case, dataset) for case in (len, list)]
        found["swapped late"] = refusal(make, rank=1 - rank, world_size=2)
        found["alone"] = epochs(alone)
        found["too few"] = refusal(list, too_few)
        found["persistent"] = refusal(list, persistent)
        """,
        WORLD_SIZE="2",
    )


class TestByItself:
    @pytest.mark.parametrize("way", ["iteration", "loader", "length", "plan"])
    def test_a_process_that_should_have_met_others_is_warned_once(self, others, way):
        for rank in others:
            (said,) = rank[way]
            assert said.startswith("WORLD_SIZE=2, but torch.distributed is not initialised")
            assert "initialise it first, or give `rank` and `world_size`" in said

    @pytest.mark.parametrize("way", ["explicit", "made", "joined"])
    def test_nothing_is_said_where_it_is_meant_or_may_come_yet(self, others, way):
        assert [rank[way] for rank in others] == [[], []]

    def test_a_rank_may_read_everything_if_it_says_so(self, others):
        for rank in others:
            for minibatches in rank["alone"]:
                assert sorted(row for each in minibatches for row in each) == list(range(N_ROWS))


class TestRanksThatAreGiven:
    def test_are_refused_where_torch_distributed_has_others(self, others):
        for number, rank in enumerate(others):
            given = f"rank={1 - number} and world_size=2 were given, but torch.distributed has "
            for said in [*rank["swapped"], rank["swapped late"]]:
                assert said.startswith(given + f"rank {number} of 2; leave both out")
            for said in rank["more"]:
                assert said.startswith("rank=0 and world_size=4 were given, but torch.distributed")

    def test_one_without_the_other(self):
        given: list[dict[str, Any]] = [{"rank": 0}, {"world_size": 1}]
        for parameters in given:
            with pytest.raises(
                ParameterError, match=r"must be given together, .*; give both, or neither"
            ):
                CellDataset(np.arange(9), BlockShuffling(4), 8, **parameters)


def test_ranks_that_leave_nothing_are_refused_though_met_late(others):
    for rank in others:
        assert rank["too few"].startswith("none of 9 rows is left")


def test_workers_that_persist_are_refused_where_ranks_met_since(others):
    for number, rank in enumerate(others):
        assert rank["persistent"] == (
            "persistent worker processes were started by rank 0 of 1, "
            f"which is now rank {number} of 2; make a new loader"
        )


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_children_that_get_the_dataset_count_epochs_by_themselves(tmp_path, method):
    """As ranks that are started with the dataset do, whose epochs must be the same.

    A server that forks gives it pickled, and starts the workers of plain DataLoaders, too.
    """
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, multiprocessing, sys, warnings
            import numpy as np
            import torch.distributed as dist
            from torch.utils.data import DataLoader
            from cellfeed import BlockShuffling, CellDataset

            def train(dataset, other, rank, meeting_point, answers):
                warnings.filterwarnings("ignore", message="This DataLoader will create")
                dist.init_process_group(
                    "gloo", init_method=meeting_point, rank=rank, world_size=2
                )
                loaders = [
                    dataset,
                    DataLoader(dataset, batch_size=None, num_workers=2),
                    dataset.loader(2, multiprocessing_context="fork"),
                    # Of which only workers count, in memory of the process that starts them.
                    DataLoader(other, batch_size=None, num_workers=2),
                    DataLoader(other, batch_size=None, num_workers=2),
                ]
                found = [[batch.tolist() for batch in loader] for loader in loaders]
                dist.barrier()
                dist.destroy_process_group()
                answers.put((rank, found))

            if __name__ == "__main__":
                dataset, other = (
                    CellDataset(np.arange(101), BlockShuffling(4), 8, 2, seed=seed)
                    for seed in (None, 0)
                )
                dataset.set_epoch(5)
                [*other]  # epoch 0
                multiprocessing.set_forkserver_preload(["cellfeed._dataset", "torch.distributed"])
                context = multiprocessing.get_context(sys.argv[1])
                answers = context.Queue()
                children = [
                    context.Process(target=train, args=(dataset, other, rank, sys.argv[2], answers))
                    for rank in range(2)
                ]
                for child in children:
                    child.start()
                found = dict(answers.get(timeout=500) for _ in children)
                for child in children:
                    child.join()
                print(json.dumps([found[0], found[1]]))
            """
        )
    )
    printed = warm.output_of(
        *(script, method, f"file://{tmp_path}/meet"),
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
    )
    found = json.loads(printed.splitlines()[-1])
    assert_is_divided(found)
    for rank in range(2):
        alike = CellDataset(
            np.arange(101), BlockShuffling(4), 8, 2, seed=0, rank=rank, world_size=2
        )
        for epoch, minibatches in zip((1, 2), found[rank][3:], strict=True):
            alike.set_epoch(epoch)
            assert sorted(chain(*minibatches)) == sorted(np.concatenate([*alike]).tolist())


def test_a_rank_that_reads_something_else_is_reported(tmp_path):
    """By the one that begins last; nobody waits for it."""
    found = run_ranks(
        tmp_path,
        """
        import anndata
        import pandas as pd
        from cellfeed import open_collection
        join()
        warnings.filterwarnings("ignore", message="only rank")  # as the other is refused
        other = CellDataset(np.arange(101 - rank), BlockShuffling(4), 8, 2, seed=0)
        sizes = CellDataset(np.arange(101), BlockShuffling(4 + rank), 8, 2, seed=0)
        names = [f"g{k}" for k in range(6)]
        adata = anndata.AnnData(np.ones((9, 6)), var=pd.DataFrame(index=names))
        adata.layers["counts"] = adata.X
        datasets = {"other": other, "sizes": sizes, "same": make()}
        for name, options in {
            "genes": {"genes": names[:2][:: 1 - 2 * rank]},
            "elements": {"elements": [["X"], ["layers/counts"]][rank]},
            "same genes": {"genes": names[:2]},
        }.items():
            collection = open_collection(adata, **options)
            datasets[name] = CellDataset(collection, BlockShuffling(2), 2, seed=0)
        collection = open_collection(adata)
        dtype = ["float32", "float64"][rank]
        datasets["dtype"] = CellDataset(collection, BlockShuffling(2), 2, seed=0, dtype=dtype)
        for name, dataset in datasets.items():
            if rank == 1:
                dist.barrier()
            found[name] = refusal(lambda: list(dataset))
            if rank == 0:
                dist.barrier()
        """,
    )
    names = ["other", "sizes", "same", "genes", "elements", "same genes", "dtype"]
    assert found[0] == dict.fromkeys(names)
    assert "n_rows=100 on rank 1, n_rows=101 on rank 0" in found[1]["other"]
    assert "block_size=5 on rank 1, block_size=4 on rank 0" in found[1]["sizes"]
    for name in ("genes", "elements", "dtype"):
        assert found[1][name].startswith(
            f"ranks read different data, or read them differently: {name}=["
        )
    assert found[1]["same"] is found[1]["same genes"] is None


def test_ranks_of_lightning(tmp_path):
    """The dataset is made long before Lightning starts the other rank and they meet."""
    pytest.importorskip("pytorch_lightning")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import json, os, sys
            import numpy as np
            import pytorch_lightning as pl
            import torch
            from cellfeed import BlockShuffling, CellDataset

            class Model(pl.LightningModule):
                def __init__(self):
                    super().__init__()
                    self.layer, self.epochs = torch.nn.Linear(1, 1), []

                def on_train_epoch_start(self):
                    self.epochs.append([])

                def training_step(self, batch, _):
                    self.epochs[-1].append(batch.tolist())
                    return self.layer(batch[:, None].float()).mean()

                def configure_optimizers(self):
                    return torch.optim.SGD(self.parameters(), 1e-9)

            loaders = [
                CellDataset(np.arange(101), BlockShuffling(4), 8, 2).loader(workers)
                for workers in (0, 2)
            ]
            found = []
            for loader in loaders:
                model = Model()
                trainer = pl.Trainer(
                    devices=2, strategy="ddp", accelerator="cpu", max_epochs=2, logger=False,
                    enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(model, train_dataloaders=loader)
                assert trainer.num_training_batches == len(loader)
                found.append(model.epochs)
            with open(f"{sys.argv[1]}/{trainer.global_rank}.json", "w") as file:
                json.dump(found, file)
            """
        )
    )
    warm.output_of(script, tmp_path, env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"})
    of_ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(N_RANKS)]
    for epochs in zip(*of_ranks, strict=True):  # without worker processes, and with two
        assert_is_divided(list(epochs))
        assert epochs[0][0] != epochs[0][1]
