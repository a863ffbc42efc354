"""What ``autotune`` prints in a terminal, from results made by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from cellfeed_tuner import Configuration, Estimate
from cellfeed_tuner._reports._speed_interval import interval
from cellfeed_tuner._reports._terminal import print_report


def printed_grid(result, capsys):
    print_report(result, Path("autotune.json"))
    printed = capsys.readouterr().out
    return printed[printed.index("\nblock fetch") :].split("\n\n")[0]


def of_large_figures(result):
    """The same result, of a fast machine with much memory, large minibatches and many labels."""
    speed = Estimate(1_234_567.0, 1_200_000.0, 1_300_000.0)
    each, settings = result.configurations[0], Configuration(
        block_size=65_536, fetch_factor=1024, num_workers=128
    )  # fmt: skip
    bits = Estimate(10.25, 10.2, 10.3)
    entropy = replace(
        each.entropy_bits, measured=bits, expected=bits, lower_bound=10.5, upper_bound=11.5,
        random=11.5,
    )  # fmt: skip
    large = replace(
        each, configuration=settings, status="measured", cells_per_second=speed,
        peak_memory_bytes=123_456_000_000, entropy_bits=entropy,
    )  # fmt: skip
    return replace(result, configurations=(large, *result.configurations[1:]))


def test_the_grid_fits_into_80_columns(any_result, capsys):
    for result in (any_result, of_large_figures(any_result)):
        grid = printed_grid(result, capsys)
        assert len(grid.splitlines()) > 2
        assert max(len(line.rstrip()) for line in grid.splitlines()) <= 80
        assert "\N{HORIZONTAL ELLIPSIS}" not in grid
    assert "1,235k [1,200k, 1,300k]" in grid
    assert "123.5" in grid


@pytest.mark.parametrize(
    ("speed", "shown"),
    [(999.6, "1,000"), (99_999.4, "99,999"), (99_999.6, "100.0k"), (999_949, "999.9k"),
     (999_951, "1,000k"), (9_999_499, "9,999k"), (9_999_501, "10.00M"), (0, "0")],
)  # fmt: skip
def test_in_the_grid_a_number_has_six_characters_at_most(speed, shown):
    assert interval(Estimate(speed, speed, speed), shorten=True) == f"{shown} [{shown}, {shown}]"


@pytest.mark.parametrize(("spread", "is_said"), [(0.05, False), (0.18, True), (None, False)])
def test_that_replicates_differ_much_is_said(result_of, capsys, spread, is_said):
    result = replace(result_of("recommended"), replicate_spread=spread)
    print_report(result, Path("autotune.json"))
    assert ("gave figures 18% apart" in capsys.readouterr().out) == is_said
    assert result.to_json()["replicate_spread"] == spread


def test_a_busy_machine_is_said(result_of, capsys):
    print_report(result_of("busy"), Path("autotune.json"))
    said = " ".join(capsys.readouterr().out.split())
    assert "Other programs took 35% of the processors while throughput was measured" in said
    print_report(result_of("recommended"), Path("autotune.json"))
    assert "Other programs" not in capsys.readouterr().out


def test_files_that_are_read_slowly_are_said(result_of, capsys):
    result = result_of("recommended")
    line = "plates/p3.h5ad: `X` is read slowly, through h5py: filter blosc2 is not supported; no"
    print_report(result, Path("autotune.json"))
    assert "read slowly" not in capsys.readouterr().out
    slow = replace(result, dataset=replace(result.dataset, slow_reading=line))
    print_report(slow, Path("autotune.json"))
    assert line in " ".join(capsys.readouterr().out.split())
    assert slow.to_json()["dataset"]["slow_reading"] == line


def test_what_was_killed_and_tried_again_is_said(result_of, capsys):
    result = result_of("recommended")
    killed = replace(result.configurations[0], note="killed once, and tried again")
    result = replace(result, configurations=(killed, *result.configurations[1:]))
    print_report(result, Path("autotune.json"))
    said = " ".join(capsys.readouterr().out.split())
    assert f"{killed.configuration} measured: killed once, and tried again" in said
