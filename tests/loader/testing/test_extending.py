"""docs/how-to/extending.md runs as it stands, and what it writes passes the suites."""

import importlib
import re
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "extending.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
CODE = [block for language, block in BLOCKS if language == "python"]
MOST_LINES = {"SamplingStrategy": 22, "Source": 40}  # without empty ones, to the end of a block

# Classes, and suites that pytest finds here: a module, so that processes that are spawned find it.
FOLDER = tempfile.TemporaryDirectory()
Path(FOLDER.name, "extending_page.py").write_text(
    "\n\n".join(block for block in CODE if "print(" not in block)
)
sys.path.append(FOLDER.name)
globals().update(vars(importlib.import_module("extending_page")))


@pytest.mark.parametrize("block", [block for block in CODE if "print(" in block])
def test_prints_what_the_page_says(block, capsys):
    pytest.importorskip("torch")
    exec(compile(block, PAGE.name, "exec"), globals())
    output = BLOCKS[BLOCKS.index(("python", block)) + 1]
    assert output == ("text", capsys.readouterr().out)


def test_the_page_is_as_short_as_it_says():
    for base, most in MOST_LINES.items():
        for block in CODE:
            _, found, body = block.partition(f"({base}):\n")
            assert not found or len(list(filter(str.strip, body.splitlines()))) < most


def test_the_suites_of_the_page_are_run_here():
    names = re.findall(r"^class (Test\w+)", PAGE.read_text(), re.MULTILINE)
    assert names
    assert set(names) <= set(globals())
