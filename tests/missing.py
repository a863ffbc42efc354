"""Tests that need PyTorch, or a package of an extra, are skipped where it is not installed.

Only where the test itself imports it, or calls what says that it needs it. Where cellfeed imports
such a package though nobody asked for what needs it, tests fail.
"""

import doctest
import importlib.util
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
OPTIONAL = {
    "bionemo",
    "cellstream",
    "datasets",
    "distributed",
    "jinja2",
    "matplotlib",
    "msgspec",
    "obstore",
    "optuna",
    "psycopg",
    "pyarrow",
    "pytorch_lightning",
    "rich",
    "scvi",
    "skmisc",
    "tiledbsoma",
    "torch",
    "torchdata",
}
# The end of what pytest shows of a test module that failed to import something itself.
IMPORT_OF_TEST = re.compile(
    r"^\S*tests/\S+: in .*\n.*\nE +ModuleNotFoundError: No module named '([^.']+)", re.MULTILINE
)
# The last frame and the end of a traceback, such as of a script of a test.
IMPORT_OF_SCRIPT = re.compile(
    r'File "([^"]+)", line .*\n(?:.*\n){0,2}.*No module named \'([^.\']+)'
)
# How cellfeed and cellfeed_tuner name what is missing.
NAMED = re.compile(r"(\w+)(?:, which)? is not installed; install it")


def is_missing(name: str) -> bool:
    return name in OPTIONAL and importlib.util.find_spec(name) is None


def is_import_of_test(error: BaseException) -> bool:
    traceback, files = error.__traceback__, list[str]()
    while traceback is not None:
        files.append(traceback.tb_frame.f_code.co_filename)
        traceback = traceback.tb_next
    files = [file for file in files if "importlib" not in file]
    return Path(files[-1]).is_relative_to(TESTS)


def missing_in(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    name = found[1].lower().replace("pytorch", "torch") if found else ""
    return name if is_missing(name) else None


def missing_for(error: BaseException) -> str | None:
    """Return the missing package that a test asked for; None if it failed for another reason."""
    cause = error if isinstance(error, ImportError) else error.__cause__
    name = str(getattr(cause, "name", None)).partition(".")[0]
    if is_missing(name) and (is_import_of_test(error) or "pip install" in str(error)):
        return name
    for found in IMPORT_OF_SCRIPT.finditer(str(error)):
        if is_missing(found[2]) and "/cellfeed" not in found[1]:
            return found[2]
    return missing_in(NAMED, str(error))


def skip_if_missing():
    try:
        return (yield)
    except Exception as error:
        name = missing_for(error)
        if name is not None:
            pytest.skip(f"{name} is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call():
    return (yield from skip_if_missing())


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup():
    return (yield from skip_if_missing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip the examples of a docstring that need what is missing."""
    try:
        return (yield)
    except doctest.UnexpectedException as unexpected:
        error = unexpected.exc_info[1]
        imported = str(getattr(error, "name", None))
        name = imported if is_missing(imported) else missing_for(error)
        if name is not None:
            pytest.skip(f"{name} is not installed")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed:
        text = report.longreprtext
        name = missing_in(IMPORT_OF_TEST, text) or missing_in(NAMED, text)
        if name is not None:
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"Skipped: {name} is not installed")
    return report
