"""What is imported when, and what there is without torch; each in a process of its own."""

import ast
import importlib
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp

import cellfeed
from cellfeed import BlockShuffling, CellDataset, Cells, open_collection

PACKAGES = ["cellfeed", "cellfeed_tuner"]
HEAVY = ["anndata", "h5py", "matplotlib", "numba", "optuna", "pandas", "rich", "scipy", "torch"]


def run(script: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_the_package_imports_no_other(package):
    script = (
        "import json, sys\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        f"import {package}\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(after - before - sys.stdlib_module_names)))"
    )
    assert set(json.loads(run(script))) <= {"cellfeed", package}


def test_garbage_collection_pauses_while_a_name_is_imported():
    script = (
        "import gc, json\n"
        "import cellfeed\n"
        "gc.collect()\n"
        "collected = []\n"
        "gc.callbacks.append(lambda phase, info: collected.append(phase))\n"
        "cellfeed.CellDataset\n"
        "young = gc.get_count()[0] + sum(map(len, map(gc.get_objects, (0, 1))))\n"
        "print(json.dumps([len(collected), gc.isenabled(), young < 10_000]))"
    )
    collected, enabled, old = json.loads(run(script))
    assert collected <= 4  # of what is made before the import and after it
    assert enabled
    assert old  # not for the next collections to look at


def test_garbage_collection_remains_as_the_user_set_it():
    script = (
        "import gc, json\n"
        "import cellfeed\n"
        "gc.disable()\n"
        "gc.freeze()\n"
        "cellfeed.Cells\n"
        "disabled = not gc.isenabled()\n"
        "gc.enable()\n"
        "cellfeed.CellDataset\n"
        "print(json.dumps([disabled, gc.isenabled(), gc.get_freeze_count() > 1_000]))"
    )
    assert json.loads(run(script)) == [True, True, True]


def test_what_a_name_needs_is_imported_with_it():
    pytest.importorskip("torch")
    script = (
        "import json, sys\n"
        f"there = lambda: [name for name in {HEAVY} if name in sys.modules]\n"
        "found = {}\n"
        "from cellfeed import BlockShuffling, EpochPlan, ParameterError\n"
        "found['plan'] = there()\n"
        "from cellfeed import Cells, open_collection\n"
        "found['collection'] = there()\n"
        "from cellfeed import CellDataset\n"
        "found['dataset'] = there()\n"
        "print(json.dumps(found))"
    )
    found = json.loads(run(script))
    assert found["plan"] == []
    assert found["collection"] == ["h5py"]
    assert set(found["dataset"]) <= {"h5py", "numba", "scipy", "torch"}  # numba looks for SciPy


def test_minibatches_of_h5ad_need_neither_anndata_nor_pandas_scipy_and_zarr(write_h5ad):
    """Sparse or dense, with few genes or many: one process, since none may import them."""
    pytest.importorskip("torch")
    obs = {"plate": ["a", "b", "a", "b"], "count": [1, 2, 3, 4], "score": [0.5, 1.5, 2.5, 3.5]}
    few, many = (np.ones((4, n), np.float32) for n in (5, 12_000))
    kinds = [
        [str(write_h5ad(X, obs, compression="gzip")) for _ in "ab"]
        for X in (few, many, sp.csr_matrix(few), sp.csr_matrix(many))
    ]
    script = (
        "import json, sys\n"
        "from cellfeed import BlockShuffling, open_collection\n"
        f"collections = [open_collection(paths, obs={list(obs)}) for paths in {kinds}]\n"
        "opened = {name for name in sys.modules if '.' not in name}\n"
        "from cellfeed import CellDataset\n"
        "for collection in collections:\n"
        "    minibatch = next(iter(CellDataset(collection, BlockShuffling(2), 4, seed=0)))\n"
        "    assert minibatch.X.shape[0] == 4 and len(minibatch.obs) == 3\n"
        "read = {name for name in sys.modules if '.' not in name}\n"
        "print(json.dumps([sorted(opened), sorted(read)]))"
    )
    opened, read = map(set, json.loads(run(script)))
    needless = {"anndata", "dask", "optuna", "pandas", "pyarrow", "rich", "zarr"}
    assert opened & {*needless, "numba", "numcodecs", "scipy", "torch"} == set()
    assert read & needless == set()


def test_what_is_mistyped_is_told_before_what_takes_long_is_imported(write_h5ad):
    path = write_h5ad(np.ones((2, 2), np.float32), {"plate": ["a", "b"]})
    script = (
        "import sys\n"
        "from cellfeed import CellfeedError, open_collection\n"
        "for options in ({}, {'obs': ['plte']}, {'elements': ['layers/count']}, "
        "{'join_vars': 'sam'}):\n"
        "    try:\n"
        f"        open_collection({str(path)!r} if options else '/none.h5ad', **options)\n"
        "    except CellfeedError as error:\n"
        f"        print(type(error).__name__, *({{*{HEAVY}, 'zarr'}} & set(sys.modules)))"
    )
    errors = ["PathError", "ColumnError", "FormatError", "ParameterError"]
    assert run(script).splitlines() == [f"{each} h5py" for each in errors]


@pytest.mark.parametrize("package", PACKAGES)
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


@pytest.mark.parametrize("package", PACKAGES)
def test_unknown_names_are_refused_as_python_does(package):
    module = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'nothing'$"):
        module.nothing  # noqa: B018
    with pytest.raises(ImportError, match=f"^cannot import name 'nothing' from '{package}'"):
        exec(f"from {package} import nothing")
    assert not hasattr(module, "nothing")


def test_modules_that_were_there_are_there():
    script = "import cellfeed; print(cellfeed.machine.__name__, cellfeed.sampling.__name__)"
    assert run(script) == "cellfeed.machine cellfeed.sampling\n"


def test_an_import_that_was_interrupted_can_be_done_again():
    script = (
        "import sys, cellfeed\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'cellfeed.sampling._block_shuffling':\n"
        "            sys.meta_path.remove(self)\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "try:\n"
        "    cellfeed.BlockShuffling\n"
        "except KeyboardInterrupt:\n"
        "    print('BlockShuffling' in vars(cellfeed), cellfeed.BlockShuffling(4))"
    )
    assert run(script).split() == ["False", *repr(BlockShuffling(4)).split()]


@pytest.fixture(scope="module")
def without_torch(plates):
    script = Path(__file__).with_name("without_torch.py")
    ran = subprocess.run([sys.executable, script, *plates], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
    return pickle.loads(ran.stdout)


class TestWithoutTorch:
    def test_it_is_not_there(self, without_torch):
        assert without_torch["modules"] == []
        assert without_torch["is_minibatch"] is False

    def test_rows_are_read(self, without_torch, plates, in_memory):
        X, obs, rows = without_torch["taken"]
        assert np.array_equal(X.toarray(), in_memory(plates)[[40, 3, 3]])
        assert rows.tolist() == [40, 3, 3]
        assert obs["number"].tolist() == [40, 3, 3]

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("sparse", {}),
            ("dense", {"dense": True}),
            ("float64", {"dtype": "float64"}),
            ("transformed", {}),
            ("transformed and dense", {"dense": True}),
        ],
    )
    def test_minibatches_hold_what_tensors_do(self, without_torch, plates, name, options):
        pytest.importorskip("torch")
        collection = open_collection(plates, obs=["plate", "number"])
        dataset = CellDataset(collection, BlockShuffling(4), 8, 2, seed=0, **options)
        assert len(without_torch["epochs"][name]) == len(dataset)
        for (X, obs, rows), expected in zip(without_torch["epochs"][name], dataset, strict=True):
            assert sp.issparse(X) is not options.get("dense", False)
            assert X.dtype == dataset.dtype or dataset.dtype is None
            values = X.toarray() if isinstance(X, sp.csr_array) else X
            assert np.array_equal(values, expected.to("cpu", dense=True).X.numpy())
            assert np.array_equal(rows, expected.rows.numpy())
            assert obs.keys() == expected.obs.keys()
            assert all(np.array_equal(obs[each], expected.obs[each].numpy()) for each in obs)

    def test_the_plan_is_the_same(self, without_torch, plates):
        dataset = CellDataset(open_collection(plates), BlockShuffling(4), 8, 2, seed=0)
        assert np.array_equal(without_torch["rows"], dataset.plan(epoch=1).fetch(0).rows)
        assert without_torch["length"] == len(dataset)
        indexed = CellDataset(np.arange(40), BlockShuffling(4), 8, 2, seed=0)
        assert [each.tolist() for each in without_torch["indexed"]] == [
            each.tolist() for each in indexed
        ]

    def test_what_needs_it_says_how_to_install_it(self, without_torch):
        told = "needs PyTorch, which is not installed; install it with `pip install torch`"
        assert without_torch["errors"] == [
            ("ImportError", "torch", f"`loader` {told}"),
            ("ImportError", "torch", f"`loader` {told}"),
            ("ImportError", "torch", f"`to_torch` {told}"),
        ]


def test_classes_are_pickled_by_the_name_of_their_module():
    assert pickle.loads(pickle.dumps(cellfeed.Cells)) is Cells
