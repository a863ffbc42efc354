"""Extensions import public names only, and the core works without them."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.loader import extensions

ROOT = Path(__file__).parents[2]
# Compiled code takes in the constants and the inner functions of other modules when it is compiled.
# A stranger compiles by himself; these use what the decoders of chunks are written with.
COMPILED = (
    "cellfeed.storages.parquet._kernels",
    "cellfeed.tokenizers._kernels",
)
EXCEPTIONS = {
    "_codecs": "numbers and inner functions of codecs",
    "_fields": "columns of the tables that compiled code takes",
    "_native": "loads, stores and calls by address",
}


@pytest.mark.smoke
@pytest.mark.slow  # reads all of the loader
def test_extensions_import_public_names_only():
    others = []
    for each in extensions.imports():
        own = extensions.extension_of(each.by)
        if own is None or extensions.extension_of(each.module) == own:
            continue
        allowed = {f"cellfeed.decode._kernels.{name}" for name in EXCEPTIONS}
        if each.by.startswith(COMPILED) and (each.module in allowed or each.name in EXCEPTIONS):
            continue
        if not extensions.is_public(each.module, each.name):
            others.append(each)
    assert others == []


@pytest.mark.smoke
@pytest.mark.slow  # reads all of the loader
def test_the_core_imports_no_extension():
    """But by its name, as attributes of the package that are imported when they are used."""
    found = [
        each
        for each in extensions.imports()
        if extensions.extension_of(each.by) is None
        and extensions.extension_of(each.module) is not None
        and each.by not in {"cellfeed", "cellfeed._entry_point"}  # tables of names
    ]
    assert found == []


@pytest.mark.smoke
@pytest.mark.slow  # reads all of the loader
def test_the_core_names_no_extension():
    """Nor does it import one by its name, but for the registry, which looks into a folder."""
    found = [
        (by, node.value)
        for by, path in extensions.modules().items()
        if extensions.extension_of(by) is None and by not in {"cellfeed", "cellfeed._entry_point"}
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("cellfeed.") and extensions.extension_of(node.value) is not None
    ]
    assert found == []


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """A copy of the package without the folders of extensions, with what is compiled."""
    folder = tmp_path_factory.mktemp("core")
    shutil.copytree(extensions.LOADER, folder / "cellfeed")
    for each in extensions.folders():
        shutil.rmtree(folder / "cellfeed" / each.relative_to(extensions.LOADER))
    for group in extensions.GROUPS:
        shutil.rmtree(folder / "cellfeed" / group)
    return folder


def run(core, *arguments):
    """Run Python with that copy, from the beginning; not in a process that has imported all."""
    known = {k: v for k, v in os.environ.items() if not k.startswith("CELLFEED_TESTS")}
    command = [sys.executable, *arguments]
    env = known | {"PYTHONPATH": f"{core}{os.pathsep}{ROOT}"}
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=1700
    )


@pytest.mark.slow
@pytest.mark.process
def test_tests_of_the_core_pass_without_extensions(core, pytestconfig):
    """Those that read little; `make test-core` has all of them. Warnings count as in this run."""
    marks = "not (slow or process or server or docs)"
    filters = "\n".join(pytestconfig.getini("filterwarnings"))
    options = (
        *("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-profile=quick", "-m", marks),
        f"--override-ini=filterwarnings={filters}",
    )
    tests = [
        f"tests/loader/{name}" for name in ("collection", "fetch", "rows", "sampling", "testing")
    ]
    ran = run(core, "-m", "pytest", *options, *tests)
    assert ran.returncode == 0, ran.stdout[-5000:]


USE = """
import cellfeed
from cellfeed import open_collection

for fails in (lambda: cellfeed.ParquetSource, lambda: open_collection("folder")):
    try:
        fails()
    except (ImportError, cellfeed.CellfeedError) as error:
        print(error)
print(sorted(storage.name for storage in cellfeed.sources._registry.built_in()))
"""


@pytest.mark.process
def test_what_needs_an_extension_that_is_not_there_says_so(core):
    ran = run(core, "-c", USE)
    assert ran.returncode == 0, ran.stderr
    first, _, last = ran.stdout.splitlines()
    assert first == "No module named 'cellfeed.storages'"
    assert last == "['AnnData']"
