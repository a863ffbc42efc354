"""Ranks of one place along a dimension of a device mesh see the same minibatches."""

from typing import Any

import numpy as np
import pytest
from tests.loader.dataset.torchrun import assert_divided, torchrun

from cellfeed import BlockShuffling, CellDataset, ParameterError

pytest.importorskip("torch")
pytestmark = pytest.mark.process

N_ROWS = 101


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[str, Any]]:
    """Four of them: two that differ in data, times two that share a model."""
    return torchrun(
        tmp_path_factory.mktemp("mesh"),
        4,
        """
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        before = make()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        found["no mesh"] = epoch(before)
        for workers in (0, 2):
            loader = make(device_mesh=mesh["dp"]).loader(workers)
            found[f"epochs {workers}"] = [epoch(loader) for _ in range(2)]
        copy = pickle.loads(pickle.dumps(make(device_mesh=mesh["dp"])))
        found["copied"] = epoch(copy)
        dataset = make(device_mesh=mesh["dp"])
        found["rank"] = [dataset.rank, dataset.world_size, mesh["tp"].get_local_rank()]
        # No two ranks differ in data; and an order of ranks that is not torch's.
        one = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        found["one"] = epoch(make(device_mesh=one["dp"]))
        found["reversed"] = epoch(make(device_mesh=DeviceMesh("cpu", [3, 2, 1, 0])))
        found["saved"] = loader.state_dict()

        found["two dimensions"] = refusal(make, device_mesh=mesh)
        found["both"] = refusal(make, device_mesh=mesh["dp"], rank=0, world_size=1)
        part = DeviceMesh("cpu", [0, 1])
        if rank > 1:
            found["part"] = refusal(make, device_mesh=part)

        other = make(seed=0) if rank == 3 else make(seed=0, device_mesh=mesh["dp"])
        if rank == 3:
            dist.barrier()
        found["other"] = refusal(epoch, other)
        if rank < 3:
            dist.barrier()

        # Trainings with collectives of a mesh only, none of which is among all ranks.
        groups = [mesh[name].get_group() for name in ("dp", "tp")]

        def step():
            for group in groups:
                dist.all_reduce(torch.ones(1), group=group)

        def train(loader, n):
            rows = []
            for minibatch in loader:
                rows.append(np.asarray(minibatch).tolist())
                step()
                if len(rows) == n:
                    break
            return rows

        for name, given in (("dp", mesh["dp"]), ("all", None)):
            loader = make(seed=0, device_mesh=given).loader()
            if rank == 0:
                next(iter(loader))
            step()
            found[f"{name}: once"] = [train(loader, 1) for _ in range(4)]
            found[f"{name}: state"] = loader.state_dict()
            found[f"{name}: left"] = [train(loader, n) for n in (2, 3)]
            found[f"{name}: whole"] = train(loader, None)
            whole = make(seed=0, device_mesh=given).loader()
            found[f"{name}: expected"] = [epoch(whole) for _ in range(7)]
            dist.barrier()
        looked = make(seed=0, device_mesh=mesh["dp"]).loader()
        found["looked"] = []
        for minibatch in looked:
            found["looked"].append(np.asarray(minibatch).tolist())
            step()
            if len(found["looked"]) == 2 and mesh["tp"].get_local_rank() == 0:
                next(iter(looked))
        found["after a look"] = train(looked, None)
        parted = make(seed=0, device_mesh=mesh["dp"]).loader()
        if rank == 2:
            parted.set_epoch(1)
        iterator = iter(parted)
        for _ in range(3):
            next(iterator)
            step()
        found["parted"] = refusal(lambda: next(iterator) is None)
        """,
    )


@pytest.mark.parametrize("name", ["dp", "all"])
def test_epochs_that_are_left_count_by_collectives_of_a_mesh(ranks, name):
    for rank in ranks:
        expected = rank[f"{name}: expected"]
        assert rank[f"{name}: once"] == [each[:1] for each in expected[:4]]
        assert rank[f"{name}: state"]["epoch"] == 3
        assert rank[f"{name}: left"] == [expected[4][:2], expected[5][:3]]
        assert rank[f"{name}: whole"] == expected[6]
    assert all(rank[f"{name}: state"] == ranks[0][f"{name}: state"] for rank in ranks)


def test_looks_of_one_rank_in_each_place_do_not_count(ranks):
    for rank in ranks:
        assert [rank["looked"], rank["after a look"]] == rank["dp: expected"][:2]


def test_ranks_that_meet_one_in_another_epoch_say_so(ranks):
    """As they end, the next collectives of rank 1 fail, which is in no group with rank 2."""
    assert ranks[1]["parted"] is None
    for number in (0, 2, 3):
        said = ranks[number]["parted"]
        assert said.startswith("ranks are in different epochs, so that cells are missing: ")
        assert "rank 2 began epoch 1" in said


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_one_place_get_the_same_minibatches(ranks, workers):
    epochs = [rank[f"epochs {workers}"] for rank in ranks]
    assert epochs[0] == epochs[1] != epochs[2] == epochs[3]
    for number in range(2):
        assert_divided([epochs[0][number], epochs[2][number]], N_ROWS)


def test_a_copy_has_the_same_place(ranks):
    assert ranks[0]["copied"] == ranks[1]["copied"] != ranks[2]["copied"] == ranks[3]["copied"]
    assert_divided([ranks[0]["copied"], ranks[2]["copied"]], N_ROWS)
    assert [rank["rank"] for rank in ranks] == [[0, 2, 0], [0, 2, 1], [1, 2, 0], [1, 2, 1]]
    assert all(rank["saved"] == ranks[0]["saved"] for rank in ranks)


def test_other_meshes_and_none(ranks):
    """A mesh of one place is one order of all, though nobody gave a seed; ranks are as in it."""
    assert_divided([ranks[0]["one"]], N_ROWS)
    assert all(rank["one"] == ranks[0]["one"] for rank in ranks)
    assert_divided([rank["reversed"] for rank in ranks], N_ROWS)
    assert_divided([rank["no mesh"] for rank in ranks], N_ROWS)


def test_a_mesh_that_says_no_rank_is_refused(ranks):
    mesh: Any = "dp"
    with pytest.raises(ParameterError, match="must be a DeviceMesh with one dimension, but got"):
        CellDataset(np.arange(9), BlockShuffling(4), 8, device_mesh=mesh)
    for number, rank in enumerate(ranks):
        assert "must be a DeviceMesh with one dimension" in rank["two dimensions"]
        assert "such as mesh['dp']" in rank["two dimensions"]
        assert "`device_mesh` determines rank and world size" in rank["both"]
        if number > 1:
            assert f"must contain this process, rank {number}" in rank["part"]


def test_a_rank_without_the_mesh_is_reported(ranks):
    assert [rank["other"] for rank in ranks[:3]] == [None, None, None]
    assert "world_size=4 on rank 3, world_size=2 on rank 0" in ranks[3]["other"]
