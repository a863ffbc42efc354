"""States that version 1 wrote are read, and go on with the same cells, as long as there is one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cellfeed import BlockShuffling, CellDataset, ClassBalancedSampling, Streaming

STATES = json.loads(Path(__file__).with_name("golden_states.json").read_text())
STRATEGIES = {
    "blocks": BlockShuffling(8),
    "some rows": BlockShuffling(4, indices=np.arange(100, 900), drop_last=True),
    "streaming": Streaming(shuffle=True),
    "classes": ClassBalancedSampling(np.arange(1000) // 7 % 3, block_size=4),
}


def dataset(strategy: str, rank: int = 0, world_size: int = 1) -> CellDataset:
    cells = np.arange(1000, dtype=np.int64)
    return CellDataset(cells, STRATEGIES[strategy], 16, 4, seed=7, rank=rank, world_size=world_size)


@pytest.mark.parametrize("golden", STATES, ids=lambda golden: golden["name"])
def test_it_goes_on(golden: dict[str, Any]) -> None:
    for rank, expected in enumerate(golden["rows"]):
        resumed = dataset(golden["strategy"], rank, len(golden["rows"]))
        resumed.load_state_dict(golden["state"])
        assert next(iter(resumed)).tolist() == expected
