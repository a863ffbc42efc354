"""The tests and examples that docs/how-to/training.md names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to" / "training.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+/test_\w+\.py)`", TEXT))))
def test_what_holds_a_guarantee_is_there(name):
    assert (ROOT / "tests" / "loader" / name).is_file()


def test_examples_are_shown_and_there():
    gallery = (ROOT / "docs" / "how-to" / "examples.md").read_text()
    named = set(re.findall(r"literalinclude} \.\./\.\./examples/(\w+\.py)", gallery))
    assert named == {each.name for each in (ROOT / "examples").glob("*.py")}
