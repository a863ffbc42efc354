"""Where `preshuffle` is killed or stopped, nothing is lost, and the same call goes on."""

import builtins
import io
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from tests import commands
from tests.loader.preshuffling.test_preshuffle import content
from tests.loader.preshuffling.test_preshuffle_codecs import check
from tests.warm import python as warm

from cellfeed import CellfeedError, ParameterError, open_collection, preshuffle
from cellfeed.preshuffling import _dataset

pytestmark = [
    pytest.mark.usefixtures("zarr_in_this_thread"),
    pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in"),
]
MEMORY = 20_000  # bytes that hold a part of some 30 cells


class KilledError(BaseException):
    """Ends a run as a signal would."""


class Disk:
    """Counts what is written within a folder; from one of these writes on, all are refused."""

    def __init__(self, folder: Path, last: int, patch: pytest.MonkeyPatch) -> None:
        self.n_written, self.last, self.folder = 0, last, str(folder)
        for name in ("mkdir", "rename", "replace", "link", "unlink", "rmdir"):
            patch.setattr(os, name, self._counted(getattr(os, name)))
        opened = self._counted(io.open, is_open=True)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)

    def _counted(self, function: Any, *, is_open: bool = False) -> Any:
        def call(place: Any, *arguments: Any, **options: Any) -> Any:
            mode = str(options.get("mode", arguments[0] if arguments else "r"))
            is_write = {*"wax+"} & {*mode} if is_open else True
            if is_write and ("dir_fd" in options or str(place).startswith(self.folder)):
                if self.n_written >= self.last:
                    raise KilledError
                self.n_written += 1
            return function(place, *arguments, **options)

        return call


def readable(store: Path) -> list[Any] | None:
    """What is read of a store; None where it is none."""
    try:
        collection = open_collection(store, obs=["plate", "source_file"])
    except CellfeedError:
        return None
    columns: Any = collection.obs.values()
    labels = [column.decode(column.codes).tolist() for column in columns]
    return [collection[:].X.toarray().tolist(), collection.obs_names(slice(None)).tolist(), labels]


@pytest.fixture(scope="module")
def paths(write_h5ad: Any) -> list[Path]:
    rng = np.random.default_rng(0)
    return [
        write_h5ad(sp.csr_matrix(rng.poisson(0.7, (n, 11)).astype("f4")), {"plate": [f"p{n}"] * n})
        for n in (25, 34, 13)
    ]


# Killed


OPTIONS: dict[str, dict[str, Any]] = {
    "new": {"rows": np.arange(59) % 8 > 0, "genes": [f"gene{k}" for k in range(0, 11, 2)]},
    "in order": {"in_order": True, "elements": ["X"]},
    "appended": {"append": True},
    "mixed": {"append": True, "mix": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_at_any_write(paths, tmp_path, out, name):
    """Until it is finished, the store is as before; the same call finishes it."""
    options, kept = OPTIONS[name], tmp_path / "kept.zarr"
    is_appended = "append" in options
    given = paths[2:] if is_appended else paths[:2]
    if is_appended:
        preshuffle(paths[:2], kept, memory=MEMORY)
        shutil.copytree(kept, out)
    before = readable(out)

    def run(last: int = sys.maxsize) -> tuple[Any, int]:
        with pytest.MonkeyPatch.context() as patch:
            disk = Disk(out, last, patch)
            return preshuffle(given, out, memory=MEMORY, **options), disk.n_written

    done, n_writes = run()
    assert done.n_parts > 1
    whole, expected = readable(out), content(out)
    assert before != whole
    for last in np.linspace(10, n_writes - 1, 6).astype(int).tolist():
        shutil.rmtree(out)
        if is_appended:
            shutil.copytree(kept, out)
        with pytest.raises(KilledError):
            run(last)
        is_finished = (found := readable(out)) == whole
        assert is_finished or found == before
        n_there = len([*out.glob("dataset_*")])
        if is_appended and not is_finished:
            # The call that wrote the store finds it finished, and leaves the other one alone.
            assert preshuffle(paths[:2], out, memory=MEMORY).n_parts_written == 0
            if (out / ".cellfeed" / "job.json").exists():
                with pytest.raises(ParameterError, match=r"begun .*\.cellfeed to give it up"):
                    preshuffle(given, out, memory=MEMORY, seed=7, **options)
        again, _ = run()
        assert is_appended or again.n_parts_written == done.n_parts - n_there
        assert content(out) == expected


# Stopped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name", "at"), [(_dataset.Encoding, "encode", 1), (_dataset.CsrPart, "append", 2)]
)
def test_ctrl_c_leaves_nothing_behind(write_h5ad, out, monkeypatch, of, name, at):
    """It waits for no work that is queued, neither where shards are encoded nor where it reads."""
    X = sp.csr_matrix(np.random.default_rng(0).poisson(0.7, (200, 40)).astype(np.float32))
    path, real, n_calls = write_h5ad(X), getattr(of, name), 0
    options: dict[str, Any] = {"cells_per_chunk": 1, "memory": 100_000}

    def interrupted(*arguments: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == at:
            raise KeyboardInterrupt
        if name == "encode":
            time.sleep(0.02)
        return real(*arguments)

    monkeypatch.setattr(_dataset, "_ELEMENTS_OF_A_JOB", 1)  # a chunk each, of one cell
    with monkeypatch.context() as patched:
        patched.setattr(of, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            preshuffle(path, out, **options)
    assert n_calls < 30
    assert not [*out.glob("dataset_*"), *(out / ".cellfeed").glob("part-*")]
    own = ("cellfeed-encode", "cellfeed-prefetch", "cellfeed-read")
    assert not [each for each in threading.enumerate() if each.name.startswith(own)]
    preshuffle(path, out, **options)
    check(out, X)


STOPPED = """
import signal, sys
import cellfeed

signal.signal(signal.SIGINT, signal.default_int_handler)
write = cellfeed.preshuffle

def stop(stage, done, total):
    if done > total / 2:
        signal.raise_signal(signal.SIGINT)

cellfeed.preshuffle = lambda *given, **options: write(*given, **options | {"on_progress": stop})
from cellfeed.commands import main
main()
"""


@pytest.mark.process
@pytest.mark.smoke
def test_ctrl_c_of_the_command(paths, out):
    command = ["-c", STOPPED, "preshuffle", *paths[:2], out, "--memory", MEMORY]
    done = warm.run([sys.executable, *map(str, command)], is_finalized=True)
    assert (done.returncode, done.stdout) == (130, "")
    said = "Stopped; run the same command again to resume after the last complete part."
    assert done.stderr.strip() == said
    assert not list((out / ".cellfeed").glob("part-*"))
    assert preshuffle(paths[:2], out, memory=MEMORY).n_cells == 59


def test_what_cannot_be_written_is_one_line(paths, out):
    arguments = ["preshuffle", *paths[:2], out, "--memory", MEMORY]
    with commands.files_end_after(1_000):
        result = commands.cellfeed(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: File too large: `{out}")
    assert result.stderr.count("\n") == 1
    assert commands.cellfeed(*arguments).exit_code == 0
    assert readable(out) is not None
