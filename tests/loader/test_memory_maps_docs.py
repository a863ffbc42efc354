"""docs/how-to/memory_maps.md runs as it stands."""

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "how-to" / "memory_maps.md").read_text()


def test_what_is_shown_runs(capsys):
    pytest.importorskip("datasets")
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    printed = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    assert printed is not None
    exec(compile(code[1], "docs/how-to/memory_maps.md", "exec"), {})
    assert capsys.readouterr().out == printed[1]
