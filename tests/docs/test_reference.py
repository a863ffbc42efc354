"""Every public name stands in docs/reference, once."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "reference"
MODULES = [
    *("cellfeed", "cellfeed.machine", "cellfeed.sampling", "cellfeed.sources", "cellfeed.stages"),
    "cellfeed.spatial",
    *("cellfeed.frameworks.lightning", "cellfeed.frameworks.scvi"),
    "cellfeed.frameworks.transformers",
    "cellfeed.frameworks.state",
    *("cellfeed.scdataset", "cellfeed.synthetic", "cellfeed.testing", "cellfeed.tokenizers"),
    "cellfeed.transforms",
    *("cellfeed_tuner", "cellfeed_tuner.plots", "cellfeed_tuner.theory"),
]
LISTED = re.compile(r"\.\. autosummary::\n   :toctree: api\n   :nosignatures:\n\n((?:   \w+\n)+)")
WRITTEN = re.compile(r"\.\. py:data:: (\w+)")  # aliases of types, which have no docstring


def listed(module):
    """The names that the page of a module lists."""
    page = (PAGES / f"{module.rpartition('.')[2]}.md").read_text()
    return [name for each in LISTED.findall(page) for name in each.split()] + WRITTEN.findall(page)


@pytest.mark.parametrize("module", MODULES)
def test_lists_all_names_once(module):
    imported = importlib.import_module(module)
    public = {
        name
        for name in imported.__all__
        if not name.startswith("__") and not isinstance(getattr(imported, name), ModuleType)
    }
    if module != "cellfeed":  # those of the package are on its page
        package = importlib.import_module("cellfeed")
        public -= {
            name
            for name in public & set(package.__all__)
            if getattr(imported, name) is getattr(package, name)
        }
    assert sorted(listed(module)) == sorted(public)
