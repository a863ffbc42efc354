"""How many fetches to read ahead of a server, held against links of which the truth is known."""

from dataclasses import dataclass, field

import pytest
from tests.tuner.reports import printed, said_of
from tests.tuner.simulated import (
    CountedRounds,
    Findings,
    Outcome,
    TimingRequest,
    prefetch_search,
    timed,
)

from cellfeed.bytes._remote._scheduler import Window
from cellfeed.dataset import _cell_dataset
from cellfeed.stages import begin_with_requests
from cellfeed_tuner import Configuration
from cellfeed_tuner._constants import REMOTE_PREFETCH

CHOSEN = Configuration(block_size=16, fetch_factor=4)


@dataclass
class FarServer:
    """A link that brings a fetch in a round trip, and one after the other no faster than `rate`."""

    rate: float = 0.021
    n_requests: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def clock(self) -> float:
        return 0.0

    def run(self, request: TimingRequest, *, limit_seconds: float) -> Outcome:
        assert request.configuration == CHOSEN
        assert request.prefetch is not None
        self.depths.append(request.prefetch)
        self.n_requests.append(request.n_requests)
        number = len(self.depths)
        seconds = max(0.1 / request.prefetch, self.rate) * (1 + 0.002 * (number % 3))
        found = [Findings(n_requests=40 + number)]
        return timed(9 * [seconds], n_new=1, memory=100 + 1000 * request.prefetch, findings=found)


@pytest.mark.parametrize(
    ("rate", "best"),
    [(1.0, 1), (0.1, 1), (0.05, 2), (0.025, 4), (0.0125, 8), (0.0, 16)],
)
def test_the_fewest_fetches_that_give_all_that_the_link_has_are_chosen(rate, best):
    search = prefetch_search(FarServer(rate), CHOSEN)
    search.run([1, 2, 4, 8, 16])
    assert search.best() == best
    found = search.results()
    assert [each.prefetch for each in found] == [1, 2, 4, 8, 16]
    for each in found:
        assert each.cells_per_second is not None
        true = 4 * 64 / max(0.1 / each.prefetch, rate)
        assert each.cells_per_second.value == pytest.approx(true, rel=0.01)


def test_what_is_clearly_slower_leaves_and_what_is_as_fast_is_measured_often():
    search = prefetch_search(FarServer(rate=0.025), CHOSEN)
    search.run([1, 2, 4, 8, 16])
    turns = {each.prefetch: each.n_turns for each in search.results()}
    assert turns[1] < turns[4] >= 4


def test_what_takes_more_memory_than_there_is_is_not_chosen():
    search = prefetch_search(FarServer(rate=0.0), CHOSEN, memory_bytes=5000)
    search.run([1, 2, 4, 8, 16])
    assert search.best() == 4
    assert search.memory_of(4) == 4100


def test_without_time_for_two_turns_or_with_one_depth_nothing_is_chosen():
    search = prefetch_search(FarServer(), CHOSEN, left=0.0)
    search.run([1, 2])
    assert search.best() is None
    search = prefetch_search(server := FarServer(), CHOSEN)
    search.run([1])
    assert (search.best(), server.depths) == (None, [])
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
    server = FarServer()
    prefetch_search(server, CHOSEN).run([1, 2])
    assert server.n_requests[:3] == [0, 41, 42]
    begin_with_requests(42)
    assert Window().limit == 42
    begin_with_requests(10_000)
    assert Window().limit == 256
