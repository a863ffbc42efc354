"""What `cellfeed preshuffle` prints."""

import pytest
from tests import commands
from tests.loader.convert.test_preshuffle import FEW_CELLS, check_against_memory, interrupted

from cellfeed.console import ByteSize


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.zarr"


def test_command_reports_one_line(plates, out):
    result = commands.cellfeed("preshuffle", *plates, out, "--memory", "13kB", "--seed", 3)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{out}: 63 cells in ")
    assert result.stdout.count("\n") == 1
    check_against_memory(out, plates)


def test_command_refuses_in_one_line(plates, out):
    interrupted(plates, out, 1)
    result = commands.cellfeed("preshuffle", *plates, out, "--memory", FEW_CELLS, "--seed", 1)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {out}: was begun with seed 0")
    assert result.stderr.count("\n") == 1


def test_command_says_what_is_no_size(plates, out):
    result = commands.cellfeed("preshuffle", *plates, out, "--memory", "much")
    assert result.exit_code == 2
    assert "write 800MB or 8GiB" in result.stderr


@pytest.mark.parametrize(("text", "n_bytes"), [("800MB", 8 * 10**8), ("1 GiB", 2**30), ("7", 7)])
def test_sizes(text, n_bytes):
    assert ByteSize().convert(text, None, None) == n_bytes
