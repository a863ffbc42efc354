"""Results as JSON, and back."""

import importlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests import commands

from cellfeed import FormatError, PathError
from cellfeed_tuner import AutotuneResult, _autotune

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("kind", [Path, str])
def test_what_was_saved_is_loaded_as_it_was(any_result, tmp_path, kind):
    path = kind(tmp_path / "autotune.json")
    any_result.save(path)
    assert AutotuneResult.load(path) == any_result


def test_what_is_saved_is_as_its_schema_says(any_result):
    jsonschema: Any = importlib.import_module("jsonschema")  # which has no types
    schema = runpy.run_path(str(DOCS / "autotune_schema.py"))["result_schema"]()
    jsonschema.Draft202012Validator.check_schema(schema)
    plain = json.loads(json.dumps(any_result.to_json(), allow_nan=False))
    jsonschema.validate(plain, schema)
    assert plain.keys() == schema["$defs"]["AutotuneResult"]["properties"].keys()


def test_what_cannot_be_saved_leaves_what_was_there(result_of, tmp_path):
    path = tmp_path / "autotune.json"
    result_of("warm").save(path)
    with commands.files_end_after(1000), pytest.raises(OSError, match="autotune") as caught:
        result_of("recommended").save(path)
    assert caught.value.filename == str(path)
    assert AutotuneResult.load(path) == result_of("warm")
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_is_not_there_is_named_when_saving(result_of, tmp_path):
    path = tmp_path / "none" / "autotune.json"
    with pytest.raises(FileNotFoundError) as caught:
        result_of("warm").save(path)
    assert caught.value.filename == str(path)


def test_a_link_stays_one_and_permissions_are_as_usual(result_of, tmp_path):
    (tmp_path / "usual").touch()
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    link.symlink_to(real)
    result_of("warm").save(link)
    assert link.is_symlink()
    assert AutotuneResult.load(real) == result_of("warm")
    assert real.stat().st_mode == (tmp_path / "usual").stat().st_mode


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_command_names_the_first_file_that_does_not_fit(
    number, result_of, small_collection, tmp_path, monkeypatch
):
    result = result_of("recommended")
    _write_all(result, small_collection, tmp_path / "whole", monkeypatch)
    paths = [tmp_path / "whole" / f"autotune.{kind}" for kind in ("json", "png", "html")]
    sizes = [path.stat().st_size for path in paths]
    fitting = sorted(sizes)[number] - 1
    first = next(path for path, size in zip(paths, sizes, strict=True) if size > fitting)
    with commands.files_end_after(fitting):
        printed = _write_all(result, small_collection, tmp_path / "full", monkeypatch)
    assert printed.exit_code == 2
    assert f"{tmp_path / 'full' / first.name}`" in printed.stderr.splitlines()[-1]
    assert "Recommended" in printed.stdout
    assert not (tmp_path / "full" / first.name).exists()


def _write_all(result, collection, output, monkeypatch):
    monkeypatch.setattr(_autotune, "tuned", lambda *_, **__: result)
    arguments = [str(collection), "--label", "plate", "--output", str(output)]
    # A slow machine leaves picture and page out where the budget is spent.
    return commands.autotune(*arguments, "--budget", "100000")


def test_results_from_before_there_were_explanations_are_loaded(result_of, tmp_path):
    path = tmp_path / "autotune.json"
    plain = result_of("explained").to_json()
    del plain["bottleneck"], plain["storage_advice"], plain["dataset"]["label_counts"]
    path.write_text(json.dumps(plain))
    assert AutotuneResult.load(path) == result_of("recommended")


def test_what_is_no_longer_kept_is_left_aside(result_of, tmp_path):
    path = tmp_path / "autotune.json"
    plain = result_of("explained").to_json()
    plain["entropy_over_epoch"] = {"plate": {"drift_error_bits": None}}
    plain["machine"]["storage"][0] |= {"model": None, "rotational": True}
    plain["configurations"][0] |= {"worker_start_seconds": 0.1, "first_minibatch_seconds": 0.2}
    path.write_text(json.dumps(plain))
    assert AutotuneResult.load(path) == result_of("explained")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PathError, match=r"none\.json: no such file; make it with `autotune"):
        AutotuneResult.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "[]", "3", "null", '{"a": 1}', '{"schema": "cellfeed.autotune/2"}',
     '{"schema": "cellfeed.replay/1"}'],
)  # fmt: skip
def test_what_is_no_result_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(
        FormatError, match=r"other\.json: .*(run autotune again|that it wrote)$"
    ) as caught:
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
        (("configurations", 0, "configuration", "block_size"), 0),
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


@pytest.mark.parametrize("content", ["", "[]", "3", "[" * 100_000, "\x00"])
def test_a_file_of_anything_else_is_refused(tmp_path, content):
    path = tmp_path / "autotune.json"
    path.write_text(content)
    with pytest.raises(FormatError, match=r"not a result of autotune \(no JSON object\)"):
        AutotuneResult.load(path)
