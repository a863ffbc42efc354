"""How configurations compare with the recommended one: measured, predicted, and in words."""

from dataclasses import replace
from typing import TypeVar

import pytest
from tests.tuner.reports import in_words

from cellfeed_tuner import Configuration, Estimate
from cellfeed_tuner._reports._text import fastest_below_floor

_T = TypeVar("_T")
FASTEST = Configuration(block_size=1024, fetch_factor=4)


def without_the_fastest(result):
    """Below the floor, nothing was timed."""
    configurations = tuple(
        replace(each, status="below entropy floor", cells_per_second=None, peak_memory_bytes=None)
        if each.configuration == FASTEST
        else each
        for each in result.configurations
    )
    return replace(result, configurations=configurations)


def known(value: _T | None) -> _T:
    assert value is not None
    return value


def test_the_floor_costs_what_the_fastest_below_it_gives(result_of):
    result = result_of("recommended")
    fastest = known(fastest_below_floor(result))
    assert fastest.configuration == FASTEST
    greedy = replace(result, constraints=replace(result.constraints, memory_bytes=10**8))
    untimed = known(fastest_below_floor(greedy))
    assert untimed.cells_per_second is None  # what was timed takes more than that


def test_what_was_not_timed_is_predicted(result_of):
    result = without_the_fastest(result_of("recommended"))
    fastest = known(fastest_below_floor(result))
    assert fastest.status == "below entropy floor"
    speed, ratio = known(result.predicted(fastest)), known(fastest.relative)
    assert speed.value == pytest.approx(ratio.value * 8_800)
    assert speed.low < ratio.low * 8_800 < ratio.high * 8_800 < speed.high
    assert result.predicted(result.chosen) is None


def test_the_cost_of_the_floor_is_not_always_known(result_of):
    assert fastest_below_floor(result_of("nothing feasible")) is None
    assert fastest_below_floor(result_of("ranges")) is None  # nothing below it is listed
    result = result_of("recommended")
    needed = replace(result.constraints, need_cells_per_second=1_000.0)
    assert fastest_below_floor(replace(result, constraints=needed)) is None


def test_the_cost_of_the_floor_is_said_where_it_is_known(result_of):
    result = result_of("recommended")
    (fastest,) = (each for each in result.configurations if each.configuration == FASTEST)
    ratio = Estimate(1.5, 1.2, 1.8)
    untimed = replace(fastest, cells_per_second=None, relative=ratio)
    (said,) = in_words("floor", result, untimed)
    assert said == (
        "The entropy floor of 0.95 costs throughput: block size 1024, fetch factor 4, 0 workers, "
        "with 20.0% of random sampling's entropy, is predicted to be 1.50x [1.20x, 1.80x] as fast."
    )
    for ratio in (Estimate(1.1, 0.9, 1.3), Estimate(0.8, 0.7, 0.9)):
        assert in_words("floor", result, replace(fastest, relative=ratio)) == []


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Estimate(1.12, 1.05, 1.2), "slower"),
        (Estimate(1.1, 0.95, 1.3), "undecided whether it is slower"),
        (Estimate(1.0, 0.95, 1.05), "equally fast, but takes 1 worker process"),
    ],
)
def test_why_a_rival_was_not_chosen(result_of, ratio, said):
    result = result_of("recommended")
    rival = result.recommended.rivals[0].configuration
    (each,) = (each for each in result.configurations if each.configuration == rival)
    each = replace(each, relative=Estimate(1 / ratio.value, 1 / ratio.high, 1 / ratio.low))
    assert in_words("why_not", result, each) == [said]


@pytest.mark.parametrize(
    ("ratio", "said"),
    [
        (Estimate(1.01, 0.95, 1.07), "As fast: block size 64, fetch factor 64, 1 worker (0.99x"),
        (Estimate(1.06, 0.97, 1.16), "was 0.94x [0.86x, 1.03x] as fast as this; take any, or"),
        (Estimate(1.06, 1.02, 1.1), "Slower: block size 64, fetch factor 64, 1 worker (0.94x"),
    ],
)
def test_a_rival_is_equally_fast_undecided_or_slower(result_of, ratio, said):
    result = result_of("recommended")
    rival = replace(result.recommended.rivals[0], ratio=ratio)
    result = replace(result, recommended=replace(result.recommended, rivals=(rival,)))
    (sentence,) = in_words("rivals", result)
    assert said in sentence


def test_what_was_only_timed_and_may_be_faster_is_undecided(result_of):
    result = result_of("not compared")
    rival = result.configurations[7]

    def said(low, *, peak_memory_bytes=400_000_000):
        each = replace(
            rival, relative=Estimate(0.9, low, 0.81 / low), peak_memory_bytes=peak_memory_bytes
        )
        grid = [result.chosen, each]
        return in_words("rivals", replace(result, configurations=grid))

    (sentence,) = said(0.8)
    assert sentence.startswith(f"Undecided: {rival.configuration} was 0.90x [0.80x, 1.01x] as fast")
    assert sentence.endswith("to compare them.")
    assert said(0.85) == said(0.8, peak_memory_bytes=10**12) == []


@pytest.mark.parametrize(
    ("chance", "said"),
    [
        (None, []),
        (0.3, []),
        (0.4, ["Undecided: a configuration that was not timed is probably faster"]),
    ],
)
def test_what_may_well_be_faster_is_said(result_of, chance, said):
    result = result_of("not compared")
    recommended = replace(result.recommended, chance_of_faster=chance)
    found = in_words("rivals", replace(result, recommended=recommended))
    assert [each[: len(start)] for each, start in zip(found, said, strict=True)] == said
    assert all("a larger --budget" in each for each in found)
