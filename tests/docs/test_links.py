"""What README.md, its like and docs/ link to is there."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE = {"_build", "api", "jupyter_execute"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def documents():
    """README.md, its like, and the pages; not what `make docs` may be writing meanwhile."""
    yield from sorted(ROOT.glob("*.md"))
    for folder, folders, files in os.walk(ROOT / "docs"):
        folders[:] = sorted(set(folders) - MADE)
        yield from (Path(folder, each) for each in sorted(files) if each.endswith(".md"))


def prose(document):
    """A document without its code blocks, where # begins a comment."""
    return FENCED.sub("", document.read_text())


def anchors(document):
    """What GitHub calls the headings of a document."""
    headings = HEADING.findall(prose(document))
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def links():
    """Each link within the repository, with the document that has it."""
    return [
        pytest.param(document, link, id=f"{document.name}: {link}")
        for document in documents()
        for link in dict.fromkeys(LINK.findall(prose(document)))
        if "://" not in link
    ]


def test_there_are_links():
    assert links()


@pytest.mark.parametrize(("document", "link"), links())
def test_leads_somewhere(document, link):
    path, _, anchor = link.partition("#")
    target = document.parent / path if path else document
    assert target.exists()
    if anchor:
        assert anchor in anchors(target)
