"""docs/reference/opening.md says what the registry says."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.warm import python as warm

from cellfeed._storages import built_in
from cellfeed._storages._table import table_of_storages, with_table
from cellfeed.sources import Storage

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "opening.md"
BUILT_IN = [each for each in built_in() if not each.name.startswith("test ")]


def test_the_page_and_the_registry_say_the_same(tmp_path):
    """In a process of its own, where no test has registered anything."""
    copy = tmp_path / "opening.md"
    copy.write_text(PAGE.read_text())
    warm.output_of("-m", "cellfeed._storages._table", copy)
    again = "it is written anew by python -m cellfeed._storages._table docs/reference/opening.md"
    assert copy.read_text() == PAGE.read_text(), again


def test_what_a_table_says():
    storage = Storage(name="mine", open=lambda location, elements: [], extra="mine")
    assert "| **mine** |" in table_of_storages([storage])
    assert "| `cellfeed[mine]` |" in table_of_storages([storage])
    page = "a\n<!-- the registry's -->\nold\n<!-- end -->\nb\n"
    assert with_table(page).startswith("a\n<!-- the registry's -->\n| storage |")
    assert with_table(page).endswith("|\n<!-- end -->\nb\n")
    assert with_table(with_table(page)) == with_table(page)


@pytest.mark.parametrize("storage", BUILT_IN, ids=lambda each: each.name)
def test_each_storage_states_its_facts(storage):
    assert storage.facts is not None
    stated = storage.facts
    for text in (stated.recognized, stated.reading, stated.threads, stated.remote, stated.labels):
        assert re.fullmatch(r"[^|\n]+", text)


@pytest.mark.parametrize("storage", BUILT_IN, ids=lambda each: each.name)
def test_each_extra_is_there(storage):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not storage.extra or storage.extra in extras["optional-dependencies"]
