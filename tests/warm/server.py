"""How does Python run a script without importing again what takes seconds to import?

A process that has imported it forks for each request. The child takes over streams, arguments,
environment and folder as a process of its own has them, runs the script as ``__main__``, and ends
as Python ends; unless that is asked for, the interpreter is not finalized, which would copy most of
the memory that the fork shares.
"""

import atexit
import builtins
import contextlib
import faulthandler
import fcntl
import gc
import importlib
import json
import os
import random
import re
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np

IMPORTED = (
    "anndata",
    "cellfeed.dataset",
    "cellfeed.preshuffling",
    "cellfeed.synthetic",
    "cellfeed_tuner._measuring._timing",
    "cellfeed_tuner._reports._page",
    "cellfeed_tuner._run",
    "cellfeed_tuner._history",
    "cellfeed_tuner.plots",
    "pandas",
    "scipy.optimize",
    "scipy.sparse",
    "torch.utils.data",
    "zarr",
)
MOST_BYTES, MOST_FILES = 1 << 20, 64
ADDRESS = "CELLFEED_TESTS_WARM_PYTHON"
# Set where autotune is to search as `tests.short_replicates` says.
SHORT_REPLICATES = "CELLFEED_TESTS_SHORT_REPLICATES"
NUMBER = struct.Struct("i")


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request until the input ends; in a child, return what is to be run.

    A child answers with its number at once; its status is told when it has ended.
    """
    for name in IMPORTED:
        with contextlib.suppress(ImportError):  # then the scripts say so
            importlib.import_module(name)
    # The first optimizer imports the second. Called at exit, they would hide that Ctrl-C ended the
    # process, the first one with PyTorch 2.5.
    with contextlib.suppress(ImportError), mock.patch.object(atexit, "register"):
        importlib.import_module("torch.distributed.checkpoint")
        importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(writing)
    running = dict[int, socket.socket]()
    with selectors.DefaultSelector() as selector:
        for each in (0, reading, listener):
            selector.register(each, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if 0 in ready:
                sys.exit()
            if reading in ready:
                os.read(reading, 1 << 16)
                _tell_of_ended(running)
            if listener in ready:
                connection, _ = listener.accept()
                message, files, _, _ = socket.recv_fds(connection, MOST_BYTES, MOST_FILES)
                pid = os.fork()
                if pid == 0:
                    break
                _close(*files)
                running[pid] = connection
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request = json.loads(message)
    if request["new_session"]:
        os.setsid()  # before anyone may ask for its process group
    connection.sendall(NUMBER.pack(os.getpid()))
    _close(reading, writing, *(each.detach() for each in (*running.values(), connection, listener)))
    return request, files


def _close(*files: int) -> None:
    for file in files:
        os.close(file)


def _tell_of_ended(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection, contextlib.suppress(OSError):  # nobody may ask
            connection.sendall(NUMBER.pack(status))


def take_over(request: dict[str, Any], files: list[int]) -> None:
    """Become the process that was asked for."""
    numbers = request["numbers"]
    # Above all that are wanted, so that none is overwritten before it is copied.
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, 1 + max(numbers)) for file in files]
    _close(*set(files) - {0, 1, 2})
    for file, number in zip(above, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
    _close(*above)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    np.random.seed()  # noqa: NPY002 - what the script may draw from, which was seeded at import
    if ADDRESS in os.environ:
        use_for_measuring()
    if SHORT_REPLICATES in os.environ:
        from tests.short_replicates import shorten  # noqa: PLC0415 - where the tuner is

        shorten()


def use_for_measuring() -> None:
    """Let the processes in which autotune measures be forked where the imports are done."""
    from tests.warm.python import Popen  # noqa: PLC0415 - which imports this

    from cellfeed_tuner._measuring import _process  # noqa: PLC0415 - where the tuner is

    forking = types.SimpleNamespace(Popen=Popen, DEVNULL=subprocess.DEVNULL)
    setattr(_process, "subprocess", forking)  # noqa: B010 - of another type


def run_main(arguments: list[str]) -> None:
    """Run a script as Python does that is called with these arguments."""
    folder = "" if _take_options(arguments) else None
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [each for each in paths if each and each not in sys.path]
    main = types.ModuleType("__main__")
    first, *rest = arguments
    if first == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        source, name, sys.argv[:] = rest[0], "<string>", ["-c", *rest[1:]]
    else:
        source, name, sys.argv[:] = Path(first).read_text(), first, arguments
        main.__file__, folder = first, folder if folder is None else str(Path(first).parent)
    if folder is not None:
        sys.path.insert(0, folder)
    sys.modules["__main__"] = main
    exec(compile(source, name, "exec"), main.__dict__)


def run_to_its_end(arguments: list[str]) -> None:
    """Run a script, do all that Python does at its end but finalize the interpreter, and exit.

    Other errors than `SystemExit` are left to Python.
    """
    try:
        run_main(arguments)
    except SystemExit as ended:
        status = ended.code
    else:
        status = None
    if isinstance(status, str):
        sys.stderr.write(f"{status}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    # PyTorch 2.5 leaves a folder of its own to the end, which Python tells.
    of_torch = sys.modules.get("torch.distributed.nn.jit.instantiator")
    if folder := getattr(of_torch, "_TEMP_DIR", None):
        warnings.filterwarnings("ignore", f"Implicitly cleaning up {re.escape(repr(folder))}")
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(bool(status) if isinstance(status, str | None) else status & 0xFF)


def _take_options(arguments: list[str]) -> bool:
    """Do as the options in front of a script say; return whether its folder is searched."""
    is_searched = True
    while arguments[0].startswith("-") and arguments[0] not in {"-c", "-m"}:
        option = arguments.pop(0)
        if option == "-W":
            _warn(arguments.pop(0))
        elif option == "-B":
            sys.dont_write_bytecode = True
        elif option == "-u":
            for stream in (sys.stdout, sys.stderr):
                cast("TextIOWrapper", stream).reconfigure(write_through=True)
        elif option == "-P":
            is_searched = False
        elif option == "-X" and arguments.pop(0) == "faulthandler":
            faulthandler.enable()
        else:
            msg = f"unknown option: {option}"
            raise ValueError(msg)
    return is_searched


def _warn(rule: str) -> None:
    """Apply ``error::UserWarning`` or ``ignore:text:UserWarning``, also in processes started."""
    sys.warnoptions.append(rule)
    action, text, kind = (*rule.split(":"), "", "")[:3]
    category = getattr(builtins, kind or "Warning")
    warnings.filterwarnings(action, re.escape(text), category)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    importlib.import_module("tests.warm.python")
    sys.path.pop(0)
    request, files = serve(socket.socket(fileno=int(sys.argv[1])))
    own_main = sys.modules["__main__"]  # which the script's takes the place of
    take_over(request, files)
    (run_main if request["is_finalized"] else run_to_its_end)(request["arguments"])
