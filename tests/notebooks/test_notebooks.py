"""Every notebook runs, and is stored with what it shows."""

import ast
import importlib
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from tests.warm import python as warm

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SIZED = [path for path in NOTEBOOKS if "CELLFEED_NOTEBOOK_SIZE" in path.read_text()]
SMOKE = "equation5_bounds"


@pytest.fixture
def forked_kernels(monkeypatch):
    """Kernels find their imports done."""
    monkeypatch.setattr("jupyter_client.launcher.Popen", warm.Popen)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def code_of(notebook):
    """The statements of all cells, without IPython's magics."""
    sources = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    lines = "\n".join(sources).splitlines()
    return ast.parse("\n".join(line for line in lines if not line.startswith("%")))


def test_sizes_that_are_looked_up_are_all_there():
    assert SIZED
    for path in SIZED:
        looked_up = [
            node.value
            for node in ast.walk(code_of(nbformat.read(path, as_version=4)))
            if isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "SIZE"
        ]
        assert looked_up, path
        for table in looked_up:
            assert isinstance(table, ast.Dict)
            sizes = [ast.literal_eval(key) for key in table.keys if key is not None]
            assert sizes == ["small", "medium", "large"], path


@pytest.mark.docs
@pytest.mark.process
def test_says_what_the_large_size_lacks(tmp_path, monkeypatch, forked_kernels):
    monkeypatch.setenv("CELLFEED_NOTEBOOK_SIZE", "large")
    monkeypatch.delenv("CELLFEED_TAHOE", raising=False)
    monkeypatch.syspath_prepend(ROOT / "notebooks")
    path = ROOT / "notebooks" / "figure5_classification.ipynb"
    monkeypatch.setattr(sys, "argv", ["execute.py", str(path)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        SystemExit, match=f"^{path.name}: Tahoe-100M is missing: set CELLFEED_TAHOE"
    ):
        importlib.import_module("execute").main()


@pytest.mark.docs
@pytest.mark.process
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.smoke) if path.stem == SMOKE else path
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_runs_in_small_size(path, monkeypatch, forked_kernels):
    monkeypatch.setenv("CELLFEED_NOTEBOOK_SIZE", "small")
    monkeypatch.setenv(warm.ADDRESS, warm.address())  # for what the notebook measures
    monkeypatch.setenv(warm.SHORT_REPLICATES, "1")
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, resources=folder, timeout=300).execute()  # raises on an error
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_small_with_its_outputs_and_names_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = outputs_of(notebook)
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert path.stat().st_size < 300_000
    assert notebook.metadata.kernelspec.name == "python3"
    assert str(ROOT) not in path.read_text()
    assert str(Path.home()) not in path.read_text()
