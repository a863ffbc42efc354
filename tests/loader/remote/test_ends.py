"""Ctrl-C, the end of the process and forks, while a server hangs; each in a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.loader.remote.faulty import KINDS, SHARDED
from tests.servers.faults import Hang
from tests.warm import python as warm

ROOT = Path(__file__).parents[3]
AT_MOST_S = 300  # an attempt alone takes longer than that, with the time-outs of the scripts
NOISE = ["Fatal", "Segmentation", "Exception ignored", "never retrieved", "was destroyed", "abort"]

SCRIPT = """
import multiprocessing, os, sys, threading
from cellfeed import BlockShuffling, CellDataset, open_collection

CLIENT = {"read_timeout": "10m", "connect_timeout": "10m", "timeout": "10m"}
url, way, end = sys.argv[1:]

def opened():
    return open_collection(url, obs=["plate"], storage_options={"client_options": CLIENT})

def read(there):
    if way == "iteration":
        for each in CellDataset(there, BlockShuffling(4), batch_size=64, as_torch=False):
            pass
    else:
        there[[599, 3]]

def work(wait):
    there = None if way == "opening" else opened()
    print("begun", flush=True)
    wait()
    read(opened() if there is None else there)

if end == "interrupted":
    try:
        work(sys.stdin.readline)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
elif end == "thread":
    told = threading.Event()
    threading.Thread(target=work, args=(told.wait,), daemon=True).start()
    sys.stdin.readline()
    told.set()
    sys.stdin.readline()
    print("ended", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    path = os.pathsep.join(filter(None, [str(ROOT / "loader"), os.environ.get("PYTHONPATH")]))
    started = []

    def run(*arguments):
        process = warm.FinalizedPopen(
            [sys.executable, "-X", "faulthandler", str(tmp_path / "script.py"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_for_request(server, process, *methods):
    deadline = time.monotonic() + AT_MOST_S
    while not any(request.method in methods for request in server.requests):
        assert process.poll() is None
        assert time.monotonic() < deadline, "nothing is requested"
        time.sleep(0.01)


def hang(server, process):
    """Let the process go on to a request that nothing answers."""
    assert process.stdout.readline() == "begun\n"
    server.requests.clear()
    server.answer = lambda _: Hang()
    process.stdin.write("\n")
    process.stdin.flush()
    wait_for_request(server, process, "GET", "HEAD")


@pytest.mark.parametrize("way", ["opening", "rows", "iteration"])
@pytest.mark.parametrize("kind", [*KINDS, SHARDED])
def test_interrupted(server, run, kind, way):
    process = run(f"{server.url}/{kind}", way, "interrupted")
    hang(server, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=AT_MOST_S)
    assert (process.returncode, out) == (0, "interrupted\n")
    assert not [word for word in NOISE if word in err], err
    assert not err


@pytest.mark.parametrize("way", ["opening", "rows", "iteration"])
@pytest.mark.parametrize("kind", [*KINDS, SHARDED])
def test_process_ends_while_a_thread_waits(server, run, kind, way):
    process = run(f"{server.url}/{kind}", way, "thread")
    hang(server, process)
    out, err = process.communicate("\n", timeout=AT_MOST_S)
    assert (process.returncode, out) == (0, "ended\n")
    assert not [word for word in NOISE if word in err], err


@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_while_metadata_is_read(server, run, kind):
    """The server answers what it is, and then hangs."""
    process = run(f"{server.url}/{kind}", "opening", "interrupted")
    assert process.stdout.readline() == "begun\n"
    server.answer = lambda request: Hang() if request.asked > 1 or "." in request.path else None
    if kind == "p.h5ad":
        server.answer = lambda request: Hang() if request.method == "GET" else None
    process.stdin.write("\n")
    process.stdin.flush()
    wait_for_request(server, process, "GET")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=AT_MOST_S)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")


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


@pytest.mark.parametrize(
    ("kind", "method"),
    [*((kind, "fork") for kind in KINDS), (KINDS[0], "spawn"), (KINDS[-1], "forkserver")],
)
def test_other_processes(server, run, tmp_path, kind, method):
    (tmp_path / "script.py").write_text(FORKS)
    process = run(f"{server.url}/{kind}", method)
    out, err = process.communicate(timeout=2 * AT_MOST_S)
    here, there, after = out.splitlines()
    assert after == f"{here} 0"
    if method == "fork":
        assert "forked from one that reads from servers" in there
    else:
        assert there == here
    assert not [word for word in NOISE if word in err], err
