"""Write the page of the tuner's constants from their docstrings: `python docs/constants.py`."""

import ast
import re
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUNER = ROOT / "tuner" / "cellfeed_tuner"
PAGE = ROOT / "docs" / "reference" / "constants.md"
MODULES = [TUNER / "_constants.py"]
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
    """Yield the names, the value and the docstring of each constant of a module."""
    source = path.read_text()
    body = ast.parse(source).body
    for node, text in pairwise(body):
        if not isinstance(node, ast.Assign) or "__all__" in ast.unparse(node.targets[0]):
            continue
        said = text.value.value if isinstance(text, ast.Expr) else ""
        names = [each.id for each in ast.walk(node.targets[0]) if isinstance(each, ast.Name)]
        yield names, ast.unparse(node.value), " ".join(str(said).split())


def row(names, value, said):
    """Return a row of the table."""
    found = ORIGIN.fullmatch(said)
    if found is None:
        msg = f"{', '.join(names)}: say what it is, and then `Chosen:`, `Measured:` or `Source:`"
        raise ValueError(msg)
    what, origin, why = found.groups()
    cells = [
        ", ".join(f"`{name}`" for name in names),
        f"`{value[1:-1] if value.startswith('(') else value}`",
        what,
        f"*{origin.lower()}*" + (f": {why}" if why else ""),
    ]
    return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |\n"


def page():
    """Return the page."""
    return HEAD + "".join(row(*each) for path in MODULES for each in documented(path))


if __name__ == "__main__":
    PAGE.write_text(page())
