"""Prepare README.md and pyproject.toml for a build of a release.

``python .ci/published.py https://github.com/OWNER/NAME v1.2.3`` makes the links of README.md
absolute, as a package index needs them, and adds the project's URLs to pyproject.toml. Neither
is committed: a checkout does not know where it is hosted.

``python .ci/published.py --released`` checks that CHANGELOG.md, CITATION.cff, README.md and the
pages say that the version is released.
"""

import re
import sys
from pathlib import Path

# What says how to install cellfeed.
INSTALL = ("README.md", "docs/index.md", "docs/how-to/install.md", "docs/tutorial/index.md")
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def with_absolute_links(page: str, home: str, tag: str) -> str:
    """Return a page whose relative links lead to a tag of the repository."""
    return RELATIVE.sub(
        lambda link: f"{link[1]}[{link[2]}]({home}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})",
        page,
    )


def with_addresses(pyproject: str, home: str, tag: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    _, _, host, owner, name = home.split("/")
    urls = {
        "Repository": home,
        "Documentation": f"https://{owner.lower()}.github.io/{name}/{tag.removeprefix('v')}/"
        if host == "github.com"
        else f"{home}/tree/{tag}/docs",
        "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    lines = [f'{name} = "{url}"\n' for name, url in urls.items()]
    before, scripts, after = pyproject.partition("[project.scripts]\n")
    if not scripts:
        raise SystemExit("pyproject.toml has no [project.scripts], which addresses go before")
    return "".join([before, "[project.urls]\n", *lines, "\n", scripts, after])


def states() -> dict[str, bool]:
    """Return for each file that says so whether the current version is released."""
    texts = {name: Path(name).read_text() for name in ("CHANGELOG.md", "CITATION.cff", *INSTALL)}
    newest = re.search(r"^## \[\d.*", texts["CHANGELOG.md"], re.MULTILINE)
    return {
        "CHANGELOG.md": newest is not None and not newest[0].endswith("unreleased"),
        "CITATION.cff": "\ndate-released: " in texts["CITATION.cff"],
        **{name: "until the first release" not in texts[name].lower() for name in INSTALL},
    }


if __name__ == "__main__" and sys.argv[1:] == ["--released"]:
    unreleased = [name for name, is_released in states().items() if not is_released]
    if unreleased:
        raise SystemExit(f"not released, according to {', '.join(unreleased)}")
elif __name__ == "__main__":
    home, tag = sys.argv[1:]
    for path, change in (("README.md", with_absolute_links), ("pyproject.toml", with_addresses)):
        Path(path).write_text(change(Path(path).read_text(), home, tag))
