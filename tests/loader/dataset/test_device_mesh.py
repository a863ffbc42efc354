"""Ranks of one place along a dimension of a device mesh are given the same rank."""

from typing import Any

import pytest
from tests.loader.dataset.torchrun import assert_divided, torchrun

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
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        place = dict(rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size())
        for workers in (0, 2):
            loader = make(seed=0, **place).loader(workers)
            found[f"epochs {workers}"] = [epoch(loader) for _ in range(2)]
        found["no seed"] = refusal(make, **place)
        found["copied"] = epoch(pickle.loads(pickle.dumps(make(seed=0, **place))))
        found["saved"] = loader.state_dict()
        """,
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_of_one_place_get_the_same_minibatches(ranks, workers):
    epochs = [rank[f"epochs {workers}"] for rank in ranks]
    assert epochs[0] == epochs[1] != epochs[2] == epochs[3]
    for number in range(2):
        assert_divided([epochs[0][number], epochs[2][number]], N_ROWS)


def test_a_copy_has_the_same_place(ranks):
    assert ranks[0]["copied"] == ranks[1]["copied"] != ranks[2]["copied"] == ranks[3]["copied"]
    assert_divided([ranks[0]["copied"], ranks[2]["copied"]], N_ROWS)
    assert all(rank["saved"] == ranks[0]["saved"] for rank in ranks)


def test_a_seed_is_required(ranks):
    for rank in ranks:
        assert rank["no seed"].startswith("`seed` must be given with world_size=2")
