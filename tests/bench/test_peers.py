"""The comparison with other loaders: rows for all that was asked for, and reasons for failures."""

import contextlib
import csv
import importlib
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from tests import commands
from tests.bench.conftest import N_CELLS
from tests.warm import python as warm

pytestmark = [pytest.mark.docs, pytest.mark.process]

PEERS = Path(__file__).parents[2] / "bench" / "peers"


class Held(warm.Popen):
    """A process that is stopped until it is waited for, and so not before its memory is read."""

    def _execute_child(self, *arguments):
        super()._execute_child(*arguments)
        os.kill(self.pid, signal.SIGSTOP)

    def wait(self, timeout=None):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        return super().wait(timeout)


@pytest.fixture(scope="module")
def main():
    """The command, whose jobs find imports done.

    It must not empty the page cache of the whole machine here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PEERS)
        processes = importlib.import_module("processes")
        patch.setattr(processes, "DROP_CACHES", Path("/proc/nowhere"))
        forking = types.SimpleNamespace(**vars(subprocess) | {"Popen": Held})
        patch.setattr(processes, "subprocess", forking)
        yield importlib.import_module("compare").main


@pytest.fixture(scope="module")
def output(main, collection, tmp_path_factory):
    """One short round of what needs nothing but this environment, and of what cannot be had."""
    folder = tmp_path_factory.mktemp("output")
    arguments = [
        "--collection", collection, "--output", folder,
        "--rounds", "1", "--seconds", "0.1",
        "--peers", "cellfeed,h5py,machine",
        "--only", r"block 16, fetch 256(, CSR(, 2 workers.*)?)?$",
        "--environments", folder / "environments", "--python312", folder / "no-python",
    ]  # fmt: skip
    ended = commands.run(main, *arguments)
    assert ended.exit_code == 0, ended.output
    assert (folder / "peers.md").read_text().strip() == ended.stdout.strip()
    return folder


@pytest.fixture(scope="module")
def rows(output):
    with (output / "peers.csv").open(newline="") as file:
        return {row["name"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    "name",
    [
        "cellfeed on .h5ad plates, block 16, fetch 256, CSR",
        "cellfeed on .h5ad plates, block 16, fetch 256, CSR, 2 workers of 1 thread",
        "slices by h5py of .h5ad plates, block 16, fetch 256",
        "decompress gzip of the plates, block 16, fetch 256",
    ],
)
def test_what_runs_has_figures(rows, name):
    row = rows[name]
    assert row["failed"] == ""
    assert float(row["cells_per_s_low"]) <= float(row["cells_per_s"])
    assert row["peer"] == "machine" or int(row["peak_bytes"]) > 0


def test_memory_is_that_of_a_process_and_of_what_it_starts(main):
    n_bytes = 40_000_000
    holding = f"x = b'x' * {n_bytes}; print(flush=True); sys.stdin.read()"
    child = f"subprocess.run([sys.executable, '-c', {f'import sys; {holding}'!r}])"
    both = f"import subprocess, sys; x = b'x' * {n_bytes}; {child}"
    with subprocess.Popen(
        [sys.executable, "-c", both], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # the child has its own
        found = importlib.import_module("processes").tree_memory_bytes(process.pid)
        process.stdin.close()
    assert 2 * n_bytes < found < 4 * n_bytes


def test_what_cannot_be_had_is_a_row_with_the_reason(rows):
    failed = rows["cellfeed on annbatch's store, block 16, fetch 256, CSR"]
    assert failed["cells_per_s"] == ""
    assert "no-python" in failed["failed"]
    assert "3.12" in failed["failed"]


def test_an_epoch_is_counted_to_its_last_cell(output):
    results = json.loads((output / "peers.json").read_text())["results"]
    loaders = [each for each in results if each["rounds"] and each["entry"]["peer"] != "machine"]
    assert loaders
    assert {each["rounds"]["1"]["cells"] for each in loaders} == {N_CELLS}


def test_shares_and_ratios_are_of_the_same_work(rows):
    slices = rows["slices by h5py of .h5ad plates, block 16, fetch 256"]
    ours = rows["cellfeed on .h5ad plates, block 16, fetch 256, CSR"]
    speeds = float(ours["cells_per_s"]) / float(slices["cells_per_s"])
    assert float(slices["cellfeed_is_times_as_fast"]) == pytest.approx(speeds)
    assert ours["limit"] == "decompress gzip of the plates, block 16, fetch 256"  # the only one


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": "disk", "storage": "h5ad"},
        {"limit": "decompression", "storage": "h5ad", "block_size": 16, "fetch_factor": 256},
        {"limit": "memory", "copy": False},
    ],
    ids=["disk", "decompression", "memory"],
)
def test_a_limit_is_measured_also_where_the_time_is_up_at_once(collection, settings):
    """As where its threads begin late."""
    job = {
        "peer": "machine", "plates": sorted(map(str, collection.glob("*.h5ad"))), "store": "",
        "label": "plate", "batch_size": 64, "seconds": 0.0, "seed": 0, "settings": settings,
        "fingerprints": None,
    }  # fmt: skip
    said = json.loads(warm.output_of(PEERS / "jobs" / "limits.py", json.dumps(job)))
    assert said["cells"] > 0
    assert said["bytes"] > 0
    assert said["seconds"] > 0


def test_every_target_is_told_and_there_is_a_picture(output):
    targets = json.loads((output / "peers.json").read_text())["targets"]
    assert {each["verdict"] for each in targets} == {"not measured"}
    told = (output / "targets.md").read_text()
    assert all(each["text"] in told for each in targets)
    assert (output / "peers.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--collection", "nowhere", "--output", "out"], "there is none in `nowhere`"),
        (["--collection", "x", "--output", "out", "--peers", "nobody"], "but got nobody"),
        (
            ["--collection", "x", "--output", "out", "--only", "nothing"],
            "no name matches `nothing`",
        ),
        (["--collection", "x", "--output", "out", "--rounds", "0"], "`--rounds > 0` must hold"),
    ],
)
def test_mistakes_are_told_in_one_line(main, arguments, message):
    ended = commands.run(main, *arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr.splitlines()[-1]
