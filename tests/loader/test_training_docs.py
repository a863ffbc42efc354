"""docs/how-to/training.md runs as it stands, and the tests that it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "how-to" / "training.md").read_text()


def test_which_cells_an_epoch_visits(capsys):
    section = TEXT.partition("## Which cells an epoch visits")[2]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    printed = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    assert code is not None
    assert printed is not None
    exec(compile(code[1], "docs/how-to/training.md", "exec"), {})
    assert capsys.readouterr().out == printed[1]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z]+/test_\w+\.py)`", TEXT))))
def test_what_holds_a_guarantee_is_there(name):
    assert (ROOT / "tests" / "loader" / name).is_file()


def test_examples_are_named_and_there():
    section = TEXT.partition("## Where people train")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+\.py)`", section))
    assert named == {each.name for each in (ROOT / "examples").glob("*.py")}
