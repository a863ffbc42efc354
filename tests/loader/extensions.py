"""Which folders of the loader are its core, and which are extensions."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cellfeed

LOADER = Path(cellfeed.__file__).parent
CORE = frozenset(
    {"bytes", "collection", "dataset", "decode", "fetch", "rows", "sampling", "sources", "testing"}
)
GROUPS = frozenset({"frameworks", "storages"})  # of extensions, a folder each


def folders() -> list[Path]:
    """Return the folders of all extensions."""
    found = [each for each in LOADER.iterdir() if each.is_dir() and each.name.isidentifier()]
    others = [each for each in found if each.name not in CORE | GROUPS | {"__pycache__"}]
    of_groups = [each for name in GROUPS for each in (LOADER / name).iterdir() if each.is_dir()]
    return sorted([*others, *(each for each in of_groups if each.name != "__pycache__")])


class Imported(NamedTuple):
    """A name that a module imports from another; None if it imports the whole module."""

    by: str
    module: str
    name: str | None


@cache
def modules() -> dict[str, Path]:
    """Return the files of all modules, by their full names."""
    paths = sorted(LOADER.rglob("*.py"))
    parts = [path.relative_to(LOADER.parent).with_suffix("").parts for path in paths]
    names = [".".join(each[:-1] if each[-1] == "__init__" else each) for each in parts]
    return dict(zip(names, paths, strict=True))


def imports() -> Iterator[Imported]:
    """Yield what each module of the loader imports of others, wherever in it."""
    there = modules()
    for by, path in there.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
                yield from (Imported(by, name, None) for name in names if name in there)
            elif isinstance(node, ast.ImportFrom) and node.module in there:
                for each in node.names:
                    whole = f"{node.module}.{each.name}"
                    if whole in there and not is_public(node.module, each.name):
                        yield Imported(by, whole, None)
                    else:
                        yield Imported(by, node.module, each.name)


@cache
def exported(module: str) -> frozenset[str]:
    """Return the names in a module's ``__all__``."""
    if module == "cellfeed":  # whose list is made of its table
        return frozenset(cellfeed.__all__)
    for node in ast.parse(modules()[module].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "__all__":
            return frozenset(ast.literal_eval(node.value or ast.List([])))
    return frozenset()


def is_public(module: str, name: str | None) -> bool:
    """Return whether a stranger may import this name."""
    if any(part.startswith("_") for part in module.split(".")):
        return False
    return name is None or name in exported(module)


@cache
def extension_of(module: str) -> str | None:
    """Return the extension to which a module belongs; None for the core."""
    parts = module.split(".")[1:3]
    if len(parts) == 2 and parts[0] in GROUPS:
        return ".".join(parts)
    is_folder = any(parts) and (LOADER / parts[0]).is_dir()
    return parts[0] if is_folder and parts[0] not in CORE | GROUPS else None
