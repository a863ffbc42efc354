"""What is public, what is imported when, and what there is without torch."""

import ast
import importlib
import inspect
import json
import pickle
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import scipy.sparse as sp
from tests.loader import without_torch

import cellfeed
from cellfeed import BlockShuffling, CellfeedError, Cells

PUBLIC_MODULES = {
    "cellfeed": {
        "bytes",
        "collection",
        "commands",
        "console",
        "dataset",
        "decode",
        "extending",
        "fetch",
        "frameworks",
        "genes",
        "interrupts",
        "machine",
        "perturbation",
        "preshuffling",
        "rows",
        "sampling",
        "scdataset",
        "sources",
        "spatial",
        "splits",
        "stages",
        "storages",
        "strategies",
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
    assert list(module.__all__) == sorted(
        module.__all__, key=lambda name: (not name.isupper(), name)
    )
    for exported in module.__all__:
        value = getattr(module, exported)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), exported


@pytest.mark.parametrize("package", PUBLIC_MODULES)
def test_type_checkers_see_what_is_imported_when_it_is_used(package):
    module = importlib.import_module(package)
    seen = dict[str, object]()
    for statement in ast.parse(inspect.getsource(module)).body:
        if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            seen |= {
                alias.name: getattr(importlib.import_module(str(each.module)), alias.name)
                for each in statement.body
                if isinstance(each, ast.ImportFrom)
                for alias in each.names
            }
    assert {name: getattr(module, name) for name in seen} == seen
    assert set(module._MODULE_OF) <= set(seen) <= set(module.__all__)
    assert {*module.__all__} <= {*dir(module)}
    assert dir(module) == sorted(dir(module))


@pytest.mark.parametrize("package", PUBLIC_MODULES)
def test_unknown_names_are_refused_as_python_does(package):
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'nothing'$"):
        module.nothing  # noqa: B018
    with pytest.raises(ImportError, match=f"^cannot import name 'nothing' from '{package}'"):
        exec(f"from {package} import nothing")
    assert not hasattr(module, "nothing")


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        ("PathError", FileNotFoundError),
        ("FormatError", ValueError),
        ("MismatchError", ValueError),
        ("ColumnError", LookupError),
        ("ParameterError", ValueError),
    ],
)
def test_errors_can_be_caught_as_ours_and_as_built_in(error, builtin):
    kind = getattr(cellfeed, error)
    assert issubclass(kind, CellfeedError)
    assert issubclass(kind, builtin)
    assert str(kind("cells.h5ad: no such file")) == "cells.h5ad: no such file"


def test_the_tree_of_errors_is_complete():
    module = inspect.getmodule(CellfeedError)
    kinds = [name for name in vars(module) if name.endswith("Error")]
    assert all(name in (module.__doc__ or "") for name in kinds)
    assert set(kinds) <= set(cellfeed.__all__)


def test_classes_are_pickled_by_the_name_of_their_module():
    assert pickle.loads(pickle.dumps(cellfeed.Cells)) is Cells


def test_frozen_classes_with_slots_have_no_states_of_their_own():
    """Dataclasses of Python before 3.11.4 replace them, so that pickling fails there."""
    root = Path(importlib.import_module("cellfeed").__file__ or "").parents[2]
    states = {"__getstate__", "__setstate__"}
    of_classes = [
        (node, {each.name for each in node.body if isinstance(each, ast.FunctionDef)})
        for path in [*root.glob("loader/**/*.py"), *root.glob("tuner/**/*.py")]
        if re.search("|".join(states), text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    with_states = [node for node, methods in of_classes if methods & states]
    assert with_states
    for node in with_states:
        decorators = " ".join(map(ast.unparse, node.decorator_list))
        assert not {"frozen=True", "slots=True"} <= set(re.findall(r"\w+=True", decorators)), (
            node.name
        )


def run(script: str, *arguments: object) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


TO_A_MINIBATCH = """
import json, sys
files, obs, mistakes = map(json.loads, sys.argv[1:])
found, before = {}, {name.partition(".")[0] for name in sys.modules}

def note(step):
    there = {name.partition(".")[0] for name in sys.modules}
    found[step] = sorted(there - before - sys.stdlib_module_names - {"cellfeed"})

import cellfeed
note("package")
assert (cellfeed.machine.__name__, cellfeed.sampling.__name__) == (
    "cellfeed.machine", "cellfeed.sampling")
from cellfeed import BlockShuffling, CellfeedError, EpochPlan, ParameterError
note("plan")
from cellfeed import Cells, open_collection
note("cells")
for path, options in mistakes:
    try:
        open_collection(path, **options)
    except CellfeedError as error:
        note(type(error).__name__)
collections = [open_collection(paths, obs=obs) for paths in files]
note("opened")

import gc
gc.collect()
collected = []
gc.callbacks.append(lambda phase, info: collected.append(phase))
from cellfeed import CellDataset
young = gc.get_count()[0] + sum(map(len, map(gc.get_objects, (0, 1))))
note("dataset")
found["garbage"] = [len(collected), gc.isenabled(), young]

for collection in collections:
    minibatch = next(iter(CellDataset(collection, BlockShuffling(2), 4, seed=0)))
    assert minibatch.X.shape[0] == 4 and len(minibatch.obs) == 3
note("read")
print(json.dumps(found))
"""


@pytest.mark.process
def test_packages_are_imported_when_they_are_needed(write_h5ad):
    """To a minibatch of .h5ad, sparse or dense, with few genes or many: all in one process."""
    pytest.importorskip("torch")
    obs = {"plate": ["a", "b", "a", "b"], "count": [1, 2, 3, 4], "score": [0.5, 1.5, 2.5, 3.5]}
    few, many = (np.ones((4, n), np.float32) for n in (5, 12_000))
    files = [
        [str(write_h5ad(X, obs, compression="gzip")) for _ in "ab"]
        for X in (few, many, sp.csr_matrix(few), sp.csr_matrix(many))
    ]
    mistakes = [
        ("/none.h5ad", {}),
        (files[0][0], {"obs": ["plte"]}),
        (files[0][0], {"elements": ["layers/count"]}),
        (files[0][0], {"join_vars": "sam"}),
    ]
    printed = run(TO_A_MINIBATCH, *map(json.dumps, (files, list(obs), mistakes)))
    found = json.loads(printed)
    n_collected, is_enabled, n_young = found.pop("garbage")
    assert n_collected <= 4  # of what is made before the import and after it
    assert is_enabled
    assert n_young < 10_000  # not for the next collections to look at
    assert found.pop("package") == []
    heavy = {"anndata", "h5py", "matplotlib", "numba", "optuna", "pandas", "rich", "scipy"}
    heavy |= {"torch", "zarr"}
    needless = {"anndata", "dask", "optuna", "pandas", "pyarrow", "rich", "zarr"}
    assert needless & set(found.pop("read")) == set()
    opened = set(found.pop("opened"))
    assert opened & {*needless, "numba", "numcodecs", "scipy", "torch"} == set()
    # numba looks for SciPy.
    assert heavy & set(found.pop("dataset")) <= {"h5py", "numba", "scipy", "torch"}
    errors = ["PathError", "ColumnError", "FormatError", "ParameterError"]
    assert heavy.isdisjoint(found.pop("plan"))
    assert {step: heavy & set(names) for step, names in found.items()} == {
        step: {"h5py"} for step in ["cells", *errors]
    }


SCRIPTS = {
    "the tuner imports nothing either": (
        """
import sys
before = {name.partition(".")[0] for name in sys.modules}
import cellfeed_tuner
after = {name.partition(".")[0] for name in sys.modules}
print(after - before - sys.stdlib_module_names - {"cellfeed", "cellfeed_tuner"})
""",
        "set()",
    ),
    "garbage collection remains as the user set it": (
        """
import gc, cellfeed
gc.disable()
gc.freeze()
cellfeed.Cells
print(gc.isenabled())
gc.enable()
cellfeed.open_collection
print(gc.isenabled(), gc.get_freeze_count() > 1_000)
""",
        "False\nTrue True",
    ),
    "an import that was interrupted can be done again": (
        """
import sys, cellfeed
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "cellfeed.sampling._block_shuffling":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
try:
    cellfeed.BlockShuffling
except KeyboardInterrupt:
    print("BlockShuffling" in vars(cellfeed), cellfeed.BlockShuffling(4))
""",
        f"False {BlockShuffling(4)}",
    ),
    "Windows is told where it runs": (
        """
import sys
sys.platform = "win32"
try:
    import cellfeed
except ImportError as error:
    print(error)
""",
        "cellfeed runs on Linux and macOS; on Windows, install it in WSL",
    ),
}


@pytest.mark.process
@pytest.mark.parametrize(("script", "printed"), SCRIPTS.values(), ids=SCRIPTS)
def test_where_nothing_is_imported_yet(script, printed):
    assert run(script) == f"{printed}\n"


@pytest.mark.process
def test_without_torch_the_same_comes_as_arrays(plates):
    pytest.importorskip("torch")
    script = Path(without_torch.__file__)
    ran = subprocess.run([sys.executable, script, *plates], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    same, others = pickle.loads(ran.stdout)
    np.testing.assert_equal(same, without_torch.everything(plates))
    assert same["epochs"]["float64"][0][0].dtype == np.float64
    assert others["kinds"] == {
        name: (Cells, "ndarray" if options.get("dense") else "csr_array")
        for name, options in without_torch.OPTIONS.items()
    }
    told = "needs PyTorch, which is not installed; install it with `pip install torch`"
    assert others["errors"] == [
        ("ImportError", "torch", f"`loader` {told}"),
        ("ImportError", "torch", f"`loader` {told}"),
        ("ImportError", "torch", f"`to_torch` {told}"),
    ]
    assert others["is_minibatch"] is False
    assert others["modules"] == []
