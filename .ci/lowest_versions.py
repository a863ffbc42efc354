"""Print the lowest version that pyproject.toml allows of each dependency, as pip's constraints."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
chosen = set(project["dependencies"])
for name in extras.keys() - {"examples"}:  # which is not for users
    chosen.update(extras[name])
for requirement in sorted(chosen):
    found = re.fullmatch(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)", requirement)
    if found is None:
        raise SystemExit(f"`name>=version` is needed, but pyproject.toml has `{requirement}`")
    print(f"{found[1]}=={found[2]}")  # noqa: T201 - for a shell
