"""Ranks that take different minibatches: put right, or reported on every rank."""

from typing import Any

import pytest
from tests.loader.dataset.torchrun import torchrun

pytest.importorskip("torch")

N_ROWS, N_EPOCHS = 101, 3

_TRAINING = """
        import pickle, time
        from cellfeed import InterleavedDatasets

        def new(kind, **options):
            if kind != "interleaved":
                return make(**options).loader(2 if kind == "workers" else 0)
            parts = [
                CellDataset(np.arange(k, k + 50), BlockShuffling(4), 8, 2, **options)
                for k in (0, 50)
            ]
            return InterleavedDatasets(parts).loader()

        def look(loader, *ranks, n=1):
            if rank in ranks:
                iterator = iter(loader)
                for _ in range(n):
                    next(iterator)

        def ordered(loader, *, in_step):
            minibatches = []
            for minibatch in loader:
                minibatches.append(np.asarray(minibatch).tolist())
                if in_step:
                    dist.all_reduce(torch.ones(1))
            dist.barrier()
            return minibatches

        def train(loader, *, in_step, looks={}, break_at=None):
            # What each epoch delivered on all ranks, or what this rank says.
            try:
                epochs = []
                for number in range(3):
                    look(loader, *looks.get(number, ()))
                    seen = torch.zeros(101, dtype=torch.int64)
                    for k, minibatch in enumerate(loader):
                        seen[np.asarray(minibatch)] += 1
                        if in_step:
                            dist.all_reduce(torch.ones(1))
                        if k == break_at:
                            break
                    dist.all_reduce(seen)
                    epochs.append(seen.tolist())
                return epochs
            except CellfeedError as error:
                return str(error)
"""


@pytest.fixture(scope="module", params=[2, 3])
def looked(request, tmp_path_factory) -> list[dict[str, Any]]:
    """Looks of some ranks, with and without collectives after each minibatch."""
    return torchrun(
        tmp_path_factory.mktemp("looked"),
        request.param,
        f"""{_TRAINING}
        kinds = ("plain", "workers", "interleaved")
        early = {{(kind, in_step): new(kind, seed=0) for kind in kinds for in_step in (0, 1)}}
        warnings.filterwarnings("ignore", message="WORLD_SIZE=")
        for loader in early.values():
            look(loader, 0, n=3)
        dist.init_process_group("gloo")
        for (kind, in_step), loader in early.items():
            found[f"before {{kind}} {{in_step}}"] = train(loader, in_step=in_step)
            unseeded = new(kind)
            look(unseeded, 0)
            look(unseeded, 0, 1)
            found[f"start {{kind}} {{in_step}}"] = train(unseeded, in_step=in_step)
            waiting = new(kind, seed=0)
            look(waiting, 1, n=3)
            dist.barrier()
            found[f"barrier {{kind}} {{in_step}}"] = train(waiting, in_step=in_step)
            between, looks = new(kind, seed=0), {{1: (1,), 2: (0,)}}
            found[f"between {{kind}} {{in_step}}"] = train(between, in_step=in_step, looks=looks)
            for copied in (0, 1):
                loader, minibatches = new(kind, seed=0), []
                for looking in ((), (0,), (0, 1)):
                    look(loader, *looking)
                    if copied:
                        loader = pickle.loads(pickle.dumps(loader))
                    minibatches.append(ordered(loader, in_step=in_step))
                found[f"copied {{copied}} {{kind}} {{in_step}}"] = minibatches
        for made in ("anew", "copied"):
            original = make(seed=0)
            other = make(seed=0) if made == "anew" else pickle.loads(pickle.dumps(original))
            look(original, *range(dist.get_world_size()), n=3)
            dist.barrier()
            epoch(other)
            dist.barrier()
            found[made] = epoch(original)
            dist.barrier()
        for kind in kinds:
            loader = new(kind, seed=0)
            found[f"states {{kind}}"] = states = []
            for number in range(3):
                look(loader, number % dist.get_world_size(), n=1 + number)
                if number:
                    dist.barrier()
                states.append(loader.state_dict())
                ordered(loader, in_step=number)
            iterator = iter(loader)
            for _ in range(3):
                next(iterator)
                dist.barrier()
            look(loader, 1)
            states.append(loader.state_dict())
            dist.barrier()
            kept = iter(loader) if rank == 0 else iter(())
            next(kept, None)
            states.append(loader.state_dict())
            dist.barrier()
            look(loader, 0)
            states.append(loader.state_dict())
            del iterator, kept
        original = new("plain", seed=0)
        if rank == 0:
            pickle.loads(pickle.dumps(original))
        dist.barrier()
        copied = pickle.loads(pickle.dumps(original))
        look(copied, *range(dist.get_world_size()), n=3)
        dist.barrier()
        found["a copy of one rank"] = copied.state_dict()
        broken = new("plain", seed=0)
        look(broken, 0)
        found["broken"] = train(broken, in_step=True, break_at=2)
        """,
    )


@pytest.mark.parametrize("kind", ["plain", "workers", "interleaved"])
@pytest.mark.parametrize("in_step", [0, 1])
@pytest.mark.parametrize("when", ["before", "start", "barrier", "between"])
def test_a_rank_that_looks_at_minibatches_leaves_epochs_whole(looked, when, in_step, kind):
    n = 100 if kind == "interleaved" else N_ROWS
    for rank in looked:
        epochs = rank[f"{when} {kind} {in_step}"]
        assert [sum(times > 0 for times in seen) for seen in epochs] == [n] * N_EPOCHS


@pytest.mark.parametrize("kind", ["plain", "workers", "interleaved"])
@pytest.mark.parametrize("in_step", [0, 1])
def test_a_copy_goes_on_where_the_original_would(looked, in_step, kind):
    for rank in looked:
        first, second, third = rank[f"copied 1 {kind} {in_step}"]
        assert [first, second, third] == rank[f"copied 0 {kind} {in_step}"]
        assert first != second != third != first


def test_a_copy_does_not_hide_what_the_original_began(looked):
    for rank in looked:
        assert rank["copied"] == rank["anew"]


@pytest.mark.parametrize("kind", ["plain", "workers", "interleaved"])
def test_a_state_is_that_of_the_training_and_not_of_a_look(looked, kind):
    states = looked[0][f"states {kind}"]
    n_done = [(each["epoch"], each["progress"][-1]) for each in states]
    assert n_done == [(0, 0), (1, 0), (2, 0), *[(3, 3)] * 3]
    for rank in looked[1:]:
        assert rank[f"states {kind}"] == states


def test_a_copy_that_one_rank_makes_leaves_the_states_of_later_ones(looked):
    for rank in looked:
        state = rank["a copy of one rank"]
        assert (state["epoch"], state["progress"][-1]) == (0, 3)


def test_epochs_that_all_ranks_break_off_are_different_ones(looked):
    for rank in looked:
        first, second, third = rank["broken"]
        assert first != second != third != first


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> list[dict[str, Any]]:
    """Ranks that are apart by more than a look."""
    return torchrun(
        tmp_path_factory.mktemp("apart"),
        2,
        f"""{_TRAINING}
        warnings.filterwarnings("ignore", message="ranks are in different epochs")
        dist.init_process_group("gloo")
        for kind in ("plain", "workers", "interleaved"):
            for in_step in (0, 1):
                stopped = new(kind, seed=0)
                epoch(stopped)  # the start of the next
                loaded = new(kind, seed=0)
                if rank == 0:
                    loaded.load_state_dict(stopped.state_dict())
                found[f"state {{kind}} {{in_step}}"] = train(loaded, in_step=in_step)
                left, within = new(kind, seed=0), new(kind, seed=0)
                iterator = iter(left)
                for _ in range(3):
                    next(iterator)
                    dist.barrier()
                if rank == 1:
                    within.load_state_dict(left.state_dict())
                del iterator
                found[f"within {{kind}} {{in_step}}"] = train(within, in_step=in_step)
                whole = new(kind, seed=0)
                if rank == 1:
                    epoch(whole)
                found[f"whole {{kind}} {{in_step}}"] = train(whole, in_step=in_step)
                set_by_one = new(kind, seed=0)
                if rank == 1:
                    set_by_one.set_epoch(5)
                found[f"set {{kind}} {{in_step}}"] = train(set_by_one, in_step=in_step)
        found["seeds"] = train(new("plain", seed=rank), in_step=True)
        """,
    )


@pytest.mark.parametrize("kind", ["plain", "workers", "interleaved"])
@pytest.mark.parametrize("in_step", [0, 1])
@pytest.mark.parametrize(
    ("what", "epochs"),
    [
        ("state", (1, 0)),
        ("within", (0, "0 after 3 minibatches")),
        ("whole", (0, 1)),
        ("set", (0, 5)),
    ],
)
def test_ranks_in_different_epochs_say_so(apart, what, epochs, in_step, kind):
    for number, rank in enumerate(apart):
        said = rank[f"{what} {kind} {in_step}"]
        assert isinstance(said, str)
        assert "\n" not in said
        assert said.startswith(
            "ranks are in different epochs, so that cells are missing: "
            f"rank {number} began epoch {epochs[number]}, "
            f"rank {1 - number} began epoch {epochs[1 - number]}; load the same state on all ranks"
        )


def test_ranks_with_different_seeds_say_so(apart):
    for number, rank in enumerate(apart):
        assert rank["seeds"] == (
            "ranks have different seeds, so that cells are missing: "
            f"rank {number} began epoch 0 with seed={number}, rank {1 - number} began epoch 0 with "
            f"seed={1 - number}; give the same `seed` on all ranks"
        )


def test_ranks_apart_in_the_only_epoch_that_they_pass_say_so(tmp_path):
    """The first has taken several minibatches, without a collective before others began."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        store = dist.distributed_c10d._get_default_store()  # in which waiting is no collective
        for kind in ("plain", "workers", "interleaved"):
            for is_apart in (0, 1):
                loader = new(kind, seed=0)
                if is_apart and rank == 0:
                    look(loader, 0, n=2)
                if is_apart and rank == 1:
                    iterator = iter(loader)
                    begun = [next(iterator)]
                store.set(f"{{kind}} {{is_apart}} {{rank}}", "")
                store.wait([f"{{kind}} {{is_apart}} {{1 - rank}}"])
                with warnings.catch_warnings(record=True) as said:
                    warnings.simplefilter("always")
                    if is_apart and rank == 1:
                        list(iterator)
                    else:
                        list(loader)
                found[f"{{kind}} {{is_apart}}"] = [str(each.message) for each in said]
                dist.barrier()
        """,
    )
    for kind in ("plain", "workers", "interleaved"):
        assert [rank[f"{kind} 0"] for rank in found] == [[], []]
        said = [each for rank in found for each in rank[f"{kind} 1"]]
        assert said
        assert all(each.startswith("ranks are in different epochs, so that") for each in said)


def test_a_dataset_that_one_rank_makes_by_itself_is_no_reason_to_lose_cells(tmp_path):
    """Seeds are shared by datasets in the order in which they are made."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        warnings.filterwarnings("ignore", message="only rank")
        dist.init_process_group("gloo")
        for kind in ("plain", "workers", "interleaved"):
            for in_step in (0, 1):
                if rank == 0:
                    new(kind)
                found[f"{{kind}} {{in_step}}"] = train(new(kind), in_step=in_step)
                if rank == 1:
                    new(kind)  # as many as the other
        alone = new("plain", seed=0) if rank == 0 else None
        found["with seed"] = train(new("plain", seed=0), in_step=True)
        """,
    )
    for rank in found:
        assert [sum(times > 0 for times in seen) for seen in rank.pop("with seed")] == [N_ROWS] * 3
        for said in rank.values():
            assert isinstance(said, str)
            assert "\n" not in said
            assert said.startswith("ranks train on different datasets, so that cells are missing: ")
            assert "make the same datasets in the same order on all ranks" in said


def test_collectives_in_a_group_of_their_own_are_reported(tmp_path):
    """Such as those of DistributedDataParallel(process_group=...), by which none are compared."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        warnings.filterwarnings("always", message="since epoch")
        dist.init_process_group("gloo")
        own = dist.new_group()

        def passes(loader, n, *, trains=True):
            iterator = iter(loader)
            for _ in range(n):
                next(iterator)
                dist.all_reduce(torch.ones(1), group=own if trains else None)

        def apart(loader, *, in_step):
            if rank == 0:
                epoch(loader)
            for _ in range(3):
                for minibatch in loader:
                    dist.all_reduce(torch.ones(1), group=own)
                if in_step:
                    dist.barrier()

        def said(function, *arguments, **options):
            with warnings.catch_warnings(record=True) as caught:
                error = refusal(function, *arguments, **options)
            dist.barrier()
            return [str(each.message) for each in caught], error

        for kind in ("plain", "workers", "interleaved"):
            found[f"apart {{kind}}"] = said(apart, new(kind, seed=0), in_step=False)
            found[f"barrier {{kind}}"] = said(apart, new(kind, seed=0), in_step=True)
            loader = new(kind, seed=0)
            passes(loader, 1)
            found[f"one {{kind}}"] = said(passes, loader, 1)
            loader = new(kind, seed=0)
            with torch.no_grad():
                passes(loader, 2)
                found[f"evaluation {{kind}}"] = said(passes, loader, 2)
            loader = new(kind, seed=0)
            passes(loader, 2, trains=False)
            found[f"trained {{kind}}"] = said(passes, loader, 2, trains=False)
        """,
    )
    for rank in found:
        for kind in ("plain", "workers", "interleaved"):
            for what in ("apart", "one"):
                (warning,), error = rank[f"{what} {kind}"]
                assert error is None
                assert "there were collectives in other groups, but none in the group" in warning
                assert "call torch.distributed.barrier() after each epoch" in warning
            for what in ("evaluation", "trained"):
                assert rank[f"{what} {kind}"] == [[], None]
            assert rank[f"barrier {kind}"][1].startswith("ranks are in different epochs, so that")


def test_others_know_after_a_collective_what_a_rank_began(tmp_path):
    """Though torch's store does not answer when something is set, which may arrive late."""
    found = torchrun(
        tmp_path,
        3,
        f"""{_TRAINING}
        from cellfeed._dataset import _ranks

        class Late:
            def __init__(self, store):
                self.store, self.late = store, []

            def set(self, *arguments):
                self.late.append(arguments)

            def __getattr__(self, name):
                while self.late:
                    self.store.set(*self.late.pop(0))
                return getattr(self.store, name)

        dist.init_process_group("gloo")
        late = Late(dist.distributed_c10d._get_default_store())
        _ranks._store = lambda: late
        compared = (dataset := make(seed=0))._compared
        found["known"] = []
        for _ in range(20):
            next(iter(dataset))
            mine = [*compared._begun][-1]
            dist.barrier()
            time.sleep(rank / 50)
            others = compared._others().values()
            found["known"].append([intervals[-1].begun[0].clock == mine for _, intervals in others])
            dist.barrier()
        """,
    )
    for rank in found:
        assert rank["known"] == [[True, True]] * 20


def test_ranks_that_are_behind_may_still_begin(tmp_path):
    """Collectives of NCCL do not wait for others."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        dist.get_backend = lambda: "nccl"
        begun = [dist.barrier(async_op=True)]
        looked, loader = make(seed=0), make(seed=0).loader()
        look(looked, 0)
        begun.append(dist.barrier(async_op=True))
        found["looked"] = looked.state_dict()
        found["states"] = states = []
        for n in (2, 2, 3, 2):
            time.sleep(rank / 10)
            for k, minibatch in enumerate(loader, 1):
                begun.append(dist.all_reduce(torch.ones(1), async_op=True))
                states.append(loader.state_dict())
                if k == n:
                    break
        for each in begun:
            each.wait()
        """,
    )
    for rank in found:
        assert (rank["looked"]["epoch"], rank["looked"]["progress"][-1]) == (0, 0)
        expected = [(epoch, k) for epoch, n in enumerate((2, 2, 3, 2)) for k in range(1, n + 1)]
        assert [(each["epoch"], each["progress"][-1]) for each in rank["states"]] == expected


def test_an_epoch_counts_where_the_group_is_made_again_within_it(tmp_path):
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        loader = new("plain", seed=0)
        found["epochs"] = []
        for number in range(3):
            for k, minibatch in enumerate(loader, 1):
                dist.barrier()
                if k == 2:
                    dist.destroy_process_group()
                    # Through a store of its own: in the first, addresses may be those of before.
                    meeting_point = f"file://{{folder}}/meeting {{number}}"
                    ranks = dict(rank=rank, world_size=2)
                    dist.init_process_group("gloo", init_method=meeting_point, **ranks)
                if k == 4:
                    break
            found["epochs"].append(loader.state_dict()["epoch"])
        """,
    )
    assert [rank["epochs"] for rank in found] == [[0, 1, 2]] * 2


def test_a_look_that_stays_open_for_long_is_none_of_the_epochs(tmp_path):
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        loader = new("plain", seed=0)
        if rank == 0:
            kept = iter(loader)
            next(kept)
        for number in range(20):
            seen = torch.zeros(101, dtype=torch.int64)
            for minibatch in loader:
                seen[np.asarray(minibatch)] += 1
                dist.all_reduce(torch.ones(1))
            dist.all_reduce(seen)
            found[f"seen {{number}}"] = seen.tolist()
        found["epoch"] = loader.state_dict()["epoch"]
        """,
    )
    for rank in found:
        assert rank.pop("epoch") == 20
        assert [sum(times > 0 for times in seen) for seen in rank.values()] == [N_ROWS] * 20


def test_a_state_does_not_go_back_once_the_rank_with_the_store_is_gone(tmp_path):
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        loader = new("plain", seed=0)
        for n in (5, 1):
            for k, minibatch in enumerate(loader, 1):
                dist.all_reduce(torch.ones(1))
                if k == n:
                    break
        states = [loader.state_dict()]
        store = type(dist.distributed_c10d._get_default_store())

        def fail(*_):
            raise RuntimeError("Connection reset by peer")

        for name in ("check", "get", "multi_get", "set"):
            setattr(store, name, fail)
        states.append(loader.state_dict())
        found["states"] = states
        os._exit((json.dump(found, open(f"{{folder}}/{{rank}}.json", "w")) or 0))
        """,
    )
    for rank in found:
        before, after = rank["states"]
        assert (before["epoch"], before["progress"][2]) == (1, 1)
        assert after == before


def test_a_rank_that_alone_validates_is_told_that_it_gets_a_share(tmp_path):
    """On a new dataset each time; one that it keeps is refused, as above."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        dist.init_process_group("gloo")
        for case in ("whole", "all", "look", "share"):
            training = new("plain", seed=0)
            options = dict(rank=0, world_size=1) if case == "whole" else {{}}
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                for _ in range(3):
                    train(training, in_step=True)
                    validation = new("plain", seed=0, **options)
                    if case == "look":
                        look(validation, 0)
                    elif rank == 0 or case == "all":
                        list(validation)
            dist.barrier()
            found[case] = [str(each.message) for each in said]
        """,
    )
    said = (
        "only rank 0 iterated over a dataset, and got one of 2 shares of its cells; iterate over "
        "it on all ranks, or give rank=0, world_size=1 to one that a rank makes by itself"
    )
    assert found[0] == {"whole": [], "all": [], "look": [], "share": [said, said]}
    assert found[1] == {"whole": [], "all": [], "look": [], "share": []}


def test_a_rank_that_validated_alone_once_is_told_of_its_epoch(tmp_path):
    """Not that it trains on another dataset, though nobody gave a seed."""
    found = torchrun(
        tmp_path,
        2,
        f"""{_TRAINING}
        warnings.filterwarnings("ignore", message="(only rank|ranks are in different epochs)")
        dist.init_process_group("gloo")
        training, validation = new("plain"), new("plain")
        if rank == 0:
            list(validation)
        found["trained"], found["validated"] = [], []
        for _ in range(2):
            found["trained"].append(train(training, in_step=True))
            found["validated"].append(refusal(list, validation))
            dist.barrier()
        """,
    )
    for rank in found:
        for epochs in rank["trained"]:
            assert [sum(times > 0 for times in seen) for seen in epochs] == [N_ROWS] * N_EPOCHS
        first, second = rank["validated"]
        assert first is None
        assert second.startswith("ranks are in different epochs, so that cells are missing: rank")


def test_no_rank_waits_for_one_that_does_not_come(tmp_path):
    """Not for a seed, and not for its epochs."""
    found = torchrun(
        tmp_path,
        3,
        """
        before = make()
        dist.init_process_group("gloo")
        if rank != 2:
            found["epochs"] = [sum(map(len, epoch(before.loader()))) for _ in range(2)]
            found["seed"] = before.seed
        """,
    )
    assert [rank.get("epochs") for rank in found] == [[34] * 2, [34] * 2, None]
    assert found[0]["seed"] == found[1]["seed"]
