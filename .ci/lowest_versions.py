"""Print the lowest version that pyproject.toml allows of each dependency, as pip's constraints."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
# The tools of `dev`, and what only examples need, are not a user's.
chosen = [*project["dependencies"], *(each for name in extras if name not in {"dev", "docs", "examples"} for each in extras[name])]  # fmt: skip
for requirement in sorted(set(chosen)):
    found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"`name>=version` is needed, but pyproject.toml has `{requirement}`")
    print(f"{found[1]}=={found[2]}")
