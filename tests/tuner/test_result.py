"""Results as JSON, and back."""

import json

import pytest

from cellfeed import FormatError, PathError
from cellfeed_tuner import AutotuneResult


def test_what_was_saved_is_loaded_as_it_was(any_result, tmp_path):
    path = tmp_path / "autotune.json"
    any_result.save(path)
    assert AutotuneResult.load(path) == any_result


def test_results_from_before_there_were_explanations_are_loaded(result_of, tmp_path):
    path = tmp_path / "autotune.json"
    plain = result_of("explained").to_json()
    del plain["bottleneck"], plain["storage_advice"], plain["dataset"]["label_counts"]
    path.write_text(json.dumps(plain))
    assert AutotuneResult.load(path) == result_of("recommended")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PathError, match=r"none\.json: no such file; make it with `autotune"):
        AutotuneResult.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "[]", "3", "null", '{"a": 1}', '{"schema": "cellfeed.autotune/1"}',
     '{"schema": "cellfeed.replay/1"}'],
)  # fmt: skip
def test_what_is_no_result_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"other\.json: .*run (it|autotune) again$") as caught:
        AutotuneResult.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("seconds",), "long"),
        (("machine", "cpu", "logical_cores"), 2.5),
        (("dataset", "paths"), "plates"),
        (("dataset", "n_cells"), None),
        (("constraints",), []),
        (("configurations",), [{}]),
        (("configurations", 0, "status"), "splendid"),
        (("configurations", 0, "block_size"), 0),
        (("configurations", 0, "cells_per_second", "value"), True),
        (("recommended", "reason"), {}),
        (("bottleneck", "kind"), "weather"),
        (("bottleneck", "stages", 0, "seconds_per_cell"), None),
    ],
)
def test_a_garbled_value_is_refused(result_of, tmp_path, place, value):
    plain = result_of("explained").to_json()
    inner = plain
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    path = tmp_path / "autotune.json"
    path.write_text(json.dumps(plain))
    with pytest.raises(FormatError, match="not a result of autotune"):
        AutotuneResult.load(path)
