"""Ranks that torchrun starts: each has its part of every epoch, with nothing said about it."""

from typing import Any

import pytest
from tests.loader.dataset.torchrun import assert_divided, torchrun

pytest.importorskip("torch")

N_ROWS = 101


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    """Two epochs of datasets made before and after ranks met, whose seed nobody gave."""
    return torchrun(
        tmp_path_factory.mktemp("torchrun"),
        request.param,
        """
        made = [[when, workers] for when in ("before", "after") for workers in (0, 2)]
        before = {workers: make() for workers in (0, 2)}
        dist.init_process_group("gloo")
        for when, workers in made:
            loader = (before[workers] if when == "before" else make()).loader(workers)
            found[f"{when} {workers}"] = [epoch(loader) for _ in range(2)]
        """,
    )


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_every_epoch(ranks, when, workers):
    epochs_of_ranks = [rank[f"{when} {workers}"] for rank in ranks]
    for number in range(2):
        assert_divided([epochs[number] for epochs in epochs_of_ranks], N_ROWS)
    assert epochs_of_ranks[0][0] != epochs_of_ranks[0][1]
