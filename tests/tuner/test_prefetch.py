"""How many fetches to read ahead of a server, held against links of which the truth is known."""

from typing import Any

import pytest
from tests.tuner.reports import printed, said_of
from tests.tuner.simulated import (
    CountedRounds,
    Findings,
    Found,
    Machine,
    Outcome,
    TimingRequest,
    entropy_of,
    searched,
    timed,
)

from cellfeed.bytes._remote._objects import Window
from cellfeed.dataset import _cell_dataset
from cellfeed.stages import begin_with_requests
from cellfeed_tuner import Configuration
from cellfeed_tuner._constants import REMOTE_PREFETCH
from cellfeed_tuner._run import PREFETCHES

CHOSEN = Configuration(block_size=16, fetch_factor=4)


class FarServer(Machine):
    """A link that brings a fetch in a round trip, and one after the other no faster than `rate`."""

    def __init__(self, rate: float = 0.021) -> None:
        super().__init__(cost=lambda _: 1e-4)
        self.rate, self.n_requests = rate, list[int]()

    def seconds(self, each: Configuration) -> float:
        """Time of a fetch."""
        return max(0.1 / float(each["prefetch"]), self.rate)  # type: ignore[arg-type]

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        each = request.configuration
        self.asked.append(each)
        self.n_requests.append(request.n_requests)
        number = len(self.asked)
        self.now += (found := self.seconds(each) * (1 + 0.002 * (number % 3))) * 9
        memory = 100 + 1000 * int(float(each["prefetch"]))  # type: ignore[arg-type]
        findings = [Findings(n_requests=40 + number)]
        return timed(9 * [found], n_new=1, memory=memory, findings=findings)


def search(server: FarServer, *, budget: float = 200.0, memory: int = 10**9) -> Found:
    grid = [CHOSEN.changed(prefetch=depth) for depth in PREFETCHES]
    mixed = {each.plan_settings: {"plate": entropy_of(1.0, 1.0)} for each in grid}
    options: dict[str, Any] = {"memory": memory, "budget": budget, "row_bytes": 1e-6}
    return searched(server, grid, mixed, cache="remote", **options)


@pytest.mark.parametrize(
    ("rate", "best"),
    [(1.0, 1), (0.1, 1), (0.05, 2), (0.025, 4), (0.0125, 8), (0.0, 16)],
)
def test_the_fewest_fetches_that_give_all_that_the_link_has_are_chosen(rate, best):
    server = FarServer(rate)
    found = search(server)
    assert found.chosen["prefetch"] == best
    assert [each.configuration["prefetch"] for each in found.results] == [1, 2, 4, 8, 16]
    for each in found.results:
        assert each.cells_per_second is not None
        true = 4 * 64 / server.seconds(each.configuration)
        assert each.cells_per_second.value == pytest.approx(true, rel=0.02)


def test_what_is_clearly_slower_leaves_and_what_is_as_fast_is_measured_often():
    asked = search(FarServer(rate=0.025)).asked
    turns = {depth: asked.count(CHOSEN.changed(prefetch=depth)) for depth in PREFETCHES}
    assert turns[1] < max(turns[4], turns[8], turns[16]) >= 4


def test_what_takes_more_memory_than_there_is_is_not_chosen():
    found = search(FarServer(rate=0.0), memory=5000)
    assert found.chosen["prefetch"] == 4


def test_without_time_nothing_is_compared():
    choice = search(FarServer(), budget=1.0).choice
    assert choice is None or choice.basis != "compared"
    assert REMOTE_PREFETCH == _cell_dataset._REMOTE_PREFETCH  # the default of both


def counted(seconds, **parameters):
    rounds = CountedRounds(**parameters)
    n = parameters["n_rounds"]
    return [rounds.counts(number % n, each) for number, each in enumerate(seconds)]


def test_of_files_of_this_machine_all_rounds_but_the_first_count():
    local = {"n_rounds": 3, "n_asked": 0}
    assert counted([1] * 6, **local, has_workers=False) == [False, True, True, True, True, True]
    assert counted([1] * 6, **local, has_workers=True) == [False, True, True, False, True, True]


def test_rounds_into_new_memory_count_in_no_long_epoch():
    local = {"n_rounds": 6, "n_asked": 0}
    first, whole = [False, False, True, True, True, True], [True] * 6
    assert counted([1] * 12, **local, has_workers=False) == first + whole
    # Workers are started anew in each, so that shorter epochs pay for it.
    assert counted([1] * 6, **local, has_workers=True) == [False, *[True] * 5]
    of_workers = counted([1] * 40, n_rounds=20, n_asked=0, has_workers=True)
    assert of_workers == 2 * [False, False, *[True] * 18]


def test_what_was_asked_for_at_the_start_counts_in_no_long_epoch():
    # One round trip, then all that was asked for with it, then one round trip after the other.
    seconds = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    found = counted(seconds, n_rounds=12, n_asked=2, has_workers=False)
    assert found == [False] * 3 + [True] * 9
    timed = [each for each, counts in zip(seconds, found, strict=True) if counts]
    assert sum(timed) / len(timed) == pytest.approx(1 / 3)


def test_a_short_epoch_counts_as_a_whole_and_measuring_ends_with_one():
    rounds = CountedRounds(n_rounds=3, n_asked=8, has_workers=False)
    seconds = [1.0, 0.1, 0.1]
    first = [rounds.counts(number, each) for number, each in enumerate(seconds)]
    assert first == [False] * 3
    assert all(rounds.counts(number, each) for number, each in enumerate(seconds))
    assert [rounds.may_end(number) for number in range(3)] == [False, False, True]


def test_reports_say_what_was_measured_and_what_was_not(result_of):
    choice = result_of("remote").recommended.configuration
    said = said_of(result_of("remote"))
    assert f"Recommended: {choice}, prefetch 4" in said
    assert (
        "Reading 4 fetches ahead (prefetch) is as fast as any other number that was compared and "
        "fits in memory." in said
    )
    assert "1: 2,300 [2,070, 2,530], 2: 4,500 [4,050, 4,950], 4: 8,700" in said
    assert "16: " not in said
    assert "storage_options=...)" in said
    said = said_of(result_of("remote, undecided"))
    assert f"Recommended: {choice} " in said
    assert "How many fetches to read ahead (prefetch) is undecided" in said
    said = printed(result_of("recommended"))  # of files of this machine
    assert "prefetch" not in said
    assert "storage_options" not in said


def test_requests_under_way_are_taken_over_by_the_next_measurement(monkeypatch):
    monkeypatch.setattr(Window, "first", Window.first)
    search(server := FarServer(), budget=30.0)
    assert server.n_requests == [0, *(40 + number for number in range(1, len(server.asked)))]
    begin_with_requests(42)
    assert Window().limit == 42
    begin_with_requests(10_000)
    assert Window().limit == 256
