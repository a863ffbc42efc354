"""What is published leads to the repository, which a checkout cannot name."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import cellfeed

ROOT = Path(__file__).parents[2]
HOME, TAG = "https://example.org/owner/cellfeed", "v1.2.3"


@pytest.fixture(scope="module")
def published():
    spec = importlib.util.spec_from_file_location("published", ROOT / ".ci" / "published.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_link_of_the_readme_stays_relative(published):
    readme = (ROOT / "README.md").read_text()
    before = re.findall(r"\]\(([^)]+)\)", readme)
    after = re.findall(r"\]\(([^)]+)\)", published.with_absolute_links(readme, HOME, TAG))
    assert [each.startswith("https://") for each in after] == [True] * len(before)
    relative = [each for each in before if "://" not in each]
    assert [each for each in after if each.startswith(HOME)] == [
        f"{HOME}/{'raw' if each.endswith('.png') else 'blob'}/{TAG}/{each}" for each in relative
    ]


def test_the_project_has_addresses_and_is_else_as_it_was(published):
    pyproject = (ROOT / "pyproject.toml").read_text()
    before = tomllib.loads(pyproject)
    after = tomllib.loads(published.with_addresses(pyproject, HOME, TAG))
    assert after["project"].pop("urls")["Repository"] == HOME
    assert after == before


def test_changelog_and_citation_name_the_version():
    changelog, citation = ((ROOT / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    of_changelog = re.search(r"^## \[(.+)\] - (.+)$", changelog, re.MULTILINE)
    of_citation = re.search(r"^version: (.+)\ndate-released: (.+)$", citation, re.MULTILINE)
    assert of_changelog is not None
    assert of_citation is not None
    assert of_changelog.groups() == of_citation.groups()
    assert of_changelog[1] == cellfeed.__version__
