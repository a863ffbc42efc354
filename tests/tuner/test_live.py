"""What is shown while it races."""

import itertools
import threading
from io import StringIO

import pytest
from rich.console import Console

from cellfeed_tuner import Configuration, Estimate
from cellfeed_tuner._commands._live import LiveDisplay
from cellfeed_tuner._progress import Standing


def standing(block_size, speed, state, *, n_rounds=5):
    return Standing(
        configuration=Configuration(block_size=block_size, fetch_factor=64, num_workers=2),
        state=state,
        n_rounds=n_rounds,
        cells_per_second=Estimate(speed, 0.9 * speed, 1.1 * speed) if n_rounds > 3 else None,
        rough_cells_per_second=speed,
    )


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def terminal(file):
    """A terminal of 100 columns and 20 lines."""
    return Console(file=file, force_terminal=True, width=100, height=20, color_system=None)


def shown(standings):
    """The lines that are on the screen while it races."""
    file = StringIO()
    with LiveDisplay(terminal(file)) as display:
        display.watch(lambda: standings)
        display.show("throughput", 23.4, 60)
        return [line.rstrip() for line in file.getvalue().splitlines()]


def test_the_table_has_what_races_first_and_says_what_left():
    lines = shown(
        [
            standing(4, 12_000, "below floor"),
            standing(16, 5_000, "left"),
            standing(64, 8_000, "racing"),
            standing(256, 9_000, "racing", n_rounds=1),
            standing(1024, 0, "left", n_rounds=0),
        ]
    )
    assert "Measuring throughput" in lines[0]
    assert lines[0].endswith("23 of 60 s")
    assert [line.split() for line in lines[3:-1]] == [
        ["256", "64", "2", "about", "9,000", "1", "racing"],
        ["64", "64", "2", "8,000", "[7,200,", "8,800]", "5", "racing"],
        ["4", "64", "2", "12,000", "[10,800,", "13,200]", "5", "below", "floor"],
        ["16", "64", "2", "5,000", "[4,500,", "5,500]", "5", "left"],
        ["1024", "64", "2", "no", "round", "yet", "0", "left"],
    ]
    assert lines[-1] == "2 of 5 measured configurations may be the best"


def test_a_long_table_fits_the_screen():
    lines = shown([standing(n, 1_000 * n, "racing") for n in range(1, 51)])
    assert len(lines) < 20
    assert lines[-1].endswith("; 36 more are not shown")


def test_before_the_race_there_is_no_table():
    assert len(shown([])) == 1


def test_it_is_drawn_once_a_second_at_most_and_by_no_thread():
    asked, clock = list[float](), Clock()

    def standings():
        asked.append(clock.now)
        return [standing(4, 1_000, "racing")]

    n_threads = threading.active_count()
    with LiveDisplay(terminal(StringIO()), clock=clock) as display:
        display.watch(standings)
        for tick in range(100):
            clock.now = 0.1 * tick
            display.show("throughput", clock.now, 60)
        assert threading.active_count() == n_threads
    assert 8 <= len(asked) <= 10
    assert min(b - a for a, b in itertools.pairwise(asked)) >= 1 - 1e-9


def test_outside_of_a_terminal_each_stage_is_one_line():
    file = StringIO()
    with LiveDisplay(Console(file=file)) as display:
        display.watch(lambda: pytest.fail("nobody looks"))
        for stage in ("machine", "entropy", "start", "throughput"):
            for tick in range(3):
                display.show(stage, tick, 3)
    assert file.getvalue().splitlines() == [
        "Looking at the machine ...",
        "Computing label entropy ...",
        "Starting the measuring process ...",
        "Measuring throughput ...",
    ]
