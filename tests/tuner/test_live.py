"""What is shown while it measures."""

import threading
from io import StringIO

from rich.console import Console

from cellfeed_tuner._commands._autotune_run import LiveDisplay


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def terminal(file):
    """A terminal of 100 columns and 20 lines."""
    return Console(file=file, force_terminal=True, width=100, height=20, color_system=None)


def test_the_stage_and_what_is_spent_are_on_one_line():
    file = StringIO()
    with LiveDisplay(terminal(file)) as display:
        display.show("throughput", 23.4, 60)
        line = file.getvalue().rstrip().splitlines()[-1]
    assert "Measuring throughput" in line
    assert line.rstrip().endswith("23 of 60 s")


def test_it_is_drawn_once_a_second_at_most_and_by_no_thread():
    file, clock = StringIO(), Clock()
    n_threads = threading.active_count()
    drawn = 0
    with LiveDisplay(terminal(file), clock=clock) as display:
        for tick in range(100):
            before = len(file.getvalue())
            clock.now = 0.1 * tick
            display.show("throughput", clock.now, 60)
            drawn += len(file.getvalue()) > before
        assert threading.active_count() == n_threads
    assert 8 <= drawn <= 11


def test_what_is_timed_and_the_fastest_so_far_are_below():
    file = StringIO()
    with LiveDisplay(terminal(file)) as display:
        display.show("throughput", 23.4, 60, "timing block size 4; fastest so far: block size 16")
        lines = [line.strip() for line in file.getvalue().rstrip().splitlines()]
    assert lines[-1] == "timing block size 4; fastest so far: block size 16"
    assert lines[-2].endswith("23 of 60 s")


def test_outside_of_a_terminal_there_is_a_line_every_15_s():
    file, clock = StringIO(), Clock()
    with LiveDisplay(Console(file=file), clock=clock) as display:
        for tick in range(40):
            clock.now = float(tick)
            display.show("throughput", tick, 60, f"timing number {tick}")
    assert file.getvalue().splitlines() == [
        "Measuring throughput ...",
        "  15 of 60 s: timing number 15",
        "  30 of 60 s: timing number 30",
    ]


def test_outside_of_a_terminal_each_stage_is_one_line():
    file = StringIO()
    with LiveDisplay(Console(file=file)) as display:
        for stage in ("machine", "entropy", "start", "throughput"):
            for tick in range(3):
                display.show(stage, tick, 3)
    assert file.getvalue().splitlines() == [
        "Inspecting the machine ...",
        "Computing label entropy ...",
        "Starting the measuring process ...",
        "Measuring throughput ...",
    ]
