"""docs/reference/opening.md has a row for each storage, which says what installs it."""

import re
import tomllib
from pathlib import Path

from cellfeed._storages import built_in

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "reference" / "opening.md"


def test_each_storage_is_on_the_page():
    rows = re.findall(
        r"^\| \*\*(.+?)\*\* (?:\| [^|\n]+){6}\| (.+) \|$", PAGE.read_text(), re.MULTILINE
    )
    # Other tests register their own.
    storages = [each for each in built_in() if each.open.__module__.startswith("cellfeed.")]
    installed = {each.name: f"`cellfeed[{each.extra}]`" for each in storages if each.extra}
    assert dict(rows) == {each.name: installed.get(each.name, "nothing") for each in storages}


def test_each_extra_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for storage in built_in():
        assert not storage.extra or storage.extra in extras["optional-dependencies"]
