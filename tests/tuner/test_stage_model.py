"""The model of stages that go on side by side, against arithmetic and a pipeline with a clock."""

import pytest

from cellfeed_tuner._explain._stage_model import StageModel, StageName

Costs = dict[StageName, float]

MANY_CORES = StageModel(cores=1000.0, n_workers=0, n_threads=1)


def pipeline(plan, read, deal, disk, n_fetches=200):
    """Return seconds per fetch where each lane does one fetch after the other.

    The disk fetches what was planned; reading begins when that is there. One fetch is planned
    while the one before it is read, and read while the one before that is dealt out.
    """
    planned = fetched = done = dealt = 0.0
    ends = list[float]()
    begun = 0.0  # reading the fetch before
    for _ in range(n_fetches):
        planned = max(planned, begun) + plan
        fetched = max(fetched, planned) + disk
        begun = max(done, fetched, ends[-1] - deal if ends else 0.0)
        done = begun + read
        dealt = max(dealt, done) + deal
        ends.append(dealt)
    half = n_fetches // 2
    return (ends[-1] - ends[half]) / (n_fetches - 1 - half)


@pytest.mark.parametrize(
    ("plan", "read", "deal", "disk"),
    [(1, 5, 1, 0), (5, 1, 1, 0), (1, 1, 5, 0), (1, 3, 2, 9), (2, 3, 2, 2)],
)
def test_with_cores_for_all_the_slowest_lane_decides(plan, read, deal, disk):
    seconds = MANY_CORES.seconds_per_cell(
        {"planning": plan, "decompression": read, "transform": deal, "disk": disk}
    )
    assert seconds == pytest.approx(pipeline(plan, read, deal, disk), rel=0.01)


def test_where_cores_are_few_all_work_is_divided_among_them():
    model = StageModel(cores=2.0, n_workers=0, n_threads=2)
    stages: Costs = {"planning": 2.0, "decompression": 10.0, "memory": 4.0, "transform": 6.0}
    # Two threads are busy for 14 each, and there is other work of 8 for the same two cores.
    assert model.seconds_per_cell(stages) == pytest.approx((2 * 14 + 8) / 2)
    assert model.seconds_per_cell(stages, without="decompression") == pytest.approx((2 * 4 + 8) / 2)


def test_waiting_for_the_disk_is_no_work():
    model = StageModel(cores=1.0, n_workers=0, n_threads=1)
    stages: Costs = {"disk": 5.0, "page cache": 1.0, "decompression": 3.0}
    assert model.seconds_per_cell(stages) == pytest.approx(6.0)  # the disk, and copying from it
    assert model.seconds_per_cell(stages, without="disk") == pytest.approx(4.0)
    assert model.seconds_per_cell(stages, without="decompression") == pytest.approx(6.0)


def test_workers_divide_lanes_but_not_transfer():
    model = StageModel(cores=16.0, n_workers=4, n_threads=1)
    stages: Costs = {"planning": 1.0, "decompression": 12.0, "transform": 1.0, "transfer": 2.0}
    assert model.seconds_per_cell(stages) == pytest.approx(12 / 4)
    assert model.seconds_per_cell(stages, without="decompression") == pytest.approx(2.0)


def test_the_training_step_comes_after_what_the_training_process_does_itself():
    alone: Costs = {"decompression": 2.0, "transform": 1.0, "consumer": 5.0}
    stages = alone | {"transfer": 0.5}
    assert MANY_CORES.seconds_per_cell(alone) == pytest.approx(5 + 1)
    model = StageModel(cores=1000.0, n_workers=1, n_threads=1)
    assert model.seconds_per_cell(stages) == pytest.approx(5 + 0.5)


def test_what_the_library_reads_waits_for_the_disk_in_between():
    model = StageModel(cores=8.0, n_workers=0, n_threads=8)
    assert model.seconds_per_cell({"disk": 5.0, "reading": 3.0}) == pytest.approx(8.0)
    assert model.seconds_per_cell({"disk": 5.0, "reading": 3.0}, without="disk") == 3.0


def test_a_difference_below_zero_is_none():
    assert MANY_CORES.seconds_per_cell({"disk": -1.0, "decompression": 2.0}) == 2.0
