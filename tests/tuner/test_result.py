"""Results as JSON, and back; and the dataset that one recommends."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from tests import commands

from cellfeed import BlockShuffling, CellDataset, FormatError, PathError
from cellfeed_tuner import AutotuneResult


def test_what_cannot_be_saved_leaves_what_was_there(result_of, tmp_path):
    path = tmp_path / "autotune.json"
    result_of("warm").save(path)
    with commands.files_end_after(1000), pytest.raises(OSError, match="autotune") as caught:
        result_of("recommended").save(path)
    assert caught.value.filename == str(path)
    assert AutotuneResult.load(path) == result_of("warm")
    assert [*tmp_path.iterdir()] == [path]


def test_a_link_stays_one_and_permissions_are_as_usual(result_of, tmp_path):
    (tmp_path / "usual").touch()
    link, real = tmp_path / "link.json", tmp_path / "real.json"
    link.symlink_to(real)
    result_of("warm").save(link)
    assert link.is_symlink()
    assert AutotuneResult.load(real) == result_of("warm")
    assert real.stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_results_of_other_versions_are_loaded(result_of, tmp_path):
    """From before there were explanations; and with fields that are no longer stored."""
    path = tmp_path / "autotune.json"
    plain = result_of("explained").to_json()
    plain["entropy_over_epoch"] = {"plate": {"drift_error_bits": None}}
    plain["machine"]["storage"][0] |= {"model": None, "rotational": True}
    plain["configurations"][0] |= {"worker_start_seconds": 0.1, "first_minibatch_seconds": 0.2}
    path.write_text(json.dumps(plain))
    assert AutotuneResult.load(path) == result_of("explained")
    del plain["bottleneck"], plain["storage_advice"]
    path.write_text(json.dumps(plain))
    assert AutotuneResult.load(path) == result_of("recommended")


def test_a_path_that_is_not_there_is_named(result_of, tmp_path):
    path = tmp_path / "none" / "autotune.json"
    with pytest.raises(FileNotFoundError) as caught:
        result_of("warm").save(path)
    assert caught.value.filename == str(path)
    with pytest.raises(PathError, match=r"none\.json: no such file; make it with `autotune"):
        AutotuneResult.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, r"\(no JSON object\)") for text in ("", "\x00", "[]", "3", "null", "[" * 100_000)),
        ('{"a": 1}', r"\('schema' is missing\)"),
        ('{"schema": "cellfeed.autotune/4"}', "missing required field"),
        ('{"schema": "cellfeed.replay/1"}', "has schema 'cellfeed.replay/1'"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line(tmp_path, text, why):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=why) as caught:
        AutotuneResult.load(path)
    assert re.fullmatch(r".*other\.json: .*(run autotune again|that it wrote)", str(caught.value))


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


def test_a_result_makes_the_dataset_that_it_recommends(result_of):
    rows = np.arange(10_000)
    with pytest.warns(UserWarning, match="the result: was measured with n_cells=28000, but it is "):
        dataset = CellDataset.from_autotune(rows, result_of("recommended"), seed=3)
    by_hand = CellDataset(rows, BlockShuffling(64), 64, 64, seed=3)
    assert [batch.tolist() for batch in dataset] == [batch.tolist() for batch in by_hand]
    with pytest.raises(FormatError, match="the result: recommends nothing"):
        CellDataset.from_autotune(range(10_000), result_of("nothing feasible"))


@pytest.mark.parametrize("kind", ["recommended", "several labels", "too long", "ranges"])
def test_the_table_has_a_row_for_each_configuration(result_of, kind, tmp_path):
    result = result_of(kind)
    table = result.table()
    assert len(table) == len(result.configurations)
    for (_, row), each in zip(table.iterrows(), result.configurations, strict=True):
        assert {name: row[name] for name in each.configuration} == dict(each.configuration)
        is_timed = each.cells_per_second is not None
        assert (row["known"] in {"timed", "compared"}) == is_timed
        speed = each.cells_per_second or result.predicted(each)
        assert np.isnan(row["cells_per_second"]) == (speed is None)
        if speed is not None:
            ends = row[["cells_per_second_low", "cells_per_second", "cells_per_second_high"]]
            assert ends.tolist() == [speed.low, speed.value, speed.high]
            assert is_timed or row["known"] == "predicted"
        for label, found in each.labels.items():
            assert row[f"{label}_bits"] == found.entropy_bits.expected.value
            assert row["share_of_random"] <= found.entropy_bits.share_of_random
        assert row["is_recommended"] == (each is result.chosen)
    table.to_csv(tmp_path / "table.csv", index=False)
    read = pd.read_csv(tmp_path / "table.csv", keep_default_na=True)
    assert read["cells_per_second"].tolist() == pytest.approx(
        table["cells_per_second"].tolist(), nan_ok=True
    )
