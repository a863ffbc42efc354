"""Servers, simulated distances to them, and processes that read from them in turns."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import numpy as np
import psutil
from tests.servers.proxy import DelayingProxy
from tests.servers.s3 import S3Server
from tests.servers.web import WebServer

JOB = Path(__file__).parent / "jobs.py"


@dataclass(frozen=True)
class Target:
    """Files on a server.

    Attributes
    ----------
    url
        Of the server.
    names
        Of the files.
    bucket
        Of an object store; None for a web server.
    options
        Options for obstore, including credentials.
    """

    url: str
    names: list[str]
    bucket: str | None = None
    options: dict = field(default_factory=dict, repr=False)

    def paths(self, url: str, names: list[str] | None = None) -> list[str]:
        """Return the URLs of files, all of them if None, through a proxy with its own URL."""
        base = url if self.bucket is None else f"s3://{self.bucket}"
        return [f"{base}/{name}" for name in (self.names if names is None else names)]

    def options_by(self, url: str) -> dict:
        """Return the options that reach the server through a proxy."""
        return self.options | {"endpoint": url} if self.options else {}


@contextmanager
def served(kind: str, folder: Path, files: list[Path]) -> Iterator[Target]:
    """Serve the files of a folder from another process: the tests' web server, or SeaweedFS."""
    names = [str(file.relative_to(folder)) for file in files]
    if kind == "web":
        with WebServer.in_process(folder) as url:
            yield Target(url, names)
        return
    with TemporaryDirectory() as own, S3Server(Path(own)) as server:
        for file, name in zip(files, names, strict=True):
            server.put(file, name)
        yield Target(server.url, names, server.bucket, server.options)


def at_distance(target: Target, round_trip_ms: float) -> AbstractContextManager[DelayingProxy]:
    """Add a round trip before a server; at 0 ms, too, requests pass a proxy."""
    return DelayingProxy(target.url, round_trip_ms / 1000)


class Client:
    """A process that reads epochs, one at a time on request.

    Parameters
    ----------
    loader
        Of `LOADERS` in jobs.py.
    settings
        Its settings.
    python
        The interpreter, if it is another one.
    """

    def __init__(self, loader: str, settings: dict, python: str | None = None) -> None:
        self._process = subprocess.Popen(
            [python or sys.executable, JOB],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._say(json.dumps(settings | {"loader": loader}))

    def opened(self) -> float:
        """Wait until it has opened the collection; return the seconds that took."""
        return float(self._answer()["seconds"])

    def epoch(self, number: int) -> dict:
        """Return the cost of reading an epoch, including the CPU time of servers and proxies."""
        before = _cpu_of_others()
        self._say(str(number))
        answer = self._answer()
        after = _cpu_of_others()
        return answer | {kind: after[kind] - before[kind] for kind in after}

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"`{self._process.args}` ended with {self._process.wait()}")
        return dict(json.loads(line))


def epochs_in_turns(
    clients: Mapping[Any, Client], n_rounds: int
) -> Iterator[dict[Any, list[dict]]]:
    """Yield what was measured so far: of opening, of the first epoch, and of timed rounds."""
    measured = {key: [{"opening": one.opened()}] for key, one in clients.items()}
    random, keys = np.random.default_rng(0), list(clients)
    for number in range(n_rounds + 1):
        for k in random.permutation(len(keys)).tolist():
            measured[keys[k]].append(clients[keys[k]].epoch(number))
        click.echo(f"round {number} of {n_rounds}", err=True)
        yield measured


def _cpu_of_others() -> dict[str, float]:
    """Return the CPU seconds of servers and proxies so far."""
    found = {"cpu_of_proxy": 0.0, "cpu_of_server": 0.0}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            used = sum(process.cpu_times()[:2])
            if "tests.servers.proxy" in command:
                found["cpu_of_proxy"] += used
            elif "tests.servers.serving" in command or Path(process.name()).name == "weed":
                found["cpu_of_server"] += used
    return found
