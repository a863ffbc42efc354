"""The asv suite measures all that the packages need with the versions that the tests run with."""

import json
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = json.loads((ROOT / "asv.conf.json").read_text())["matrix"]["req"]


def test_every_dependency_is_pinned():
    needed = {re.split(r"[<>=!~\[ ]", each)[0] for each in PROJECT["dependencies"]}
    assert needed <= PINS.keys()


def test_pins_are_those_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.split("==") for line in lines if "==" in line)
    assert {name: [constraints[name]] for name in PINS} == PINS
