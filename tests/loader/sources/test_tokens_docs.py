"""docs/how-to/tokens.md runs as it stands."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "tokens.md"
BLOCKS = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_prints_what_it_says(capsys):
    pytest.importorskip("torch")
    names, n_compared = dict[str, object](), 0
    for (language, block), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language == "python":
            exec(compile(block, PAGE.name, "exec"), names)
            printed = capsys.readouterr().out
            assert printed == (following[1] if following[0] == "text" else "")
            n_compared += bool(printed)
    assert n_compared == 3
