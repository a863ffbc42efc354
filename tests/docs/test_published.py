"""What is published leads to the repository, which a checkout cannot name."""

import importlib.util
import json
import re
import shutil
import subprocess
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
    of_citation = re.search(r"^version: (.+)$", citation, re.MULTILINE)
    assert of_changelog is not None
    assert of_citation is not None
    assert of_changelog[1] == of_citation[1] == cellfeed.__version__
    released = re.search(r"^date-released: (.+)$", citation, re.MULTILINE)
    assert of_changelog[2] == (released[1] if released else "unreleased")


def test_all_files_agree_whether_it_is_released(published, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert len(set(published.states().values())) == 1


def git(*words, cwd):
    return subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=cwd, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


@pytest.mark.process
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_pages_of_versions_lie_beside_each_other(tmp_path):
    git("init", "--quiet", "--bare", "origin", cwd=tmp_path)
    git("clone", "--quiet", "origin", "clone", cwd=tmp_path)
    clone = tmp_path / "clone"
    (clone / "code").touch()
    git("add", "code", cwd=clone)
    git("commit", "--quiet", "--message=code", cwd=clone)
    git("push", "--quiet", "origin", "HEAD:main", cwd=clone)
    for version in ("latest", "v0.9.0", "v0.10.0", "v0.9.1", "v1.0.0rc1"):
        built = tmp_path / version
        built.mkdir()
        (built / "index.html").write_text(version)
        subprocess.run(["bash", ROOT / ".ci/pages", built, version], cwd=clone, check=True)
    assert git("status", "--porcelain", cwd=clone) == ""

    def shown(path):
        return git("show", f"gh-pages:{path}", cwd=tmp_path / "origin")

    folders = ["latest", "0.9.0", "0.10.0", "0.9.1", "1.0.0rc1"]
    tree = git("ls-tree", "--name-only", "gh-pages", cwd=tmp_path / "origin").split()
    assert sorted(tree) == sorted([*folders, "stable", "versions.json", "index.html", ".nojekyll"])
    assert shown("stable/index.html") == shown("0.10.0/index.html") == "v0.10.0"
    listed = json.loads(shown("versions.json"))
    assert [each["version"] for each in listed] == ["latest", "0.10.0", "0.9.1", "0.9.0"]
    assert "url=stable/" in shown("index.html")


def test_actions_are_pinned_by_digest():
    workflows = [path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")]
    used = [each for text in workflows for each in re.findall(r"uses: (\S+.*)", text)]
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", each) for each in used)
