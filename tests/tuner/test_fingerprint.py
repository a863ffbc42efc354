"""What a machine, a dataset and versions are known by."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from cellfeed import Collection, open_collection
from cellfeed_tuner import describe_machine
from cellfeed_tuner._history import fingerprint
from cellfeed_tuner._recall import data_fingerprint, machine_fingerprint, versions_fingerprint
from cellfeed_tuner._subject import label_codes


def of_data(path, label="plate"):
    collection = open_collection(path, obs=[label])
    return data_fingerprint(collection, label_codes(collection, label))


@pytest.fixture
def machine(small_collection):
    return describe_machine([small_collection / "plate0.h5ad"])


def test_a_digest_is_short_and_depends_on_the_facts_alone():
    facts = ({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1})
    digests = [fingerprint(each).digest for each in facts]
    assert len(digests[0]) == 8
    assert digests[0] == digests[1] != digests[2]


def test_a_copy_that_was_moved_is_the_same_dataset(small_collection, tmp_path):
    shutil.copytree(small_collection, tmp_path / "elsewhere")
    assert of_data(small_collection) == of_data(tmp_path / "elsewhere")


def test_other_files_are_another_dataset(small_collection, tmp_path):
    shutil.copy(small_collection / "plate0.h5ad", tmp_path)
    assert of_data(small_collection) != of_data(tmp_path)


def test_another_label_is_another_dataset(small_collection):
    assert of_data(small_collection) != of_data(small_collection, "cell_type")


def test_where_labels_lie_counts(small_collection, tmp_path):
    collection = open_collection(small_collection, obs=["plate"])
    codes = label_codes(collection, "plate")
    one_file_to_a_plate = data_fingerprint(collection, codes)
    mixed = data_fingerprint(collection, np.random.default_rng(0).permutation(codes))
    assert one_file_to_a_plate != mixed


def test_another_chunk_geometry_is_another_dataset(small_collection, monkeypatch):
    before = of_data(small_collection)
    monkeypatch.setattr(Collection, "rows_per_chunk", property(lambda self: 7.0))
    assert of_data(small_collection) != before


def test_facts_are_plain_values(small_collection, machine):
    for each in (of_data(small_collection), machine_fingerprint(machine), versions_fingerprint()):
        assert json.loads(json.dumps(each.facts, allow_nan=False)) == each.facts


def test_a_machine_is_the_same_after_an_update_and_with_less_memory_free(machine):
    later = replace(
        machine,
        memory=replace(machine.memory, available_bytes=1),
        platform=replace(machine.platform, kernel=f"{machine.platform.kernel}-updated"),
        storage=tuple(replace(each, device="/dev/other") for each in machine.storage),
    )
    assert machine_fingerprint(later) == machine_fingerprint(machine)


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: {"cpu": replace(machine.cpu, usable_cores=0.5)},
        lambda machine: {"cpu": replace(machine.cpu, model="another")},
        lambda machine: {"memory": replace(machine.memory, total_bytes=1)},
        lambda machine: {"platform": replace(machine.platform, kernel="Linux 3.10")},
        lambda machine: {"storage": (replace(machine.storage[0], file_system="other"),)},
    ],
)
def test_what_matters_to_speed_makes_another_machine(machine, change):
    assert machine_fingerprint(replace(machine, **change(machine))) != machine_fingerprint(machine)


def test_versions_are_told_to_the_second_number():
    versions = versions_fingerprint().facts
    assert {"cellfeed", "h5py", "torch", "zarr", "numcodecs", "deflate"} <= versions.keys()
    assert all(version.count(".") == 1 for version in versions.values() if version is not None)
