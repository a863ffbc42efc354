"""Tables in docs/benchmarks/autotune.md that commands write."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "autotune.md"


def put(command: str, table: str) -> None:
    """Put a table between ``<!-- command -->`` and ``<!-- end -->``."""
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, n = place.subn(lambda match: f"{match[1]}{table}\n{match[2]}", PAGE.read_text())
    assert n == 1, f"the page has one place for the table of {command!r}"
    PAGE.write_text(text)
