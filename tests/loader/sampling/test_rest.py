"""The rest of an epoch that was stopped: exactly what would have come, or divided anew."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellfeed import BlockShuffling, EpochPlan, Streaming
from cellfeed.sampling import Progress, Share

MOST_ROWS = 40
_strategies = st.one_of(
    st.builds(BlockShuffling, st.integers(1, 6), drop_last=st.booleans()),
    st.just(Streaming()),
    st.just(Streaming(shuffle=True)),
)
SIZES = st.fixed_dictionaries(
    {
        "strategy": _strategies,
        "n_rows": st.integers(1, MOST_ROWS),
        "batch_size": st.integers(1, 9),
        "fetch_factor": st.integers(1, 5),
        "drop_last": st.booleans(),
        "seed": st.integers(0, 3),
        "epoch": st.integers(0, 3),
    }
)


def _of_share(share: Share, number: int) -> Iterator[list[int]]:
    fetch, size = share.fetch(number), share.plan.minibatch_size
    delivered = fetch.rows[fetch.order]
    assert -(-delivered.size // size) == share.n_minibatches_of(number)
    for start in range(0, delivered.size, size):
        yield delivered[start : start + size].tolist()


def _in_order(plan: EpochPlan, num_workers: int, n_delivered: int = 0) -> list[list[int]]:
    """Return what a rank gets whose workers read every n-th fetch, and go on there."""
    fetches = {
        number: [*_of_share(share, number)]
        for k in range(num_workers)
        for share in [plan.share(first=k, step=num_workers, n_delivered=n_delivered)]
        for number in share.numbers
    }
    return [each for number in sorted(fetches) for each in fetches[number]]


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_no_row_comes_twice_and_none_is_missing(times):
    """Stopped up to three times, on other numbers of ranks, streams and workers each time."""

    @settings(max_examples=times * settings().max_examples)
    @given(sizes=SIZES, data=st.data())
    def check(sizes, data):
        check_rows(sizes, data)

    check()


def check_rows(sizes: dict[str, Any], data: st.DataObject, n_together: int = 1) -> list[list[int]]:
    """Check which rows come, and return all minibatches."""
    after, minibatches, n_repeated = tuple[Progress, ...](), list[list[int]](), 0
    while True:
        n_ranks, num_workers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        n_streams = data.draw(st.integers(1, 3))  # of each rank
        streams = n_ranks * n_streams
        plans = [
            EpochPlan(**sizes, rank=rank, world_size=n_ranks, streams=streams, after=after)
            for rank in range(n_ranks)
        ]
        n = plans[0].n_minibatches
        n_wanted = n if len(after) == 3 else data.draw(st.integers(0, n))
        n_again = data.draw(st.integers(0, n_wanted))
        sizes_of_ranks = list[list[int]]()
        for plan in plans:
            assert plan.n_minibatches == n
            whole = _in_order(plan, num_workers)
            assert _in_order(plan, num_workers, n_again) == whole[n_again:]
            assert len(whole) == n
            sizes_of_ranks.append([len(each) for each in whole])
            minibatches += whole[:n_wanted]
        assert all(each == sizes_of_ranks[0] for each in sizes_of_ranks)
        n_repeated += (streams - 1) * n_together
        if n_wanted == n:
            break
        after += (Progress(world_size=streams, n_minibatches=n_wanted),)
    expected = _whole_epoch(sizes)
    seen = Counter(row for each in minibatches for row in each)
    if sizes["drop_last"]:
        assert not seen - expected
        assert (expected - seen).total() < streams * sizes["batch_size"]
    else:
        assert not expected - seen
        assert (seen - expected).total() <= n_repeated
    return minibatches


def _whole_epoch(sizes: dict[str, Any]) -> Counter[int]:
    plan = EpochPlan(**sizes | {"drop_last": False})
    return Counter(_rows(plan).tolist())


def test_a_thousand_ranks_take_over_from_eight():
    """By arithmetic alone: nothing grows with the rows, and each rank asks for its own."""
    sizes: dict[str, Any] = {
        "strategy": BlockShuffling(16),
        "n_rows": 1_000_000_007,
        "batch_size": 64,
        "fetch_factor": 64,
        "drop_last": True,
        "seed": 1,
    }
    stopped = EpochPlan(**sizes, world_size=8)
    progress = Progress(world_size=8, n_minibatches=stopped.n_minibatches - 2_000)
    plans = [
        EpochPlan(**sizes, rank=rank, world_size=1000, after=(progress,))
        for rank in (0, 1, 500, 999)
    ]
    assert plans[0].n_positions == 1_000_000_007 - 8 * progress.n_minibatches * 64
    rows = [_rows(plan) for plan in plans]
    assert len({each.size for each in rows}) == 1
    assert np.unique(np.concatenate(rows)).size == 4 * rows[0].size


def _rows(plan: EpochPlan) -> np.ndarray:
    rows = [plan.delivered_rows(k)[0] for k in range(plan.n_fetches)]
    return np.concatenate([np.empty(0, np.int64), *rows])


@given(sizes=SIZES, n_ranks=st.sampled_from([1, 2, 3, 6]))
def test_streams_are_what_as_many_ranks_would_have(sizes, n_ranks):
    """A rank joins the minibatches of its own."""
    of_streams = [_in_order(EpochPlan(**sizes, rank=rank, world_size=6), 1) for rank in range(6)]
    n = 6 // n_ranks
    for rank in range(n_ranks):
        own = of_streams[rank * n : (rank + 1) * n]
        plan = EpochPlan(**sizes, rank=rank, world_size=n_ranks, streams=6)
        assert _in_order(plan, 1) == [[*chain(*each)] for each in zip(*own, strict=True)]
