"""Ctrl-C, the end of the process and forks, while a server hangs."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.loader.bytes.remote.faulty import KINDS, PATIENT, SHARDED, VALUES, WAYS, read
from tests.servers.faults import Hang
from tests.warm import python as warm

from cellfeed import open_collection

ROOT = Path(__file__).parents[4]
AT_MOST_S = 300  # an attempt alone takes longer than that, with these time-outs
NOISE = ["Fatal", "Segmentation", "Exception ignored", "never retrieved", "was destroyed", "abort"]


@pytest.fixture
def logging_goes_on():
    """Release the lock of logging: Ctrl-C just after it was taken leaves it to this thread."""
    yield
    lock: Any = logging._lock  # type: ignore[attr-defined]
    while lock._is_owned():
        lock.release()


@pytest.mark.usefixtures("logging_goes_on")
@pytest.mark.parametrize("way", [*WAYS, "metadata"])
@pytest.mark.parametrize("kind", [*KINDS, SHARDED])
def test_interrupted(server, kind, way):
    """At once, and the next request is answered."""
    main, sent = threading.main_thread().ident, list[threading.Timer]()

    def hang(request):
        if way == "metadata" and (request.asked == 1 and request.method == "HEAD"):
            return None  # it says what it is, and then hangs
        if not sent:  # once, where it waits for an answer
            sent.append(threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT]))
            sent[0].start()
        return Hang()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        read(server, kind, "opening" if way == "metadata" else way, hang, PATIENT)
    assert time.monotonic() - began < AT_MOST_S
    server.answer = None
    there = open_collection(f"{server.url}/{kind}")
    np.testing.assert_array_equal(there[[599, 3]].X.toarray(), VALUES[[599, 3]])


SCRIPT = f"""
import sys, threading
from cellfeed import BlockShuffling, CellDataset, open_collection

url, way, end = sys.argv[1:]

def opened():
    return open_collection(url, obs=["plate"], storage_options={PATIENT})

def work(wait):
    there = None if way == "opening" else opened()
    print("begun", flush=True)
    wait()
    there = opened() if there is None else there
    if way == "iteration":
        for each in CellDataset(there, BlockShuffling(4), batch_size=64, as_torch=False):
            pass
    there[[599, 3]]

if end == "interrupted":
    try:
        work(sys.stdin.readline)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
else:
    told = threading.Event()
    threading.Thread(target=work, args=(told.wait,), daemon=True).start()
    sys.stdin.readline()
    told.set()
    sys.stdin.readline()
    print("ended", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT / "loader"), os.environ.get("PYTHONPATH")]))
    started = []

    def run(script, *arguments):
        (tmp_path / "script.py").write_text(script)
        process = warm.FinalizedPopen(
            [sys.executable, "-X", "faulthandler", str(tmp_path / "script.py"), *arguments],
            text=True,
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("end", ["interrupted", "ended"])
@pytest.mark.parametrize(("kind", "way"), list(zip([*KINDS, SHARDED], WAYS, strict=True)))
def test_processes_end_quietly(server, run, kind, way, end):
    """By Ctrl-C, or while a thread waits."""
    process = run(SCRIPT, f"{server.url}/{kind}", way, end)
    assert process.stdout.readline() == "begun\n"
    server.requests.clear()
    server.answer = lambda _: Hang()
    process.stdin.write("\n")
    process.stdin.flush()
    deadline = time.monotonic() + AT_MOST_S
    while not server.requests:
        assert process.poll() is None
        assert time.monotonic() < deadline, "nothing is requested"
        time.sleep(0.01)
    if end == "interrupted":
        process.send_signal(signal.SIGINT)
    out, err = process.communicate("\n", timeout=AT_MOST_S)
    assert (process.returncode, out) == (0, f"{end}\n")
    assert not [word for word in NOISE if word in err], err
    assert end == "ended" or not err


FORKS = """
import multiprocessing, sys
from cellfeed import DeliveryError, open_collection

def read(there, queue):
    try:
        queue.put(there[[599, 3]].X.sum())
    except DeliveryError as error:
        queue.put(str(error))

if __name__ == "__main__":
    url, method = sys.argv[1:]
    there = open_collection(url, obs=["plate"])
    print(there[[599, 3]].X.sum(), flush=True)
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=read, args=(there, queue))
    process.start()
    print(queue.get(), flush=True)
    process.join()
    print(there[[599, 3]].X.sum(), process.exitcode, flush=True)
"""


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "fork") for kind in KINDS), (KINDS[0], "spawn"), (KINDS[-1], "forkserver")],
)
def test_other_processes(server, run, kind, method):
    process = run(FORKS, f"{server.url}/{kind}", method)
    out, err = process.communicate(timeout=2 * AT_MOST_S)
    here, there, after = out.splitlines()
    assert after == f"{here} 0"
    if method == "fork":
        assert "forked from one that reads from servers" in there
    else:
        assert there == here
    assert not [word for word in NOISE if word in err], err
