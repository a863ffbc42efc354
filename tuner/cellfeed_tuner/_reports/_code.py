"""Python to paste."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["code_to_paste"]


def code_to_paste(
    paths: Sequence[Path],
    labels: Sequence[str],
    result: Path,
    *,
    elements: Sequence[str] = ("X",),
) -> str:
    """Return the lines that train with the recommendation in the file ``result``.

    Examples
    --------
    >>> print(code_to_paste([Path("cells.h5ad")], ["plate"], Path("autotune.json")))
    from cellfeed import CellDataset, open_collection
    <BLANKLINE>
    collection = open_collection('cells.h5ad', obs=['plate'])
    dataset = CellDataset.from_autotune(collection, 'autotune.json', seed=0)
    for minibatch in dataset.loader():
        ...  # minibatch.X, minibatch.obs['plate'], minibatch.rows
    """
    arguments = f"{_paths_in_python(paths)}, obs={list(labels)!r}"
    if list(elements) != ["X"]:
        arguments += f", elements={list(elements)!r}"
    return "\n".join(
        [
            "from cellfeed import CellDataset, open_collection",
            "",
            f"collection = open_collection({arguments})",
            f"dataset = CellDataset.from_autotune(collection, {str(result)!r}, seed=0)",
            "for minibatch in dataset.loader():",
            f"    ...  # minibatch.X, minibatch.obs[{labels[0]!r}], minibatch.rows",
        ]
    )


def _paths_in_python(paths: Sequence[Path]) -> str:
    if len(paths) == 1:
        return repr(str(paths[0]))
    folders = {path.parent for path in paths}
    if len(folders) == 1:
        folder = folders.pop()
        if set(folder.glob("*.h5ad")) == set(paths):
            return repr(str(folder))
    return repr([str(path) for path in paths])
