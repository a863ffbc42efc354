"""Execute notebooks in place, and save the pictures that they show.

``python notebooks/execute.py notebooks/figure4_entropy.ipynb`` writes
``demo/figures/figure4_entropy.png``. Timings and versions are left out of a notebook, so that it
changes only where its content does.
"""

import base64
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FIGURES = Path("demo/figures")


def execute(path):
    """Return the notebook, newly executed, with the outputs of all its cells."""
    notebook = nbformat.read(path, as_version=4)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, resources=folder, record_timing=False).execute()
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def pictures(notebook):
    """Return the PNG images that the notebook shows."""
    return [
        base64.b64decode(output.data["image/png"])
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]


def main():
    """Execute the notebooks named on the command line."""
    FIGURES.mkdir(parents=True, exist_ok=True)
    for path in map(Path, sys.argv[1:]):
        try:
            notebook = execute(path)
        except CellExecutionError as error:
            if error.ename != "SystemExit":
                raise
            sys.exit(f"{path.name}: {error.evalue}")  # the error says what is missing
        nbformat.write(notebook, path)
        shown = pictures(notebook)
        for number, picture in enumerate(shown, start=1):
            figure = FIGURES / f"{path.stem}{'' if len(shown) == 1 else f'_{number}'}.png"
            figure.write_bytes(picture)
            print(figure)


if __name__ == "__main__":
    main()
