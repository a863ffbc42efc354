"""Compiled code is kept on disk, but never longer than what it was compiled from.

A small package stands in for the loader's own, which takes long to compile: the same module
compiles it, columns are in one file, and functions in another.
"""

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.warm import python as warm

import cellfeed

pytestmark = pytest.mark.process

LOADER = Path(cellfeed.__file__).parent

COLUMNS = "FROM, COUNT, TO = range(3)\n"
OTHER_COLUMNS = "TO, FROM, COUNT = range(3)\n"

TABLES = """
from numba import carray

from standin._columns import COUNT, FROM, TO
from standin._compiled import compiled


@compiled("void(int64[::1])")
def fill(row):
    row[FROM], row[COUNT], row[TO] = 10, 20, 30


def cast_address(ins, outs):
    @compiled("void(voidptr, voidptr)", callback=True)
    def cast(source, target):
        carray(target, (1,), outs)[0] = carray(source, (1,), ins)[0] + FROM

    return cast
"""

# Prints what was computed, and how many functions were compiled for that.
USE = """
import ctypes
import json
import os
import sys
import tempfile

import numba
import numba.core.event as events

# Of this environment, where both had been imported before.
numba.config.reload_config()
tempfile.tempdir = None
sys.path.insert(0, sys.argv[1])
with events.install_recorder("numba:compile") as compiling:
    import numpy as np
    from numba import types
    from standin import _columns, _tables

    row = np.zeros(3, np.int64)
    _tables.fill(row)
    found = {name: int(row[getattr(_columns, name)]) for name in ("FROM", "COUNT", "TO")}
    exec(os.environ.get("BEFORE_CASTS", ""))
    for name in sys.argv[2:]:
        one, cast = np.array([1.0]), np.zeros(1, name)
        keep = _tables.cast_address(types.float64, getattr(types, name))
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(keep.address)
        function(one.ctypes.data, cast.ctypes.data)
        found[name] = int(cast[0])
starts = [event for _, event in compiling.buffer if event.is_start]
callbacks = [0] if len(sys.argv) < 3 else [sum(keep.stats.cache_hits.values())]
print(json.dumps({"found": found, "compiled": len(starts), "loaded": callbacks[0]}))
"""
RIGHT = {"FROM": 10, "COUNT": 20, "TO": 30}


class StandIn:
    """A package whose functions are compiled in processes of their own.

    Parameters
    ----------
    folder
        Where it is, with folders of the user beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.package = folder / "site" / "standin"
        self.package.mkdir(parents=True)
        (self.package / "__init__.py").touch()
        shutil.copy(LOADER / "_compiled.py", self.package)
        (self.package / "_columns.py").write_text(COLUMNS)
        (self.package / "_tables.py").write_text(TABLES)
        (folder / "use.py").write_text(USE)
        self.path = self.package.parent
        self.home = folder / "home"
        self.home.mkdir()
        self.environment: dict[str, str] = {}

    def use(self, *casts: str) -> dict[str, Any]:
        """Return what a new process computes, and how many functions it compiled."""
        done = self.run(*casts)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def run(self, *casts: str, warnings: str = "error") -> subprocess.CompletedProcess[str]:
        known = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "XDG_"))}
        return warm.run(
            # Python itself takes two sources of the same second and size to be the same.
            [sys.executable, "-B", "-W", warnings, self.folder / "use.py", self.path, *casts],
            env=known | {"HOME": str(self.home)} | self.environment,
        )

    def change_columns(self) -> None:
        (self.package / "_columns.py").write_text(OTHER_COLUMNS)

    def kept(self) -> list[Path]:
        """Return the files of compiled code, wherever they are."""
        return sorted(self.folder.rglob("*.nbc"))


@pytest.fixture
def standin(tmp_path):
    return StandIn(tmp_path)


def test_it_is_loaded_as_long_as_nothing_changed(standin):
    assert standin.use() == {"found": RIGHT, "compiled": 1, "loaded": 0}
    assert [path.parent for path in standin.kept()] == [standin.package / "__pycache__"]
    assert standin.use() == {"found": RIGHT, "compiled": 0, "loaded": 0}


def test_columns_that_change_in_another_file_are_those_that_are_written(standin):
    first = standin.use("int64")
    assert first["found"] == RIGHT | {"int64": 1}
    n_kept = len(standin.kept())
    standin.change_columns()
    second = standin.use("int64")
    assert second == {"found": RIGHT | {"int64": 2}, "compiled": first["compiled"], "loaded": 0}
    assert len(standin.kept()) == n_kept == 2  # in place of what was there


def test_the_code_of_another_package_that_changes_is_compiled_again(standin):
    other = standin.package.with_name("other")
    other.mkdir()
    (other / "__init__.py").touch()
    (other / "_columns.py").write_text(COLUMNS)
    (standin.package / "_columns.py").write_text("from other._columns import COUNT, FROM, TO\n")
    (standin.package / "__init__.py").write_text('COMPILED_WITH = ("other",)\n')
    first = standin.use("int64")
    assert first["found"] == RIGHT | {"int64": 1}
    assert standin.use("int64") == {"found": RIGHT | {"int64": 1}, "compiled": 0, "loaded": 1}
    (other / "_columns.py").write_text(OTHER_COLUMNS)
    assert standin.use("int64") == first | {"found": RIGHT | {"int64": 2}}


def test_each_of_what_is_compiled_from_one_text_has_a_file(standin):
    casts = {"int64": 1, "int32": 1, "float32": 1}
    assert standin.use(*casts)["found"] == RIGHT | casts
    assert len(standin.kept()) == 4
    for name in casts:
        assert standin.use(name) == {"found": RIGHT | {name: 1}, "compiled": 0, "loaded": 1}


def test_an_upgrade_under_a_running_process_keeps_nothing_of_what_it_compiles(standin):
    path = standin.package / "_columns.py"
    standin.environment["BEFORE_CASTS"] = f"open({str(path)!r}, 'w').write({OTHER_COLUMNS!r})"
    assert standin.use("int64")["found"] == RIGHT | {"int64": 1}
    assert len(standin.kept()) == 1
    assert standin.use("int64")["found"] == RIGHT | {"int64": 2}


def test_damaged_files_are_compiled_anew(standin):
    first = standin.use("int64")
    for path in standin.kept():
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    assert standin.use("int64") == first
    assert standin.use("int64") == {"found": RIGHT | {"int64": 1}, "compiled": 0, "loaded": 1}


SEVERAL = """
import numpy as np

from standin._compiled import compiled


@compiled("int64(int64)", inner=True)
def twice(n):
    return 2 * n


@compiled("int64(int32[::1])", "int64(int64[::1])", "int64(float64[::1])")
def total(values):
    found = 0
    for i in range(values.size):
        found += twice(int(values[i]))
    return found

"""
USE_SEVERAL = """
import os
import sys
import threading

import numpy as np

sys.path.insert(0, sys.argv[1])
from standin._several import total, twice

print(total(np.arange(4, dtype=np.int32)), total(np.arange(4)), len(total.overloads))
try:
    twice(1)
except TypeError as error:
    print(error)
try:
    total(np.arange(4, dtype=np.uint8))
except TypeError as error:
    print(error)
thread = threading.Thread(target=total, args=(np.ones(4),))
thread.start()
child = os.fork()  # while the thread compiles; the child compiles too
if not child:
    os._exit(total(np.ones(4)))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""


def test_signatures_are_compiled_one_by_one_and_forks_wait_for_them(standin):
    (standin.package / "_several.py").write_text(SEVERAL)
    (standin.folder / "use.py").write_text(USE_SEVERAL)
    done = standin.run(warnings="ignore")
    assert done.stdout.splitlines() == [
        "12 12 2",
        "`twice` can only be called by compiled functions",
        "`total` is not compiled for array(uint8, 1d, C)",
        "8",
    ]


USE_INTERRUPTED = """
import signal
import sys

import numpy as np
from llvmlite.binding.executionengine import ExecutionEngine

sys.path.insert(0, sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)
armed, find = [True], ExecutionEngine._find_module_ptr


def interrupted(self, pointer):  # in a callback that LLVM calls
    if armed:
        armed.clear()
        signal.raise_signal(signal.SIGINT)
    return find(self, pointer)


ExecutionEngine._find_module_ptr = interrupted
from standin._tables import fill

row = np.zeros(3, np.int64)
try:
    fill(row)
except KeyboardInterrupt:
    print("interrupted", armed)
fill(row)
print(*row)
"""


def test_an_interrupt_while_it_compiles_is_not_lost(standin):
    (standin.folder / "use.py").write_text(USE_INTERRUPTED)
    done = standin.run()
    assert done.stdout.splitlines() == ["interrupted []", "10 20 30"]
    assert done.stderr == ""


USE_FROM_THREADS = """
import sys
import threading
import time

import numpy as np
from numba.core.types import abstract

sys.path.insert(0, sys.argv[1])
from standin._ranked import first

number = abstract._autoincr


def slow():  # another thread runs before numba has noted a type that this one made
    time.sleep(0.001)
    return number()


abstract._autoincr = slow
values, together, found = np.ones((1,) * 5, np.int16), threading.Barrier(4), []


def call():
    together.wait()
    found.extend(first(values) for _ in range(3))


threads = [threading.Thread(target=call) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(*found)
"""
RANKED = """
from standin._compiled import compiled


@compiled("int64(int16[:, :, :, :, ::1])")
def first(values):
    return values[0, 0, 0, 0, 0]
"""


def test_threads_agree_on_the_types_of_arguments(standin):
    (standin.package / "_ranked.py").write_text(RANKED)
    (standin.folder / "use.py").write_text(USE_FROM_THREADS)
    done = standin.run(warnings="ignore")
    assert done.stdout.split() == ["1"] * 12, done.stderr


class TestFolders:
    """Where code is kept is up to numba; that it is never old holds in each of them."""

    def check(self, standin, folder):
        assert standin.use("int64")["found"] == RIGHT | {"int64": 1}
        kept = standin.kept()
        assert len(kept) == 2
        assert all(path.is_relative_to(folder) for path in kept)
        assert standin.use("int64")["loaded"] == 1
        standin.change_columns()
        assert standin.use("int64")["found"] == RIGHT | {"int64": 2}

    def test_of_the_user_where_the_package_is_read_only(self, standin):
        (standin.package / "__pycache__").touch()  # no folder can be made there, not even by root
        self.check(standin, standin.home)

    def test_that_the_user_names(self, standin):
        named = standin.folder / "named"
        standin.environment["NUMBA_CACHE_DIR"] = str(named)
        self.check(standin, named)

    def test_none(self, standin):
        (standin.package / "__pycache__").touch()
        standin.home.rmdir()
        standin.home.touch()
        done = standin.run("int64", warnings="always")
        assert json.loads(done.stdout)["found"] == RIGHT | {"int64": 1}
        assert done.stderr.count("RuntimeWarning: compiled code cannot be cached") == 1
        assert "set NUMBA_CACHE_DIR to a writable folder" in done.stderr
        assert not standin.kept()

    def test_of_a_package_in_a_zip_file(self, standin):
        standin.path = standin.folder / "standin.zip"

        def pack():
            with zipfile.ZipFile(standin.path, "w") as packed:
                for path in sorted(standin.package.glob("*.py")):
                    packed.write(path, f"standin/{path.name}")

        pack()
        assert standin.use("int64")["found"] == RIGHT | {"int64": 1}
        assert standin.use("int64")["loaded"] == 1
        standin.change_columns()
        pack()
        assert standin.use("int64")["found"] == RIGHT | {"int64": 2}


def imports(path: Path) -> set[str]:
    """Return the full names of what a file imports, wherever in it."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


class TestTheLoader:
    """All of its compiled functions are compiled as those of the stand-in are."""

    def test_nothing_else_is_compiled(self):
        others = {
            str(path.relative_to(LOADER)): names
            for path in LOADER.rglob("*.py")
            if path != LOADER / "_compiled.py"
            and (names := {name for name in imports(path) if is_compiling(name)})
        }
        assert not others

    def test_what_is_compiled_takes_what_it_needs_from_its_folder(self):
        files = [path for path in LOADER.rglob("*.py") if is_compiled(path)]
        assert {path.parent.name for path in files} >= {"_kernels"}
        for path in files:
            folder = ".".join(["cellfeed", *path.relative_to(LOADER).parts[:-1]])
            others = getattr(importlib.import_module(folder), "COMPILED_WITH", ())
            known = tuple(f"{each}." for each in (folder, "cellfeed._compiled", *others))
            for name in imports(path):
                inside = name.startswith(known)
                assert inside or not name.startswith("cellfeed"), f"{path}: {name}"


def is_compiling(name: str) -> bool:
    """Return whether numba compiles what a name of it decorates, and may keep it on disk."""
    module, _, decorator = name.rpartition(".")
    return name == "numba" or (
        module.split(".")[0] == "numba"
        and decorator in {"cfunc", "guvectorize", "jit", "jit_module", "njit", "vectorize"}
    )


def is_compiled(path: Path) -> bool:
    return any(name.startswith("cellfeed._compiled.") for name in imports(path))


@pytest.mark.parametrize(
    "path", sorted(LOADER.rglob("_fields.py")), ids=lambda path: path.parts[-3]
)
def test_each_field_of_compiled_code_has_one_value(path):
    tree = ast.parse(path.read_text())
    names = [each.id for each in ast.walk(tree)
             if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]  # fmt: skip
    assert len(names) > 10
    assert [name for name, n in Counter(names).items() if n > 1] == []
