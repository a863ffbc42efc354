import subprocess
import sys

import click
import numpy as np
import pytest
from tests import commands

import cellfeed
from cellfeed import ParameterError
from cellfeed.console import ByteSize, OneLineErrorCommand, format_bytes

ASK_FOR_LESS = "use less, for example with --memory, or close other programs"
MORE_PROCESSES = "close other programs, or raise the limit of processes with `ulimit -u`"
SYNTHESIZE = ["--cells", "100", "--genes", "50", "--plates", "2"]


def test_version():
    result = commands.cellfeed("--version")
    assert result.exit_code == 0
    assert cellfeed.__version__ in result.stdout


def test_the_list_of_commands_is_not_cut():
    _, _, listed = commands.cellfeed("--help").stdout.partition("Commands:")
    assert "store of AnnData groups." in " ".join(listed.split())
    assert not [line for line in listed.splitlines() if line.endswith("...")]


@pytest.mark.process
@pytest.mark.smoke
def test_runs_as_a_module():
    ran = subprocess.run(
        [sys.executable, "-m", "cellfeed", "--help"], capture_output=True, text=True, check=True
    )
    assert ran.stdout.startswith("Usage: python -m cellfeed [OPTIONS] COMMAND")


def test_synthesize_reports_one_line_and_overwrites_nothing(tmp_path):
    written = commands.cellfeed("synthesize", tmp_path, *SYNTHESIZE)
    assert (written.exit_code, written.stderr) == (0, "")
    assert len(list(tmp_path.glob("*.h5ad"))) == 2
    assert written.stdout.startswith(f"{tmp_path}: 2 files, 100 cells, ")
    assert written.stdout.count("\n") == 1
    refused = commands.cellfeed("synthesize", tmp_path, *SYNTHESIZE, "--seed", 1)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.startswith("Error: ")
    assert refused.stderr.count("\n") == 1
    (tmp_path / "file").touch()
    no_folder = commands.cellfeed("synthesize", tmp_path / "file", *SYNTHESIZE)
    assert no_folder.exit_code == 2
    assert no_folder.stderr == f"Error: File exists: `{tmp_path / 'file'}`\n"


@pytest.mark.parametrize("command", ["synthesize", "preshuffle"])
def test_urls_to_write_to_are_no_local_folders(command, tmp_path, monkeypatch, write_h5ad):
    given = SYNTHESIZE if command == "synthesize" else [write_h5ad(np.ones((4, 3), np.float32))]
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    refused = commands.cellfeed(command, *given, "s3://bucket/cells.zarr")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == (
        "Error: s3://bucket/cells.zarr: is a URL, but only local files are written; give a path, "
        "and copy the result there\n"
    )
    assert not [*(tmp_path / "here").iterdir()]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ParameterError("a parameter"), "a parameter"),
        (
            PermissionError(13, "Permission denied", "/a/path"),
            "Permission denied: `/a/path`; change its permissions, or name another",
        ),
        (OSError("two\n  lines"), "two lines"),
        (OSError(), "OSError"),
        (
            OSError(24, "Too many open files", "/a/path"),
            "Too many open files: `/a/path`; raise the limit of this shell with `ulimit -n 65536`",
        ),
        (
            OSError(28, "No space left on device", "/a/path"),
            "No space left on device: `/a/path`; free some space there, or name another folder",
        ),
        (
            BlockingIOError(11, "Resource temporarily unavailable"),
            f"Resource temporarily unavailable; {MORE_PROCESSES}",
        ),
        (
            RuntimeError("can't start new thread"),
            f"can't start new thread; {MORE_PROCESSES}",
        ),
        (
            MemoryError("of\n9 GiB"),
            f"out of memory (of 9 GiB); {ASK_FOR_LESS}",
        ),
        (
            RuntimeError("std::bad_alloc"),
            f"out of memory (std::bad_alloc); {ASK_FOR_LESS}",
        ),
        (
            MemoryError(),
            f"out of memory; {ASK_FOR_LESS}",
        ),
    ],
)
def test_errors_become_one_line(error, message):
    @click.command(cls=OneLineErrorCommand)
    def command():
        raise error

    result = commands.run(command)
    assert (result.exit_code, result.stderr) == (2, f"Error: {message}\n")


def test_an_interruption_while_arguments_are_parsed():
    def interrupt(ctx, param, value):
        raise KeyboardInterrupt

    @click.command(cls=OneLineErrorCommand)
    @click.option("--help-me", is_flag=True, is_eager=True, callback=interrupt)
    def command(help_me):
        pass

    result = commands.run(command, "--help-me")
    assert (result.exit_code, result.stderr) == (130, "\nInterrupted.\n")


def test_messages_name_options_of_the_command():
    """Not in paths, nor what is no option."""

    @click.command(cls=OneLineErrorCommand)
    @click.option("--join-vars")
    @click.option("--step-ms", "step_seconds")
    def command(**_):
        raise ParameterError(
            "/data/join_vars=inner/a.h5ad: give join_vars='inner' or join_vars='outer', "
            "`step_seconds`, join_vars={} or genes='a'"
        )

    ran = commands.run(command)
    assert ran.exit_code == 2
    assert ran.stderr == (
        "Error: /data/join_vars=inner/a.h5ad: give --join-vars inner or --join-vars outer, "
        "`--step-ms`, join_vars={} or genes='a'\n"
    )


def test_errors_of_the_program_keep_their_traceback():
    @click.command(cls=OneLineErrorCommand)
    def command():
        raise ZeroDivisionError

    assert isinstance(commands.run(command).exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (1_234_567_890, "1.2 GB"),
        (10**18, "1000.0 PB"),
    ],
)
def test_format_bytes(n_bytes, text):
    assert format_bytes(n_bytes) == text


@pytest.mark.parametrize(
    ("given", "n_bytes"),
    [
        ("20GB", 20 * 10**9),
        ("20GiB", 20 * 2**30),
        (" 1.5 tb ", 1_500_000_000_000),
        ("8k", 8000),
        ("0.1GB", 10**8),
        ("7", 7),
        (300, 300),
        (np.int32(300), 300),
    ],
)
def test_sizes(given, n_bytes):
    parsed = ByteSize().convert(given, None, None)
    assert (parsed, type(parsed)) == (n_bytes, int)


@pytest.mark.parametrize(
    "given",
    ["", "GB", "much", "-1GB", "1EB", "1 G B", "1e9", "²GB", "0GB", 0, -5, 1.5, True, b"1GB"],
)
def test_what_is_no_size(given):
    with pytest.raises(click.BadParameter, match="is not a size; write 800MB") as raised:
        ByteSize().convert(given, None, None)
    assert raised.value.message.startswith(repr(given))
