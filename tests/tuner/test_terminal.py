"""What ``autotune`` prints in a terminal, from results made by hand."""

from dataclasses import replace

import pytest
from tests.tuner.reports import printed, said_of

MOST_LINES = 24


def test_the_answer_fits_on_one_screen(any_result):
    text = printed(any_result)
    answer = text.split("\nTo train with it:")[0]
    assert len(answer.splitlines()) < MOST_LINES
    said = " ".join(text.split())
    if any_result.loader_fault is not None:
        assert said.startswith("THE LOADER DELIVERS WRONG DATA: do not train with it.")
    elif any_result.recommended is None:
        assert said.startswith("No configuration is feasible. ")
    else:
        assert said.startswith(f"Recommended: {any_result.recommended.settings} ")
        assert any_result.recommended.reason in said
        assert "CellDataset.from_autotune(" in said


def test_what_was_not_measured_is_counted_with_its_reasons(result_of):
    said = said_of(result_of("recommended"))
    assert (
        "Not measured: 1 over the memory limit, 1 below the entropy floor, 1 failed, 1 not timed "
        "(budget exhausted), 1 too large for the collection, 1 predicted slower than the best."
    ) in said
    reasons = said.partition("than the best.")[2].partition("To train with it")[0]
    assert reasons.count(" workers: ") + reasons.count(" worker: ") == 1  # of what failed


@pytest.mark.parametrize(("spread", "is_said"), [(0.05, False), (0.18, True), (None, False)])
def test_that_replicates_differ_much_is_said(result_of, spread, is_said):
    result = replace(result_of("recommended"), replicate_spread=spread)
    said = said_of(result)
    assert ("of a configuration differ by 18%" in said) == is_said
    assert result.to_json()["replicate_spread"] == spread


@pytest.mark.parametrize("kind", ["inside", "assumptions", "outside"])
def test_a_verdict_is_printed_only_where_the_choice_is_outside(result_of, kind):
    result = result_of("recommended")
    assert result.chosen is not None
    judged = {each.verdict.kind: each.verdict for each in result.configurations if each.verdict}
    configurations = tuple(
        replace(each, verdict=judged[kind]) if each == result.chosen else each
        for each in result.configurations
    )
    said = said_of(replace(result, configurations=configurations))
    assert (judged["outside"].sentence in said) == (kind == "outside")
    assert not any(judged[each].sentence in said for each in ("inside", "assumptions"))


def test_a_busy_machine_is_said(result_of):
    said = said_of(result_of("busy"))
    assert "Other programs took 35% of the processors while throughput was measured" in said
    assert "Other programs" not in printed(result_of("recommended"))


def test_files_that_are_read_slowly_are_said(result_of):
    result = result_of("recommended")
    line = "plates/p3.h5ad: `X` is read slowly, through h5py: filter blosc2 is not supported; no"
    assert "read slowly" not in printed(result)
    slow = replace(result, dataset=replace(result.dataset, slow_reading=line))
    assert line in said_of(slow)
    assert slow.to_json()["dataset"]["slow_reading"] == line
