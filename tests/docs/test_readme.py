"""The README is short, its code trains, and its figures are those of the run that it names."""

import importlib
import re
import sys
from pathlib import Path

from tests.warm import python as warm

from cellfeed.synthetic import write_tahoe_like

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_is_two_screens():
    assert len(README.split()) < 900


def test_its_code_trains(tmp_path):
    write_tahoe_like(tmp_path / "plates", n_cells=700, n_genes=50, n_plates=2)
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    in_a_loop = [line for line in code[1].splitlines() if line.startswith("    ")]
    assert len(in_a_loop) == 3
    command = [sys.executable, "-W", "error", "-c", code[1] + "print(minibatch.X.shape[1])"]
    ran = warm.run(command, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "50\n"


def test_its_figures_are_those_of_the_run(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    assert importlib.import_module("speed").with_table(README) == README


def test_autotune_lines_are_those_of_the_page():
    shown = re.findall(r"```\n(Recommended: .*?)```", README, re.DOTALL)
    page = (ROOT / "docs" / "how-to" / "tuning.md").read_text()
    assert len(shown) == 1
    words = " ".join(shown[0].split())
    assert words in " ".join(page.split())
