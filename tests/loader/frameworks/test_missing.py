"""Data modules say what to install where their framework is missing."""

import runpy
import sys

import pytest
from tests.loader.extensions import LOADER

pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_without_scvi_tools(monkeypatch):
    for name in ("scvi", "lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    module = runpy.run_path(str(LOADER / "frameworks" / "scvi" / "__init__.py"))
    with pytest.raises(ImportError) as missing:
        module["ScviDataModule"]("plates")
    assert str(missing.value) == (
        "`ScviDataModule` needs scvi-tools, which is not installed; install it with "
        "`pip install 'cellfeed[scvi]'`"
    )
