"""The model of stages that go on side by side, against arithmetic and a pipeline with a clock."""

from typing import Any

import pytest

from cellfeed_tuner import StageModel

Costs = dict[Any, float]

MANY_CORES = StageModel(cores=1000.0, num_workers=0, num_threads=1)


def pipeline(plan, read, deliver, n_fetches=200):
    """Return seconds per fetch where each lane does one fetch after the other.

    One fetch is planned while the one before it is read, and read while the one before that is
    delivered.
    """
    planned = done = delivered = begun = 0.0
    ends = list[float]()
    for _ in range(n_fetches):
        planned = max(planned, begun) + plan
        begun = max(done, planned, ends[-1] - deliver if ends else 0.0)
        done = begun + read
        delivered = max(delivered, done) + deliver
        ends.append(delivered)
    half = n_fetches // 2
    return (ends[-1] - ends[half]) / (n_fetches - 1 - half)


@pytest.mark.parametrize(
    ("plan", "read", "deliver"), [(1, 5, 1), (5, 1, 1), (1, 1, 5), (1, 3, 2), (2, 3, 2)]
)
def test_with_cores_for_all_the_slowest_lane_decides(plan, read, deliver):
    seconds = MANY_CORES.seconds_per_cell(
        {"planning": plan, "decompressing": read, "making_tensors": deliver}
    )
    assert seconds == pytest.approx(pipeline(plan, read, deliver), rel=0.01)


def test_threads_divide_what_they_are_busy_with():
    model = StageModel(cores=1000.0, num_workers=0, num_threads=4)
    stages: Costs = {"reading": 4.0, "decompressing": 6.0, "placing": 2.0, "library": 5.0}
    assert model.seconds_per_cell(stages) == pytest.approx((4 + 6 + 2) / 4 + 5)
    assert model.seconds_per_cell({"densifying": 8.0}) == pytest.approx(8 / 4)


def test_where_cores_are_few_all_work_is_divided_among_them():
    model = StageModel(cores=2.0, num_workers=0, num_threads=2)
    stages: Costs = {
        "planning": 2.0,
        "decompressing": 20.0,
        "placing": 8.0,
        "making_tensors": 6.0,
    }
    assert model.seconds_per_cell(stages) == pytest.approx((2 + 20 + 8 + 6) / 2)
    assert model.seconds_per_cell(stages, without="decompressing") == pytest.approx((2 + 8 + 6) / 2)


def test_waiting_for_bytes_is_no_work():
    model = StageModel(cores=1.0, num_workers=0, num_threads=2)
    stages: Costs = {"reading": 10.0, "decompressing": 3.0}
    assert model.seconds_per_cell(stages) == pytest.approx(13 / 2)
    assert model.seconds_per_cell(stages, without="reading") == pytest.approx(3.0)
    assert model.seconds_per_cell(stages, without="decompressing") == pytest.approx(5.0)


def test_workers_divide_all_lanes_but_training():
    model = StageModel(cores=16.0, num_workers=4, num_threads=1)
    stages: Costs = {"planning": 1.0, "decompressing": 12.0, "sending": 8.0, "training": 2.5}
    assert model.seconds_per_cell(stages) == pytest.approx(12 / 4)
    assert model.seconds_per_cell(stages, without="decompressing") == pytest.approx(2.5)
    assert model.seconds_per_cell({"sending": 8.0}) == pytest.approx(8 / 4)


def test_the_training_step_comes_after_what_the_training_process_does_itself():
    stages: Costs = {"decompressing": 2.0, "making_tensors": 1.0, "functions": 0.5, "training": 5.0}
    assert MANY_CORES.seconds_per_cell(stages) == pytest.approx(5 + 1 + 0.5)


def test_functions_with_threads_of_their_own_hold_nobody_up():
    model = StageModel(cores=2.0, num_workers=0, num_threads=2, num_function_threads=8)
    assert model.seconds_per_cell({"functions": 8.0, "training": 0.5}) == pytest.approx(1.0)
    assert model.seconds_per_cell({"functions": 8.0, "decompressing": 6.0}) == pytest.approx(3.0)


def test_less_than_none_is_none():
    assert MANY_CORES.seconds_per_cell({"reading": -1.0, "decompressing": 2.0}) == 2.0
