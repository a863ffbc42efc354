"""Write the page of the tuner's constants from their comments: `python docs/constants.py`."""

import ast
import re
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUNER = ROOT / "tuner" / "cellfeed_tuner"
PAGE = ROOT / "docs" / "reference" / "constants.md"
SHARED = TUNER / "_constants.py"
ORIGIN = re.compile(r"(.*) (Chosen|Measured|Source)(?::\s*(.*?))?\.?", re.DOTALL)
HEAD = """# Constants of the tuner

Every number that determines what `autotune` measures, chooses and says, and where it comes from:
*measured*, taken from a *source*, or *chosen*. `python docs/constants.py` writes this page.

A *replicate* is one measurement of a configuration; it consists of *rounds* of whole fetches. In a
*turn*, the configurations that are still compared are measured one after the other.

| constant | value | what it is | where it comes from |
|---|---|---|---|
"""


def documented(path):
    """Yield the names, the value and the comment of each public constant of a module."""
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
        above = list(takewhile(lambda line: line.startswith("# "), lines[node.lineno - 2 :: -1]))
        said = " ".join(line.removeprefix("# ") for line in reversed(above))
        if all(re.fullmatch("[A-Z][A-Z_]*", name) for name in names):
            yield names, ast.unparse(node.value), said


def row(names, value, said, *, is_shared):
    """Return a row of the table; None if the comment does not say where the value comes from."""
    found = ORIGIN.fullmatch(said)
    if found is None and is_shared:
        msg = f"{', '.join(names)}: say what it is, and then `Chosen:`, `Measured:` or `Source:`"
        raise ValueError(msg)
    if found is None:
        return None
    what, origin, why = found.groups()
    cells = [
        ", ".join(f"`{name}`" for name in names),
        f"`{value[1:-1] if value.startswith('(') else value}`",
        what,
        f"*{origin.lower()}*" + (f": {why}" if why else ""),
    ]
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |\n"


def page():
    """Return the page: the shared constants, and then those of each module."""
    paths = [SHARED, *(each for each in sorted(TUNER.rglob("*.py")) if each != SHARED)]
    rows = [row(*each, is_shared=path == SHARED) for path in paths for each in documented(path)]
    return HEAD + "".join(filter(None, rows))


if __name__ == "__main__":
    PAGE.write_text(page())
