"""Ranks that call ``autotune`` at once are measured together, and all get the same result."""

import json
import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest
from tests import commands
from tests.tuner.reports import code_to_paste, html_report, said_of
from tests.warm import python as warm

from cellfeed import CellDataset, open_collection
from cellfeed_tuner import AutotuneResult

pytestmark = pytest.mark.process

ROOT = str(Path(__file__).parents[2])
SCRIPT = """
import json, os, signal, sys, threading, time
import torch.distributed as dist
from cellfeed import CellDataset, open_collection
from cellfeed_tuner import autotune
sys.path.append({root!r})
from tests.short_replicates import shorten

shorten()
data, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
settings = dict(label="plate", block_sizes=[4, 16], fetch_factors=[2, 8], workers=[0],
                batch_size=16, budget=600.0, entropy_floor=0.5)
ONE = {{"block_sizes": [4], "fetch_factors": [2]}}
stages, found = [], {{}}

def on_progress(stage, done, total, doing=""):
    stages.append(stage)

try:
{body}
except Exception as error:
    found |= {{"kind": type(error).__name__, "message": str(error)}}
with open(f"{{folder}}/{{rank}}.json", "w") as file:
    json.dump(found | {{"n_stages": len(stages)}}, file)
"""
TUNED = """
collection = open_collection(data, obs=["plate"])
result = autotune(collection, **settings, on_progress=on_progress)
dataset = CellDataset.from_autotune(collection, result, seed=0)
found |= {"result": result.to_json(), "batch_size": dataset.batch_size}
"""
ONE = TUNED.replace("**settings", "**settings | ONE")
BEGIN = 'dist.init_process_group("gloo")'
END = "dist.barrier()\ndist.destroy_process_group()"  # no rank leaves while another still joins


def script(folder, body):
    path = folder / "script.py"
    path.write_text(SCRIPT.format(root=ROOT, body=textwrap.indent(body, "    ")))
    return path


def torchrun(n, folder, data, body=TUNED):
    warm.torchrun(n, script(folder, body), data, folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(n)]


def processes(n, folder, data, body, **changes):
    """Run as many plain processes, with torchrun's variables; what each found, if it did."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started, path = list[warm.Popen](), script(folder, body)
    for rank in range(n):
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, warm.ADDRESS: warm.address(),
            "GLOO_SOCKET_IFNAME": "lo",
        } | changes  # fmt: skip
        env = os.environ | {name: str(value) for name, value in variables.items()}
        started.append(warm.Popen([sys.executable, path, data, folder], env=env))
    for each in started:
        each.wait(timeout=600)
    files = [folder / f"{rank}.json" for rank in range(n)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.smoke
def test_all_ranks_have_one_result_that_says_for_how_many_it_is(small_collection, tmp_path):
    found = torchrun(2, tmp_path, small_collection)
    assert "result" in found[0], found[0]
    assert found[0]["result"] == found[1]["result"]
    assert found[0]["n_stages"] > 0
    assert found[1]["n_stages"] == 0  # the first one alone says how far it has come
    path = tmp_path / "autotune.json"
    path.write_text(json.dumps(found[0]["result"]))
    result = AutotuneResult.load(path)
    assert (result.ranks.n_local, result.ranks.n_total) == (2, 2)
    assert result.recommended is not None
    assert result.loader_fault is None
    assert "cells/s of 2 ranks together" in repr(result)
    assert "cells/s of 2 ranks together" in said_of(result, path)
    code = code_to_paste(result, path)
    assert code.startswith("# torchrun --nproc-per-node 2 ")
    assert "2 ranks, side by side" in html_report(result, code=code)


def test_each_may_have_spent_another_part_of_the_budget_and_make_a_group_afterwards(
    small_collection, tmp_path
):
    """As those of the command, which subtracts the time that it took to start."""
    said = 'found["ranks"] = [dataset.rank, dataset.world_size]'
    body = f'settings["budget"] -= rank\n{ONE}\n{BEGIN}\n{said}\n{END}'
    first, second = processes(2, tmp_path, small_collection, body)
    assert "result" in first, first
    assert first["result"] == second["result"]
    assert (first["ranks"], second["ranks"]) == ([0, 2], [1, 2])


def test_a_process_by_itself_measures_for_as_many_as_are_asked_for(small_collection, tmp_path):
    body = ONE.replace("| ONE", "| ONE, ranks=3")
    (alone,) = processes(1, tmp_path, small_collection, body)
    assert alone["result"]["ranks"] == {"n_local": 3, "n_total": 3}


@pytest.mark.parametrize("begin", ["", BEGIN])
def test_ranks_of_other_machines_get_the_result(small_collection, tmp_path, begin):
    """Two machines with a rank each, by the store of torchrun or of the group."""
    alone = 'os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}'
    body = f"{alone}\n{begin}\n{ONE}\n{END if begin else ''}"
    first, second = torchrun(2, tmp_path, small_collection, body)
    assert "result" in first, first
    assert first["result"] == second["result"]
    assert first["result"]["ranks"] == {"n_local": 1, "n_total": 2}


@pytest.mark.parametrize(
    ("body", "changes", "kind", "said"),
    [
        (
            f'settings["batch_size"] += rank\n{ONE}',
            {},
            "ParameterError",
            "other arguments than rank 0",
        ),
        (
            TUNED.replace("**settings", "**settings | {'label': 'planet'}"),
            {},
            "ColumnError",
            "planet",
        ),
        (TUNED, {"LOCAL_WORLD_SIZE": ""}, "ParameterError", "LOCAL_WORLD_SIZE is not set"),
    ],
    ids=["other arguments", "no such label", "wrong variables"],
)
def test_what_is_refused_all_refuse_alike(small_collection, tmp_path, body, changes, kind, said):
    found = processes(2, tmp_path, small_collection, body, **changes)
    assert [each["kind"] for each in found] == [kind] * 2
    assert said in found[0]["message"]


KILLED = """
killed = {number}

def until_it_measures(stage, *_):
    if stage == "throughput" and rank == 0:
        open(f"{{folder}}/measures", "w").close()
        if killed == 0:
            os.kill(os.getpid(), signal.SIGKILL)

def die():
    while not os.path.exists(f"{{folder}}/measures"):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

if rank == killed and rank:
    threading.Thread(target=die, daemon=True).start()
collection = open_collection(data, obs=["plate"])
autotune(collection, **settings, on_progress=until_it_measures)
"""


@pytest.mark.parametrize("number", [0, 1])
def test_all_hear_of_one_that_is_killed(small_collection, tmp_path, number):
    found = processes(3, tmp_path, small_collection, KILLED.format(number=number))
    assert found[number] is None
    said = {each["message"] for each in found if each is not None}
    assert len(said) == 1
    assert {each["kind"] for each in found if each is not None} == {"MeasuringError"}
    assert said.pop().startswith(f"rank {number} ended while ")


def test_wrong_variables_are_one_line_on_each(small_collection, tmp_path):
    found = processes(2, tmp_path, small_collection, TUNED, LOCAL_WORLD_SIZE="")
    assert [each["kind"] for each in found] == ["ParameterError"] * 2
    assert all("LOCAL_WORLD_SIZE is not set" in each["message"] for each in found)


def test_the_command_takes_ranks(small_collection, tmp_path, short_replicates):
    path = tmp_path / "autotune.json"
    ran = commands.autotune(
        *(small_collection, "--label", "plate", "--ranks", 2, "--batch-size", 16),
        *("--block-sizes", 4, "--fetch-factors", 2, "--workers", 0, "--budget", 600),
        *("--entropy-floor", 0.5, "--output", tmp_path),
    )
    assert ran.exit_code == 0, ran.output
    assert AutotuneResult.load(path).ranks.n_local == 2
    collection = open_collection(small_collection, obs=["plate"])
    assert CellDataset.from_autotune(collection, path, seed=0).batch_size
