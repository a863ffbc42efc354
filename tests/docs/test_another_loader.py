"""The code of the page on other loaders tunes one, with a training step."""

import os
import re
from pathlib import Path

import pytest
from tests.warm import python as warm

from cellfeed.synthetic import write_tahoe_like

pytestmark = [pytest.mark.docs, pytest.mark.process]

ROOT = Path(__file__).parents[2]
SHORTENED = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.short_replicates import shorten
shorten()
"""
PAGE = (ROOT / "docs" / "how-to" / "another_loader.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the modules of the page, and plates."""
    path = tmp_path_factory.mktemp("page")
    write_tahoe_like(path / "plates", n_cells=640, n_genes=2000, n_plates=2)
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        name = re.match(r"# (\w+\.py)", code)
        (path / (name[1] if name else "run.py")).write_text(code)
    return path


def run(folder, code):
    environment = os.environ | {warm.ADDRESS: warm.address()}  # for what is measured
    return warm.output_of("-c", SHORTENED + code, cwd=folder, env=environment)


def test_it_tunes_the_loader(folder):
    code = (folder / "run.py").read_text().replace("budget=20", "budget=600, entropy_floor=0.5")
    printed = run(folder, code + "print(len(minibatch[0]))")
    assert "<AutotuneResult: block size 1, fetch factor 1, " in printed
    assert printed.splitlines()[-1] == "64"


def test_it_tunes_for_the_training_step(folder):
    code = (
        "import my_training\n"
        "from cellfeed_tuner import autotune\n"
        "from other_loader import Plates\n"
        "settings = dict(budget=600, entropy_floor=0.5)\n"
        "result = autotune(Plates('plates'), step=my_training.step, **settings)\n"
        "print(result.constraints.step_seconds > 0, result.recommended.waiting is not None)"
    )
    assert run(folder, code).split() == ["True", "True"]
