"""Every notebook runs, and is stored with what it shows."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestNotebook:
    def test_runs_in_small_size(self, path, monkeypatch):
        monkeypatch.setenv("CELLFEED_NOTEBOOK_SIZE", "small")
        notebook = nbformat.read(path, as_version=4)
        folder = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, resources=folder, timeout=300).execute()  # raises on an error
        assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))

    def test_is_stored_with_its_outputs(self, path):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        outputs = outputs_of(notebook)
        assert any("image/png" in output.get("data", {}) for output in outputs)
        assert not [output for output in outputs if output.output_type == "error"]
        assert not [output for output in outputs if output.get("name") == "stderr"]
        counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1))

    def test_is_small_and_names_no_machine(self, path):
        assert path.stat().st_size < MOST_BYTES
        notebook = nbformat.read(path, as_version=4)
        assert notebook.metadata.kernelspec.name == "python3"
        assert str(ROOT) not in path.read_text()
        assert str(Path.home()) not in path.read_text()
