"""Data modules say what to install where their framework is missing."""

import subprocess
import sys

import pytest

pytest.importorskip("torch")


def test_without_scvi_tools():
    script = (
        "import sys\n"
        "sys.modules['scvi'] = sys.modules['lightning'] = None\n"
        "from cellfeed.frameworks.scvi import ScviDataModule\n"
        "try:\n"
        "    ScviDataModule('plates')\n"
        "except ImportError as error:\n"
        "    print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout == (
        "`ScviDataModule` needs scvi-tools, which is not installed; install it with "
        "`pip install 'cellfeed[scvi]'`\n"
    )
