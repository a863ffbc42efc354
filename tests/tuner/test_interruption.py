"""Ctrl-C during ``autotune``: what was found by then is kept, and nothing goes on."""

import json
import pkgutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest
from tests import commands
from tests.tuner.measured_here import measure_here
from tests.tuner.reports import html_report, html_summary, printed, said_of
from tests.warm import python as warm

from cellfeed import CellDataset, open_collection
from cellfeed_tuner import AutotuneInterrupted, AutotuneResult, Configuration, autotune

GRID: dict[str, Any] = {"block_sizes": [4, 16], "fetch_factors": [2, 8], "workers": [0]}
OPTIONS = ["--block-sizes", "4,16", "--fetch-factors", "2,8", "--workers", "0"]


@pytest.fixture
def here(monkeypatch):
    measure_here(monkeypatch)


@pytest.fixture
def collection(small_collection):
    return open_collection(small_collection, obs=["plate"])


@pytest.fixture
def interrupted(collection, here):
    """Tunes with Ctrl-C instead of the measurement with this number, or of a later stage."""

    def tune(number, *, stage="throughput", **settings):
        n_told = 0

        def interrupt(told, *_):
            nonlocal n_told
            n_told += told == stage
            if told == stage and n_told == number:
                raise KeyboardInterrupt

        autotune(
            collection, label="plate", entropy_floor=0.5, on_progress=interrupt, budget=600.0,
            **GRID | settings,
        )  # fmt: skip

    return tune


@pytest.mark.slow
def test_what_was_measured_by_then_is_the_result(interrupted, collection, cache_folder):
    """And what earlier runs have left stays as it was."""
    only = {"block_sizes": [4], "fetch_factors": [8]}
    autotune(collection, label="plate", entropy_floor=0.5, budget=600.0, **GRID | only)

    def kept():
        return {path: path.read_bytes() for path in cache_folder.rglob("*.journal")}

    before = kept()
    assert before
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(2)
    assert kept() == before
    assert isinstance(caught.value, AutotuneInterrupted)
    result = caught.value.result
    assert result.interrupted
    assert result.to_json()["interrupted"] is True
    assert len(result.configurations) == 4
    timed = [each for each in result.configurations if each.peak_memory_bytes is not None]
    assert len(timed) == 1
    assert all(each.status != "out of budget" for each in timed)
    if result.recommended is not None:
        assert result.recommended.basis in {"timed", "predicted"}
        assert (result.chosen in timed) == (result.recommended.basis == "timed")


def test_a_choice_is_kept(interrupted, collection):
    only = {"block_sizes": [4], "fetch_factors": [8]}
    with pytest.raises(AutotuneInterrupted) as caught:  # a single one is clear long before
        interrupted(1, stage="explain", **only)
    chosen = caught.value.result.recommended
    assert chosen is not None
    assert chosen.configuration == Configuration(block_size=4, fetch_factor=8)
    assert chosen.basis == "timed"
    CellDataset.from_autotune(collection, caught.value.result, seed=0)


@pytest.mark.parametrize("stage", ["machine", "entropy", "start", "throughput"])
def test_before_anything_is_measured_there_is_no_result(interrupted, stage):
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(1, stage=stage)
    assert type(caught.value) is KeyboardInterrupt


@pytest.mark.slow
def test_it_is_said_wherever_a_result_is_shown(result_of, tmp_path):
    whole = result_of("explained")
    result = replace(whole, interrupted=True)
    said = "Interrupted after 61 s, with 6 configurations timed;"
    path = tmp_path / "autotune.json"
    result.save(path)
    assert AutotuneResult.load(path) == result
    explained = commands.autotune("explain", path).stdout
    for text in (
        printed(result, path), html_report(result, code=""), html_summary(result), explained
    ):  # fmt: skip
        assert said in " ".join(text.split())
    for text in (html_report(whole, code=""), html_summary(whole)):
        assert "interrupted" not in text
    nothing = replace(result_of("nothing feasible"), interrupted=True)
    assert said in said_of(nothing, path)


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_writes_what_it_has(here, small_collection, tmp_path, monkeypatch, as_json):
    n_told = 0
    display = "cellfeed_tuner._commands._autotune_run.LiveDisplay.show"
    show = pkgutil.resolve_name(display)

    def interrupted_at_the_second_measurement(self, stage, *told):
        nonlocal n_told
        n_told += stage == "throughput"
        if n_told == 2:
            signal.raise_signal(signal.SIGINT)
        show(self, stage, *told)

    monkeypatch.setattr(display, interrupted_at_the_second_measurement)
    settings = ["--label", "plate", "--output", tmp_path, "--entropy-floor", "0.5"]
    ran = commands.autotune(small_collection, *settings, *OPTIONS, *["--json"] * as_json)
    assert ran.exit_code == 130
    path = tmp_path / "autotune.json"
    plain = json.loads(path.read_text())
    assert plain["interrupted"] is True
    assert ran.stderr.splitlines()[-1] == f"Interrupted. {path} has what was measured so far."
    assert "Traceback" not in ran.output
    if as_json:
        assert json.loads(ran.stdout) == plain
    else:
        assert "Interrupted after" in ran.stdout
    for name in ("autotune.png", "autotune.html"):
        assert (tmp_path / name).stat().st_size > 0


# What is started in the background ignores interrupts, and so would its children.
START = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from cellfeed_tuner._commands import main
main()
"""


@contextmanager
def measuring(small_collection, output):
    """The command, and its processes, when something was measured and something else is."""
    settings = [str(small_collection), "--label", "plate", "--output", str(output)]
    command = warm.FinalizedPopen(
        [sys.executable, "-c", START, *settings, *OPTIONS, "--budget", "1000"],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    children = set[psutil.Process]()
    try:
        # The process in which configurations are timed has one child for what is compiled, one for
        # each measurement, and perhaps one for `uname`, which an import runs.
        while len(children) < 5:
            assert command.poll() is None, command.communicate()
            children |= set(psutil.Process(command.pid).children(recursive=True))
            time.sleep(0.02)
        yield command, children
    finally:
        command.kill()
        command.communicate()


@pytest.mark.process
@pytest.mark.parametrize("n_times", [1, 2])
def test_ctrl_c_leaves_no_process_behind(small_collection, tmp_path, n_times):
    """A second one ends at once."""
    with measuring(small_collection, tmp_path) as (command, children):
        command.send_signal(signal.SIGINT)
        if n_times == 2:
            time.sleep(0.02)
            command.send_signal(signal.SIGINT)
        stdout, stderr = command.communicate(timeout=600)
    assert command.returncode == 130
    assert "Traceback" not in stderr
    if n_times == 1:
        assert stderr.splitlines()[-1].startswith("Interrupted. ")
        assert "Interrupted after" in stdout
        assert json.loads((tmp_path / "autotune.json").read_text())["interrupted"] is True
    _, alive = psutil.wait_procs(children, timeout=600)
    assert not alive
