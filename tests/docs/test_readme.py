"""The README is short, its code trains, and its figures are those of the run that it names."""

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.warm import python as warm

from cellfeed.synthetic import write_tahoe_like

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_is_short():
    assert len(README.split()) < 600


TOOL = """#!/bin/sh
[ "$1" = -c ] && exec echo 1
echo "$(basename "$0") $*" | cut -c 1-25 >> ran
exit 3
"""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_test_runs_all_its_parts_and_then_fails(tmp_path):
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for path in (tmp_path / "pyproject.toml", tmp_path / "constraints.txt"):
        path.touch()
    for name in ("python", "ruff", "mypy"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    for layer in ("demo", "test"):
        (tools.parent / f".{layer}").touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    ran = subprocess.run(["make", "test"], cwd=tmp_path, capture_output=True, check=False)
    assert ran.returncode == 2
    parts = (tmp_path / "ran").read_text().splitlines()
    assert [each.split()[0] for each in parts] == ["ruff", "ruff", "mypy", "python"]


def test_what_it_promises_is_run_before_a_submission():
    shown = set(re.findall(r"^make ([\w-]+)", README, re.MULTILINE))
    script = (ROOT / ".ci" / "run").read_text()
    run = {
        word for line in re.findall(r"^make (.*)", script, re.MULTILINE) for word in line.split()
    }
    assert shown - {"demo", "test"} <= run


@pytest.mark.process
@pytest.mark.smoke
@pytest.mark.docs
def test_its_code_trains(tmp_path):
    write_tahoe_like(tmp_path / "plates", n_cells=700, n_genes=50, n_plates=2)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    in_a_loop = [line for line in code[1].splitlines() if line.startswith("    ")]
    assert len(in_a_loop) == 4
    script = code[1] + "print(minibatch.X.shape[1])"
    printed = warm.output_of("-W", "error", "-c", script, cwd=tmp_path)
    assert re.fullmatch(r"loss of the last minibatch: [0-9.]+\n50\n", printed)


@pytest.mark.process
@pytest.mark.docs
def test_its_code_tunes_a_dataloader():
    _, code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    brief = code.replace("budget=10", "budget=1, workers=[0]")
    assert brief != code
    printed = warm.output_of("-c", f"import torch\n{brief}")
    assert "Recommended: 0 workers" in printed


@pytest.fixture
def script(monkeypatch):
    """Import a script of docs/ or bench/peers/."""
    for folder in ("docs", "bench/peers"):
        monkeypatch.syspath_prepend(ROOT / folder)
    return importlib.import_module


def test_its_figures_are_those_of_the_run(script):
    assert script("speed").with_table(README) == README


def test_its_figures_are_not_older_than_the_code_that_measured_them(script):
    run = json.loads(script("speed").MEASURED.read_text())["run"]
    assert run["code"] == script("rounds").measuring_code()


def test_what_autotune_says_is_what_it_says_today(script):
    recommended = script("recommended")
    page = recommended.TUNING.read_text()
    assert recommended.with_answer(README) == README
    assert recommended.with_answer(page) == page


@pytest.mark.parametrize("name", ["speed", "recommended"])
def test_pictures_are_not_older_than_what_they_show(script, name):
    drawn = script(name)
    assert script("made").is_of_today(drawn.PICTURE, of=drawn.MADE_OF)


def test_a_picture_of_other_data_is_told(script, tmp_path):
    made = script("made")
    picture, data = tmp_path / "picture.png", tmp_path / "data.json"
    data.write_text("1")
    made.save(Figure(figsize=(1, 1)), picture, of=[data])
    assert made.is_of_today(picture, of=[data])
    data.write_text("2")
    assert not made.is_of_today(picture, of=[data])
