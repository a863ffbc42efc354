"""Write the repository's address into README.md and pyproject.toml before a build.

``python .ci/published.py https://github.com/OWNER/NAME v1.2.3`` makes the links of README.md
absolute, as a package index needs them, and adds the project's URLs to pyproject.toml. Neither
is committed: a checkout does not know where it is hosted.
"""

import re
import sys
from pathlib import Path

RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def with_absolute_links(page: str, home: str, tag: str) -> str:
    """Return a page whose relative links lead to a tag of the repository."""
    return RELATIVE.sub(
        lambda link: f"{link[1]}[{link[2]}]({home}/{'raw' if link[1] else 'blob'}/{tag}/{link[3]})",
        page,
    )


def with_addresses(pyproject: str, home: str, tag: str) -> str:
    """Return pyproject.toml with the project's URLs."""
    urls = {
        "Repository": home,
        "Documentation": f"{home}/tree/{tag}/docs",
        "Changelog": f"{home}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{home}/issues",
    }
    lines = [f'{name} = "{url}"\n' for name, url in urls.items()]
    before, scripts, after = pyproject.partition("[project.scripts]\n")
    if not scripts:
        raise SystemExit("pyproject.toml has no [project.scripts], which addresses go before")
    return "".join([before, "[project.urls]\n", *lines, "\n", scripts, after])


if __name__ == "__main__":
    home, tag = sys.argv[1:]
    for path, change in (("README.md", with_absolute_links), ("pyproject.toml", with_addresses)):
        Path(path).write_text(change(Path(path).read_text(), home, tag))
