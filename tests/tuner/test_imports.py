"""What the commands import before they do anything, and what they say where it is missing."""

import json
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.process]

TUNER, LOADER = "cellfeed_tuner._commands._autotune_cli", "cellfeed.commands"
# Runs commands in one process that has imported nothing, and tells of each how it ended, its last
# line of error, and the packages that are imported by then.
RUN = """
import contextlib, importlib, io, json, sys

before = {name.partition(".")[0] for name in sys.modules} | sys.stdlib_module_names

def ran(module, arguments):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            importlib.import_module(module).main(arguments)
        except SystemExit as ended:
            code = ended.code
    imported = {name.partition(".")[0] for name in sys.modules} - before
    return code, err.getvalue().splitlines()[-1:], sorted(imported)

commands = json.loads(sys.argv[1])
"""
TELL = RUN + "print(json.dumps([ran(*each) for each in commands]), file=sys.stderr)"
WITHOUT = (
    RUN
    + """
def without(package, module, arguments):
    for name in [*sys.modules]:
        if name.partition(".")[0] in {package, module.partition(".")[0]}:
            del sys.modules[name]
    sys.modules[package] = None
    told = ran(module, arguments)
    del sys.modules[package]
    return told[:2]

print(json.dumps([without(*each) for each in commands]), file=sys.stderr)
"""
)
HEAVY = {"anndata", "matplotlib", "numba", "optuna", "pandas", "scipy", "torch", "zarr"}


def output_of(script, commands=()):
    """What Python prints last that has imported nothing."""
    told = subprocess.run(
        [sys.executable, "-c", script, json.dumps(commands)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return told.stderr.splitlines()[-1]


def test_what_takes_long_is_imported_when_it_is_needed(small_collection, tmp_path, result_of):
    (tmp_path / "file").touch()
    saved = tmp_path / "saved.json"
    result_of("explained").save(saved)
    help_of = [
        *((TUNER, each) for each in (["--help"], ["--version"])),
        *((TUNER, [each, "--help"]) for each in ("explain", "show")),
        *((LOADER, each) for each in (["--help"], ["preshuffle", "--help"])),
        (LOADER, ["synthesize", "--help"]),
    ]
    asked_wrongly = [(TUNER, ["--label"]), (TUNER, ["explain", "--block-size", "0"])]
    path = str(small_collection)
    # Paths, columns and files are checked before what measures is imported.
    refused = {
        f"{tmp_path}/none": "no such file or folder; check the path",
        "--label=constant": "obs column 'constant' has 1 value(s)",
        "--label=plat": "obs has no column 'plat'; its columns are: ",
        "--batch-size=1000000": "even the smallest configuration needs 1,000,000 to be timed",
        "--need=1e400": "`0 < need < infinity` must hold, but got --need inf",
        "--seed=-1": "`seed >= 0` must hold, but got --seed -1",
        "--balance=cell_lin": "obs has no column 'cell_lin'; its columns are: ",
        "--where=dos == 1": "obs has no column 'dos'; its columns are: ",
        "--element=layers/none": "has no `layers/none`; its layers are: none",
        f"--storage-options={path}/none": "cannot be read (No such file or directory)",
        f"--output={tmp_path}/file/folder": "not writable (Not a directory); choose another",
    }
    usual = [path, "--label=plate", f"--output={tmp_path}"]
    ours = {"cellfeed", "cellfeed_tuner", "click", "colorama", "importlib_metadata"}
    stages = [
        (help_of, 0, lambda imported: imported - ours),
        (asked_wrongly, 2, {"numpy", "torch"}.intersection),
        ([(TUNER, [*usual, each]) for each in refused], 2, HEAVY.intersection),
        ([(TUNER, ["explain", str(saved)])], 0, HEAVY.intersection),
        ([(TUNER, ["show", "--json"])], 0, {*HEAVY - {"optuna"}, "h5py"}.intersection),
    ]
    told = []
    for some in (stages[:4], stages[4:]):  # the last imports what those before must not
        told += json.loads(output_of(TELL, [each for stage, _, _ in some for each in stage]))
    for stage, code, needless in stages:
        for _, arguments in stage:
            ended, error, imported = told.pop(0)
            assert (ended or 0) == code, (arguments, error)
            assert not needless(set(imported)), arguments
            assert not code or refused.get(arguments[-1], "Error: ") in error[0]


def test_the_line_that_installs_what_is_missing(small_collection, tmp_path):
    packages = ["torch", "rich", "optuna", "matplotlib"]
    arguments = [str(small_collection), "--label=plate", "--output", str(tmp_path)]
    told = json.loads(output_of(WITHOUT, [(each, TUNER, arguments) for each in packages]))
    line = "which is not installed; install it: pip install 'cellfeed[tune]'"
    for package, (code, (error,)) in zip(packages, told, strict=True):
        assert code == 2
        assert error.endswith(f"needs {package}, {line}")


def test_from_python_what_reports_and_searches_is_imported_when_it_is_needed():
    script = """
import sys, cellfeed_tuner._measuring._timing, cellfeed_tuner._explain
from cellfeed_tuner import AutotuneResult, autotune
assert not {"matplotlib", "optuna", "rich"} & set(sys.modules), sys.modules
sys.modules["matplotlib"] = None
try:
    from cellfeed_tuner import plots
except ModuleNotFoundError as error:
    print(error.name, error, file=sys.stderr)
"""
    line = " is not installed; install it: pip install 'cellfeed[tune]'"
    assert re.fullmatch(rf"matplotlib\S* matplotlib\S*{re.escape(line)}", output_of(script))
