"""Tables of the README that a command writes."""

import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def put(command: str, table: str) -> None:
    """Put a table between ``<!-- command -->`` and ``<!-- end -->``."""
    place = re.compile(rf"(<!-- {re.escape(command)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, n = place.subn(lambda match: f"{match[1]}{table}\n{match[2]}", README.read_text())
    assert n == 1, f"the README has one place for the table of {command!r}"
    README.write_text(text)
