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
            loader = make(seed=0, device_mesh=mesh["dp"]).loader(workers)
            found[f"epochs {workers}"] = [epoch(loader) for _ in range(2)]
        found["no seed"] = refusal(make, device_mesh=mesh["tp"])
        copy = pickle.loads(pickle.dumps(make(seed=0, device_mesh=mesh["dp"])))
        found["copied"] = epoch(copy)
        dataset = make(seed=0, device_mesh=mesh["dp"])
        found["rank"] = [dataset.rank, dataset.world_size, mesh["tp"].get_local_rank()]
        # No two ranks differ in data; and an order of ranks that is not torch's.
        one = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
        found["one"] = epoch(make(seed=0, device_mesh=one["dp"]))
        found["reversed"] = epoch(make(seed=0, device_mesh=DeviceMesh("cpu", [3, 2, 1, 0])))
        found["saved"] = loader.state_dict()

        found["two dimensions"] = refusal(make, device_mesh=mesh)
        found["both"] = refusal(make, device_mesh=mesh["dp"], rank=0, world_size=1)
        part = DeviceMesh("cpu", [0, 1])
        if rank > 1:
            found["part"] = refusal(make, device_mesh=part)

        # Ranks of one dimension begin together, those of another do not wait for them.
        parted = make(seed=0, device_mesh=mesh["dp"]).loader()
        if rank == 2:
            parted.set_epoch(1)
        found["parted"] = refusal(epoch, parted)
        """,
    )


def test_ranks_of_the_dimension_begin_together(ranks):
    """The others read other data for another model, and go on."""
    said = [rank["parted"] for rank in ranks]
    assert said[1] is said[3] is None
    assert said[0] == said[2]
    assert said[0].startswith("ranks begin different epochs: epoch=0 on rank 0, epoch=1 on rank 1;")


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
    """A mesh of one place is one order of all; ranks are as in it."""
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
        assert rank["no seed"].startswith("`seed` must be given with `device_mesh`")
        assert "`device_mesh` determines rank and world size" in rank["both"]
        if number > 1:
            assert f"must contain this process, rank {number}" in rank["part"]
