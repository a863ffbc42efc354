"""The loader reads nothing that other packages keep to themselves, nor the frames of callers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import cellfeed

FOLDER = Path(cellfeed.__file__).parent
FORBIDDEN = {"_getframe", "f_back", "f_locals", "distributed_c10d", "currentframe"}
KNOWN = {
    # Of numba: how compiled code is loaded from its cache.
    "_compiled.py": {"_compiler", "_guard_against_spurious_io_errors", "_load_overload"},
    # torch's registry of how to collate, where the documentation of `default_collate` has it.
    "rows/_minibatch.py": {"_utils"},
    # scvi-tools gives what a setup has registered to instances of a model alone.
    "frameworks/scvi/__init__.py": {"_get_most_recent_anndata_manager"},
}
PUBLIC = {"_exit"}  # of os


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(FOLDER.rglob("*.py")):
        yield path.relative_to(FOLDER).as_posix(), ast.parse(path.read_text())


def own_names() -> set[str]:
    """Every private name that the loader gives to something itself."""
    found = set[str]()
    for _, tree in trees():
        for node in ast.walk(tree):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                ):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Constant(value=str(name)):  # slots, and fields by name
                    found.add(name)
                case ast.keyword(arg=str(name)) | ast.arg(arg=name):
                    found.add(name)
    return found


def private_uses() -> dict[str, set[str]]:
    """What each file uses of others that begins with one underscore."""
    own, found = own_names(), dict[str, set[str]]()
    for path, tree in trees():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith("cellfeed"):
                names = [*str(node.module).split("."), *(each.name for each in node.names)]
            elif isinstance(node, ast.Import):
                others = (each.name for each in node.names if not each.name.startswith("cellfeed"))
                names = [part for each in others for part in each.split(".")]
            for name in names:
                is_private = (
                    name.startswith("_") and not name.startswith("__") and name not in own | PUBLIC
                )
                if is_private or name in FORBIDDEN:
                    found.setdefault(path, set()).add(name)
    return found


@pytest.mark.slow
def test_nothing_private_of_other_packages():
    assert private_uses() == KNOWN
