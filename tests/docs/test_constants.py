"""The page of constants is that of the modules, and every constant says where it comes from."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_modules():
    spec = importlib.util.spec_from_file_location("constants", DOCS / "constants.py")
    assert spec is not None
    assert spec.loader is not None
    constants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(constants)
    assert constants.PAGE.read_text() == constants.page()
