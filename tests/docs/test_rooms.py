"""The map of the code in `docs/explanation/rooms.md` is that of the code."""

import ast
import functools
import itertools
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/explanation/rooms.md").read_text()
PACKAGES = ["loader/cellfeed", "tuner/cellfeed_tuner"]


def rows_of_table(package):
    """Return the folders and modules of each row, the topmost first."""
    _, _, table = PAGE.partition(f"| `{package}/` | answers |\n|---|---|\n")
    rows = itertools.takewhile(bool, table.splitlines())
    return [re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1]) for row in rows]


def modules_of(package):
    path = ROOT / package
    found = {}
    for each in path.rglob("*.py"):
        parts = [path.name, *each.relative_to(path).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = each
    return found


@functools.cache
def imports_of(package):
    """Return what each module of a package imports, also in functions and for types alone."""
    modules = modules_of(package)
    imports = {name: set[str]() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module in modules:
                among = {f"{node.module}.{each.name}" for each in node.names} & set(modules)
                imports[name] |= among or {node.module}
            if isinstance(node, ast.Import):
                imports[name] |= {each.name for each in node.names} & set(modules)
        imports[name] -= {name}
    return imports


@pytest.mark.parametrize("package", PACKAGES)
def test_each_folder_is_on_the_map_once(package):
    listed = [name for row in rows_of_table(package) for name in row]
    assert len(listed) == len(set(listed))
    path = ROOT / package
    there = {each.stem for each in path.iterdir() if each.suffix == ".py" or each.is_dir()}
    assert set(listed) == there - {"__init__", "__pycache__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_imports_only_what_is_below_it(package):
    height = {name: -k for k, row in enumerate(rows_of_table(package)) for name in row}
    for module, imported in imports_of(package).items():
        importer = module.split(".")[1:2]
        for each in imported:
            (name,) = each.split(".")[1:2] or [""]
            if importer and name and importer != [name]:
                assert height[name] <= height[importer[0]], f"{module} imports {each}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_what_imports_it(package):
    try:
        TopologicalSorter(imports_of(package)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")
