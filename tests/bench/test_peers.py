"""The comparison with other loaders: rows for all that was asked for, and reasons for failures."""

import contextlib
import importlib
import json
import os
import re
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

ROOT = Path(__file__).parents[2]
PEERS, PAGES = ROOT / "bench" / "peers", ROOT / "docs" / "benchmarks"


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
        for folder in (PEERS, ROOT / "docs"):
            patch.syspath_prepend(folder)
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
        "--data", collection, "--out", folder,
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
    return {row["name"]: row for row in json.loads((output / "peers.json").read_text())["rows"]}


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
    assert row["failed"] is None
    assert row["cells_per_s_low"] <= row["cells_per_s"]
    assert row["peer"] == "machine" or row["peak_bytes"] > 0


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
    assert failed["cells_per_s"] is None
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
    speeds = ours["cells_per_s"] / slices["cells_per_s"]
    assert slices["cellfeed_is_times_as_fast"] == pytest.approx(speeds)
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


def test_published_tables_are_those_of_the_published_measurements(main):
    """A change of the tables' code shows in them, and so does one of the entries."""
    modules = ("entries", "rounds", "conversions", "table", "targets")
    entries, rounds, conversions, table, targets = map(importlib.import_module, modules)
    published = json.loads((PAGES / "peers.json").read_text())
    of_name = {each.name: each for each in entries.all_entries()}
    results = {}
    for found in published["results"]:
        entry = of_name[found.pop("entry")["name"]]
        timed = {int(number): each for number, each in found.pop("rounds").items()}
        results[entry.name] = rounds.Result(entry, timed, **found)
    stores = {
        each.storage: conversions.Store(each, Path(each.storage), made["runs"], made["failed"])
        for each in conversions.CONVERSIONS
        if (made := published["conversions"].get(each.title))
    }
    rows, run = table.rows_of(results, stores), published["run"] | {"command": "make peers"}
    assert json.loads(json.dumps(rows)) == published["rows"]
    page = (PAGES / "peers.md").read_text()
    assert table.markdown(run=run, rows=rows, stores=stores) == page
    held = targets.verdicts(results, stores)
    assert table.targets_markdown(run, held) == (PEERS / "targets.md").read_text()


def test_the_short_profile_has_the_pairs_of_the_readme(main):
    compare, speed = map(importlib.import_module, ("compare", "speed"))
    short = compare.PROFILES["short"].names
    names = {each.name for each in compare.choose(None, "", short)}
    assert set(short) < names
    assert {name for pair in speed.PAIRS for name in pair[2:]} <= names
    (only,) = {each.peer for each in compare.choose("annloader", "", short)} - {"cellfeed"}
    assert only == "annloader"


def test_the_page_names_options_that_exist(main):
    known = {option for each in main.params for option in each.opts}
    text = (PAGES / "here.md").read_text()
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "there is none in `nowhere`"),
        (["--data", "x", "--peers", "nobody"], "but got nobody"),
        (["--data", "x", "--only", "nothing"], "no name matches `nothing`"),
        (["--data", "x", "--rounds", "0"], "'--rounds'"),
        (["--profile", "short", "--peers", "tiledbsoma"], "leave no row"),
    ],
)
def test_mistakes_are_told_in_one_line(main, tmp_path, arguments, message):
    ended = commands.run(main, "--out", tmp_path / "out", *arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr.splitlines()[-1]
