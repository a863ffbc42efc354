"""The asv suite measures with the versions that the tests run with."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pins_are_those_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.split("==") for line in lines if "==" in line)
    pins = json.loads((ROOT / "asv.conf.json").read_text())["matrix"]["req"]
    assert pins == {name: [constraints[name]] for name in pins}
