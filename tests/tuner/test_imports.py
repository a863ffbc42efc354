"""What the commands import before they do anything, each in a process of its own."""

import json
import re
import subprocess
import sys

import pytest

TUNER, LOADER = "cellfeed_tuner._commands._autotune_cli", "cellfeed._cli"


def imported_by(module: str, *arguments: str) -> set[str]:
    """Return the packages that a command imports, beside the standard library and ours."""
    script = (
        "import json, sys\n"
        "before = {name.partition('.')[0] for name in sys.modules}\n"
        f"from {module} import main\n"
        "try:\n"
        f"    main({list(arguments)!r})\n"
        "except SystemExit as ended:\n"
        "    assert not ended.code, ended.code\n"
        "after = {name.partition('.')[0] for name in sys.modules}\n"
        "print(json.dumps(sorted(after - before - sys.stdlib_module_names)), file=sys.stderr)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout
    return set(json.loads(ran.stderr.splitlines()[-1])) - {"cellfeed", "cellfeed_tuner"}


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (TUNER, ["--help"]),
        (TUNER, ["--version"]),
        (TUNER, ["explain", "--help"]),
        (TUNER, ["show", "--help"]),
        (LOADER, ["--help"]),
        (LOADER, ["preshuffle", "--help"]),
        (LOADER, ["synthesize", "--help"]),
    ],
)
def test_help_imports_nothing_that_it_does_not_need(module, arguments):
    assert imported_by(module, *arguments) <= {"click", "colorama", "importlib_metadata"}


def test_what_earlier_runs_found_is_shown_without_what_measures():
    needless = {"anndata", "h5py", "matplotlib", "numba", "pandas", "scipy", "torch", "zarr"}
    assert not imported_by(TUNER, "show", "--json") & needless


def test_measuring_and_tuning_from_python_import_what_reports_and_searches_need_when_they_do():
    script = (
        "import sys\n"
        "import cellfeed_tuner._measuring._timing, cellfeed_tuner._explain\n"
        "from cellfeed_tuner import AutotuneResult, autotune\n"
        "print(*sorted({'matplotlib', 'optuna', 'rich'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == []


@pytest.mark.parametrize("missing", ["matplotlib", "optuna", "rich", "torch"])
def test_the_line_that_installs_what_is_missing(missing, small_collection, tmp_path):
    script = f"import sys\nsys.modules[{missing!r}] = None\nfrom {TUNER} import main\nmain()"
    command = [
        sys.executable,
        "-c",
        script,
        small_collection,
        "--label=plate",
        "--output",
        tmp_path,
    ]
    # One that is forked has imported all that measures, and would find out when it reports.
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[-1].endswith(
        f"needs {missing}, which is not installed; install it: pip install 'cellfeed[tune]'"
    )


def test_the_line_that_installs_what_is_missing_in_python():
    script = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "try:\n"
        "    from cellfeed_tuner import plots\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, error)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    line = " is not installed; install it: pip install 'cellfeed[tune]'"
    assert re.fullmatch(rf"matplotlib\S* matplotlib\S*{re.escape(line)}\n", ran.stdout)


@pytest.mark.parametrize("arguments", [["--label"], ["explain", "--block-size", "0"]])
def test_what_is_asked_wrongly_is_told_before_anything_is_imported(arguments):
    script = (
        "import sys\n"
        f"from {TUNER} import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        "    assert not {'numpy', 'torch'} & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 2
    assert "AssertionError" not in ran.stderr
    assert ran.stderr.splitlines()[-1].startswith("Error: ")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{path}/none"], "no such file or folder; check the path"),
        (["{path}", "--balance=cell_lin"], "obs has no column 'cell_lin'; its columns are: "),
        (["{path}", "--given=dos"], "obs has no column 'dos'; its columns are: "),
        (["{path}", "--where=dos == 1"], "obs has no column 'dos'; its columns are: "),
        (["{path}", "--element=layers/none"], "has no `layers/none`; its layers are: none"),
        (["{path}", "--storage-options={path}/none"], "cannot be read (No such file or directory)"),
        (["{path}", "--output={file}/folder"], "not writable (Not a directory); choose another"),
    ],
)
def test_paths_columns_and_files_are_checked_before_what_measures_is_imported(
    small_collection, tmp_path, arguments, told
):
    (tmp_path / "file").touch()
    given = [each.format(path=small_collection, file=tmp_path / "file") for each in arguments]
    script = (
        "import sys\n"
        f"from {TUNER} import main\n"
        "try:\n"
        f"    main({[given[0], '--label=plate', f'--output={tmp_path}', *given[1:]]!r})\n"
        "finally:\n"
        "    heavy = {'anndata', 'numba', 'optuna', 'pandas', 'scipy', 'torch', 'zarr'}\n"
        "    assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in ran.stderr, ran.stderr
    assert ran.returncode == 2
    assert told in ran.stderr.splitlines()[-1]
