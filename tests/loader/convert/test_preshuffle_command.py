"""What `cellfeed preshuffle` prints."""

import pytest
from click.testing import CliRunner
from tests.loader.convert.test_preshuffle import FEW_CELLS, check_against_memory, interrupted

from cellfeed import _cli
from cellfeed.console import ByteSize


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.zarr"


@pytest.fixture
def run():
    def run(*arguments):
        return CliRunner().invoke(_cli.main, ["preshuffle", *map(str, arguments)])

    return run


def test_command_reports_one_line(run, plates, out):
    result = run(*plates, out, "--memory", "13kB", "--seed", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}: 63 cells in ")
    assert result.stdout.count("\n") == 1
    check_against_memory(out, plates)


def test_command_refuses_in_one_line(run, plates, out):
    interrupted(plates, out, 1)
    result = run(*plates, out, "--memory", FEW_CELLS, "--seed", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {out}: was begun with seed 0")
    assert result.stderr.count("\n") == 1


def test_command_says_what_is_no_size(run, plates, out):
    result = run(*plates, out, "--memory", "much")
    assert result.exit_code == 2
    assert "write 800MB or 8GiB" in result.stderr


@pytest.mark.parametrize(("text", "n_bytes"), [("800MB", 8 * 10**8), ("1 GiB", 2**30), ("7", 7)])
def test_sizes(text, n_bytes):
    assert ByteSize().convert(text, None, None) == n_bytes
