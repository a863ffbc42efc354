import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PUBLIC_MODULES = {
    "cellfeed": {
        "console",
        "frameworks",
        "interrupts",
        "machine",
        "sampling",
        "scdataset",
        "sources",
        "spatial",
        "stages",
        "synthetic",
        "testing",
        "tokenizers",
        "transforms",
    },
    "cellfeed_tuner": {"plots", "theory"},
}
MODULES = [
    *PUBLIC_MODULES,
    *(f"{package}.{name}" for package, names in PUBLIC_MODULES.items() for name in sorted(names)),
]


def import_(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if not hasattr(module, "__all__"):
        pytest.skip(f"{name} exports nothing yet")
    for exported in module.__all__:
        getattr(module, exported)  # which may be imported now
    return module


@pytest.mark.parametrize("package", PUBLIC_MODULES)
def test_all_names_what_the_package_exports(package):
    module = import_(package)
    exported = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }
    named = {name for name in module.__all__ if not name.startswith("__")}
    assert named - PUBLIC_MODULES[package] == exported


@pytest.mark.parametrize("package", PUBLIC_MODULES)
def test_other_modules_are_private(package):
    modules = pkgutil.iter_modules(importlib.import_module(package).__path__)
    public = {module.name for module in modules if not module.name.startswith("_")}
    assert public == PUBLIC_MODULES[package]


@pytest.mark.parametrize("name", MODULES)
def test_all_is_sorted_and_documented(name):
    if name.startswith("cellfeed_tuner"):
        pytest.importorskip("matplotlib")
    module = import_(name)
    assert list(module.__all__) == sorted(module.__all__)
    for exported in module.__all__:
        value = getattr(module, exported)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), exported


def test_windows_is_told_where_it_runs():
    script = "import sys; sys.platform = 'win32'; import cellfeed"
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last == "ImportError: cellfeed runs on Linux and macOS; on Windows, install it in WSL"


def test_frozen_classes_with_slots_have_no_states_of_their_own():
    """Dataclasses of Python before 3.11.4 replace them, so that pickling fails there."""
    root = Path(importlib.import_module("cellfeed").__file__ or "").parents[2]
    states = {"__getstate__", "__setstate__"}
    of_classes = [
        (node, {each.name for each in node.body if isinstance(each, ast.FunctionDef)})
        for path in [*root.glob("loader/**/*.py"), *root.glob("tuner/**/*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    with_states = [node for node, methods in of_classes if methods & states]
    assert with_states
    for node in with_states:
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        assert not {"frozen=True", "slots=True"} <= set(re.findall(r"\w+=True", decorators)), (
            node.name
        )
