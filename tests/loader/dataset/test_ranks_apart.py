"""Ranks that take different minibatches: put right, or reported on every rank."""

from typing import Any

import pytest
from tests.loader.dataset.torchrun import torchrun

pytest.importorskip("torch")
pytestmark = pytest.mark.process

N_ROWS, N_EPOCHS = 101, 3
KINDS = ["plain", "workers", "interleaved"]

_TRAINING = """
        kinds = ("plain", "workers", "interleaved")

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


@pytest.fixture(scope="module")
def looked(tmp_path_factory) -> list[dict[str, Any]]:
    """Three ranks of which some look at minibatches, with and without collectives after each."""
    return torchrun(
        tmp_path_factory.mktemp("looked"),
        3,
        _TRAINING,
        """
        early = {(kind, in_step): new(kind, seed=0) for kind in kinds for in_step in (0, 1)}
        warnings.filterwarnings("ignore", message="WORLD_SIZE=")
        for loader in early.values():
            look(loader, 0, n=3)
        absent = make()
        dist.init_process_group("gloo")

        if rank != 2:
            found["absent"] = [sum(map(len, epoch(absent.loader()))) for _ in range(2)]
            found["absent"].append(absent.seed)
        dist.barrier()
        for (kind, in_step), loader in early.items():
            found[f"before {kind} {in_step}"] = train(loader, in_step=in_step)
            unseeded = new(kind)
            look(unseeded, 0)
            look(unseeded, 0, 1)
            found[f"start {kind} {in_step}"] = train(unseeded, in_step=in_step)
            waiting = new(kind, seed=0)
            look(waiting, 1, n=3)
            dist.barrier()
            found[f"barrier {kind} {in_step}"] = train(waiting, in_step=in_step)
            between, looks = new(kind, seed=0), {1: (1,), 2: (0,)}
            found[f"between {kind} {in_step}"] = train(between, in_step=in_step, looks=looks)
            for copied in (0, 1):
                loader, minibatches = new(kind, seed=0), []
                for looking in ((), (0,), (0, 1)):
                    look(loader, *looking)
                    if copied:
                        loader = pickle.loads(pickle.dumps(loader))
                    minibatches.append(ordered(loader, in_step=in_step))
                found[f"copied {copied} {kind} {in_step}"] = minibatches
        for made in ("anew", "copied"):
            original = make(seed=0)
            other = make(seed=0) if made == "anew" else pickle.loads(pickle.dumps(original))
            look(original, *range(3), n=3)
            dist.barrier()
            epoch(other)
            dist.barrier()
            found[made] = epoch(original)
            dist.barrier()
        for kind in kinds:
            loader = new(kind, seed=0)
            found[f"states {kind}"] = states = []
            for number in range(3):
                look(loader, number, n=1 + number)
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
        look(copied, *range(3), n=3)
        dist.barrier()
        found["a copy of one rank"] = copied.state_dict()
        broken = new("plain", seed=0)
        look(broken, 0)
        found["broken"] = train(broken, in_step=True, break_at=2)

        class Late:
            # Sets something only when it is used again.
            def __init__(self, store):
                self.store, self.late = store, []

            def set(self, *arguments):
                self.late.append(arguments)

            def __getattr__(self, name):
                while self.late:
                    self.store.set(*self.late.pop(0))
                return getattr(self.store, name)

        late = Late(dist.distributed_c10d._get_default_store())
        dist.distributed_c10d._get_default_store = lambda: late
        begun, found["late"] = make(seed=0), []
        for _ in range(20):
            next(iter(begun))
            dist.barrier()
            time.sleep(rank / 50)
            found["late"].append(begun.state_dict())
            dist.barrier()
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_step", [0, 1])
@pytest.mark.parametrize("when", ["before", "start", "barrier", "between"])
def test_a_rank_that_looks_at_minibatches_leaves_epochs_whole(looked, when, in_step, kind):
    n = 100 if kind == "interleaved" else N_ROWS
    for rank in looked:
        epochs = rank[f"{when} {kind} {in_step}"]
        assert [sum(times > 0 for times in seen) for seen in epochs] == [n] * N_EPOCHS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_step", [0, 1])
def test_a_copy_goes_on_where_the_original_would(looked, in_step, kind):
    for rank in looked:
        first, second, third = rank[f"copied 1 {kind} {in_step}"]
        assert [first, second, third] == rank[f"copied 0 {kind} {in_step}"]
        assert first != second != third != first


def test_copies_hide_nothing_that_the_original_began(looked):
    for rank in looked:
        assert rank["copied"] == rank["anew"]
        state = rank["a copy of one rank"]
        assert (state["epoch"], state["progress"][-1]) == (0, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_that_of_the_training_and_not_of_a_look(looked, kind):
    states = looked[0][f"states {kind}"]
    n_done = [(each["epoch"], each["progress"][-1]) for each in states]
    assert n_done == [(0, 0), (1, 0), (2, 0), *[(3, 3)] * 3]
    for rank in looked[1:]:
        assert rank[f"states {kind}"] == states


def test_epochs_that_all_ranks_break_off_are_different_ones(looked):
    for rank in looked:
        first, second, third = rank["broken"]
        assert first != second != third != first


def test_no_rank_waits_for_one_that_does_not_come(looked):
    """Not for a seed, and not for its epochs."""
    assert looked[0]["absent"] == looked[1]["absent"]
    assert looked[0]["absent"][:2] == [34, 34]


def test_others_know_after_a_collective_what_a_rank_began(looked):
    """Though torch's store does not answer when something is set, which may arrive late."""
    for rank in looked:
        done = [(each["epoch"], each["progress"][-1]) for each in rank["late"]]
        assert done == [(epoch, 1) for epoch in range(20)]


@pytest.fixture(scope="module")
def apart(tmp_path_factory) -> list[dict[str, Any]]:
    """Two ranks that are apart by more than a look."""
    return torchrun(
        tmp_path_factory.mktemp("apart"),
        2,
        _TRAINING,
        """
        dist.init_process_group("gloo")

        # Ranks that begin in different epochs, or with different seeds or datasets.
        warnings.filterwarnings("ignore", message="(only rank|ranks are in different epochs)")
        for kind in kinds:
            for in_step in (0, 1):
                stopped = new(kind, seed=0)
                epoch(stopped)  # the start of the next
                loaded = new(kind, seed=0)
                if rank == 0:
                    loaded.load_state_dict(stopped.state_dict())
                found[f"state {kind} {in_step}"] = train(loaded, in_step=in_step)
                left, within = new(kind, seed=0), new(kind, seed=0)
                iterator = iter(left)
                for _ in range(3):
                    next(iterator)
                    dist.barrier()
                if rank == 1:
                    within.load_state_dict(left.state_dict())
                del iterator
                found[f"within {kind} {in_step}"] = train(within, in_step=in_step)
                whole = new(kind, seed=0)
                if rank == 1:
                    epoch(whole)
                found[f"whole {kind} {in_step}"] = train(whole, in_step=in_step)
                set_by_one = new(kind, seed=0)
                if rank == 1:
                    set_by_one.set_epoch(5)
                found[f"set {kind} {in_step}"] = train(set_by_one, in_step=in_step)
                if rank == 0:
                    new(kind)  # before what the other makes, by which seeds are shared
                found[f"another {kind} {in_step}"] = train(new(kind), in_step=in_step)
                if rank == 1:
                    new(kind)  # as many as the other
        found["seeds"] = train(new("plain", seed=rank), in_step=True)
        alone = new("plain", seed=0) if rank == 0 else None
        found["another, with a seed"] = train(new("plain", seed=0), in_step=True)
        if rank == 1:
            new("plain", seed=0)
        training, validation = new("plain"), new("plain")
        if rank == 0:
            list(validation)
        found["trained"], found["validated"] = [], []
        for _ in range(2):
            found["trained"].append(train(training, in_step=True))
            found["validated"].append(refusal(list, validation))
            dist.barrier()

        # What a rank is warned of.
        store = dist.distributed_c10d._get_default_store()  # in which waiting is no collective
        for kind in kinds:
            for is_apart in (0, 1):
                loader = new(kind, seed=0)
                if is_apart and rank == 0:
                    look(loader, 0, n=2)
                if is_apart and rank == 1:
                    iterator = iter(loader)
                    next(iterator)
                store.set(f"{kind} {is_apart} {rank}", "")
                store.wait([f"{kind} {is_apart} {1 - rank}"])
                with warned() as found[f"only epoch {kind} {is_apart}"]:
                    list(iterator if is_apart and rank == 1 else loader)
                dist.barrier()
        for case in ("whole", "all", "look", "share"):
            training = new("plain", seed=0)
            options = dict(rank=0, world_size=1) if case == "whole" else {}
            with warned() as found[f"validates {case}"]:
                for _ in range(3):
                    train(training, in_step=True)
                    validation = new("plain", seed=0, **options)
                    if case == "look":
                        look(validation, 0)
                    elif rank == 0 or case == "all":
                        list(validation)
            dist.barrier()

        own = dist.new_group()

        def passes(loader, n, *, trains=True):
            iterator = iter(loader)
            for _ in range(n):
                next(iterator)
                dist.all_reduce(torch.ones(1), group=own if trains else None)

        def in_own_group(loader, *, in_step):
            if rank == 0:
                epoch(loader)
            for _ in range(3):
                for minibatch in loader:
                    dist.all_reduce(torch.ones(1), group=own)
                if in_step:
                    dist.barrier()

        def said(function, *arguments, **options):
            with warned() as texts:
                error = refusal(function, *arguments, **options)
            dist.barrier()
            return [each for each in texts if "since epoch" in each], error

        for kind in kinds:
            found[f"apart {kind}"] = said(in_own_group, new(kind, seed=0), in_step=False)
            found[f"barrier {kind}"] = said(in_own_group, new(kind, seed=0), in_step=True)
            loader = new(kind, seed=0)
            passes(loader, 1)
            found[f"one {kind}"] = said(passes, loader, 1)
            loader = new(kind, seed=0)
            with torch.no_grad():
                passes(loader, 2)
                found[f"evaluation {kind}"] = said(passes, loader, 2)
            loader = new(kind, seed=0)
            passes(loader, 2, trains=False)
            found[f"by all {kind}"] = said(passes, loader, 2, trains=False)

        # A look that stays open.
        loader = new("plain", seed=0)
        if rank == 0:
            kept = iter(loader)
            next(kept)
        found["open"] = [epoch for _ in range(7) for epoch in train(loader, in_step=True)]
        found["open epoch"] = loader.state_dict()["epoch"]
        dist.barrier()

        # Collectives of NCCL, which do not wait for others.
        get_backend, dist.get_backend = dist.get_backend, lambda *_: "nccl"
        begun = [dist.barrier(async_op=True)]
        peeked, loader = make(seed=0), make(seed=0).loader()
        look(peeked, 0)
        begun.append(dist.barrier(async_op=True))
        found["nccl"] = [peeked.state_dict()]
        for n in (2, 2, 3, 2):
            time.sleep(rank / 10)
            for k, minibatch in enumerate(loader, 1):
                begun.append(dist.all_reduce(torch.ones(1), async_op=True))
                found["nccl"].append(loader.state_dict())
                if k == n:
                    break
        for each in begun:
            each.wait()
        dist.get_backend = get_backend

        # The group is made again within epochs.
        loader = new("plain", seed=0)
        found["made again"] = []
        for number in range(3):
            for k, minibatch in enumerate(loader, 1):
                dist.barrier()
                if k == 2:
                    dist.destroy_process_group()
                    # Through a store of its own: in the first, addresses may be those of before.
                    meeting_point = f"file://{folder}/meeting {number}"
                    ranks = dict(rank=rank, world_size=2)
                    dist.init_process_group("gloo", init_method=meeting_point, **ranks)
                if k == 4:
                    break
            found["made again"].append(loader.state_dict()["epoch"])

        # The rank that has the store is gone.
        loader = new("plain", seed=0)
        for n in (5, 1):
            for k, minibatch in enumerate(loader, 1):
                dist.all_reduce(torch.ones(1))
                if k == n:
                    break
        found["store gone"] = [loader.state_dict()]
        dist.barrier()
        store = type(dist.distributed_c10d._get_default_store())

        def fail(*_):
            raise RuntimeError("Connection reset by peer")

        for name in ("check", "get", "multi_get", "set"):
            setattr(store, name, fail)
        found["store gone"].append(loader.state_dict())
        with open(f"{folder}/{rank}.json", "w") as file:
            json.dump(found, file)
        os._exit(0)
        """,
    )


@pytest.mark.parametrize("kind", KINDS)
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


def assert_whole(epochs: list[list[int]]) -> None:
    assert [sum(times > 0 for times in seen) for seen in epochs] == [N_ROWS] * len(epochs)


def test_a_dataset_that_one_rank_makes_by_itself_is_no_reason_to_lose_cells(apart):
    """Seeds are shared by datasets in the order in which they are made."""
    for rank in apart:
        assert_whole(rank["another, with a seed"])
        for said in (rank[f"another {kind} {in_step}"] for kind in KINDS for in_step in (0, 1)):
            assert isinstance(said, str)
            assert "\n" not in said
            assert said.startswith("ranks train on different datasets, so that cells are missing: ")
            assert "make the same datasets in the same order on all ranks" in said


def test_a_rank_that_validated_alone_once_is_told_of_its_epoch(apart):
    """Not that it trains on another dataset, though nobody gave a seed."""
    for rank in apart:
        for epochs in rank["trained"]:
            assert_whole(epochs)
        first, second = rank["validated"]
        assert first is None
        assert second.startswith("ranks are in different epochs, so that cells are missing: rank")


def test_a_rank_that_alone_validates_is_told_that_it_gets_a_share(apart):
    """On a new dataset each time; one that it keeps is refused, as above."""
    said = (
        "only rank 0 iterated over a dataset, and got one of 2 shares of its cells; iterate over "
        "it on all ranks, or give rank=0, world_size=1 to one that a rank makes by itself"
    )
    for case in ("whole", "all", "look", "share"):
        expected = [[said, said] if case == "share" else [], []]
        assert [rank[f"validates {case}"] for rank in apart] == expected, case


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_apart_in_the_only_epoch_that_they_pass_say_so(apart, kind):
    """The first has taken several minibatches, without a collective before others began."""
    assert [rank[f"only epoch {kind} 0"] for rank in apart] == [[], []]
    said = [each for rank in apart for each in rank[f"only epoch {kind} 1"]]
    assert said
    assert all(each.startswith("ranks are in different epochs, so that") for each in said)


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_in_a_group_of_their_own_are_reported(apart, kind):
    """Such as those of DistributedDataParallel(process_group=...), by which none are compared."""
    for rank in apart:
        for what in ("apart", "one"):
            (warning,), error = rank[f"{what} {kind}"]
            assert error is None
            assert "there were collectives in other groups, but none in the group" in warning
            assert "call torch.distributed.barrier() after each epoch" in warning
        for what in ("evaluation", "by all"):
            assert rank[f"{what} {kind}"] == [[], None]
        assert rank[f"barrier {kind}"][1].startswith("ranks are in different epochs, so that")


def test_a_look_that_stays_open_for_long_is_none_of_the_epochs(apart):
    for rank in apart:
        assert rank["open epoch"] == len(rank["open"]) == 21
        assert_whole(rank["open"])


def test_ranks_that_are_behind_may_still_begin(apart):
    """Collectives of NCCL do not wait for others."""
    expected = [(epoch, k) for epoch, n in enumerate((2, 2, 3, 2)) for k in range(1, n + 1)]
    for rank in apart:
        done = [(each["epoch"], each["progress"][-1]) for each in rank["nccl"]]
        assert done == [(0, 0), *expected]


def test_a_state_counts_where_the_group_is_made_again_or_is_gone(apart):
    for rank in apart:
        assert rank["made again"] == [0, 1, 2]
        before, after = rank["store gone"]
        assert (before["epoch"], before["progress"][2]) == (1, 1)
        assert after == before
