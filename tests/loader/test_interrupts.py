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
RAISES = "import signal\nsignal.raise_signal(signal.SIGINT)"
# Takes an interruption for something else, as NumPy and pandas do.
LIBRARY = """
import signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:
    raise ImportError("half of it is there")
"""
INTERRUPTED = "\nInterrupted.\n"


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


WITH_A_PROCESS = """
import multiprocessing, time
def main():
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=time.sleep, args=(600,))
    process.start()
    try:
        import library
    finally:
        process.kill()
        print("ended", flush=True)
"""
OUTSIDE_OF_IMPORTS = """
import signal, time
def main():
    import library
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        time.sleep(0.1)
        print("kept", flush=True)
"""


COMMANDS = {
    "while it is imported": "import library\ndef main():\n    pass",
    "while it imports": "def main():\n    import library",
    "with processes": WITH_A_PROCESS,
    "outside of imports, at once and once": OUTSIDE_OF_IMPORTS,
    "what ignores it still does": "import signal\ndef main(): signal.raise_signal(signal.SIGINT)",
}
LIBRARIES = {"with processes": RAISES, "outside of imports, at once and once": ""}
ENDS = {
    "with processes": (130, "ended\n", INTERRUPTED),
    "outside of imports, at once and once": (0, "kept\n", ""),
    "what ignores it still does": (0, "", ""),
}


@pytest.mark.process
@pytest.mark.parametrize(
    "when",
    [
        pytest.param(each, marks=[pytest.mark.smoke] * (each == "while it imports"))
        for each in COMMANDS
    ],
)
def test_a_command_that_is_interrupted(tmp_path, when):
    (tmp_path / "command.py").write_text(COMMANDS[when])
    (tmp_path / "library.py").write_text(LIBRARIES.get(when, LIBRARY))
    handler = "SIG_IGN" if when.startswith("what ignores") else "default_int_handler"
    script = COMMAND.format(handler=handler, path=str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    expected = ENDS.get(when, (130, "", INTERRUPTED))
    assert (ran.returncode, ran.stdout, ran.stderr) == expected
