"""The tests and examples that docs/how-to/training.md names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to" / "training.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+/test_\w+\.py)`", TEXT))))
def test_what_holds_a_guarantee_is_there(name):
    assert (ROOT / "tests" / "loader" / name).is_file()


def test_examples_are_named_and_there():
    section = TEXT.partition("## Where people train")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+\.py)`", section))
    assert named == {each.name for each in (ROOT / "examples").glob("*.py")}
