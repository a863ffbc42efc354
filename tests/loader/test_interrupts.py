"""Ctrl-C where it must not take effect at once."""

import signal
import subprocess
import sys

import pytest

from cellfeed.interrupts import interrupts_held

COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.{handler})
sys.path.insert(0, {path!r})
from cellfeed.interrupts import run_command
run_command("command")
"""


@pytest.fixture
def ended(tmp_path):
    """A command that runs some modules, and how it ended."""

    def run(handler="default_int_handler", **modules):
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text("import signal, time\n" + text)
        script = COMMAND.format(handler=handler, path=str(tmp_path))
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=False
        )

    return run


def test_are_held_to_the_end():
    done = []

    def interrupted():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
            done.append("all")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert done == ["all"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupts_held():
            pass
    finally:
        signal.signal(signal.SIGINT, before)


LIBRARY = """
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    raise ImportError("half of it is there")
"""


@pytest.mark.parametrize(
    "command",
    ["import library\ndef main():\n    time.sleep(600)", "def main():\n    import library"],
)
def test_a_command_ends_while_it_imports(ended, command):
    """Where a library takes an interruption for something else, as NumPy and pandas do."""
    ran = ended(command=command, library=LIBRARY)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "\nInterrupted.\n")


def test_a_command_with_processes_ends_them_first(ended):
    ran = ended(
        command=(
            "import multiprocessing\n"
            "def main():\n"
            "    fork = multiprocessing.get_context('fork')\n"
            "    process = fork.Process(target=time.sleep, args=(600,))\n"
            "    process.start()\n"
            "    try:\n"
            "        import library\n"
            "    finally:\n"
            "        process.kill()\n"
            "        print('ended', flush=True)\n"
        ),
        library="signal.raise_signal(signal.SIGINT)",
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "ended\n", "\nInterrupted.\n")


def test_outside_of_imports_it_comes_at_once_and_once(ended):
    ran = ended(
        command=(
            "def main():\n"
            "    import library\n"
            "    try:\n"
            "        signal.raise_signal(signal.SIGINT)\n"
            "    except KeyboardInterrupt:\n"
            "        time.sleep(0.1)\n"
            "        print('kept', flush=True)\n"
        ),
        library="",
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "kept\n", "")


def test_what_ignores_it_still_does(ended):
    ran = ended("SIG_IGN", command="def main():\n    signal.raise_signal(signal.SIGINT)")
    assert (ran.returncode, ran.stderr) == (0, "")
