"""Minibatches as the models of Arc Institute's STATE take them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed import Minibatch
from cellfeed.collection import Collection
from cellfeed.extending import ColumnError, ParameterError, require_torch, torch
from cellfeed.rows import CategoricalColumn

__all__ = ["StateBatch"]


class StateBatch:
    """A ``batch_transform`` that makes the dictionary which STATE's models read.

    Keys, shapes and dtypes are those that cell-load documents for the batches of its
    ``PerturbationDataModule`` (https://github.com/ArcInstitute/cell-load), for minibatches of n
    treated cells with one control each, from `MatchedControls` with ``k=1``:

    - ``pert_cell_emb``, ``ctrl_cell_emb``: values of the treated cells and of their controls,
      float32, shape (n, n_columns).
    - ``pert_emb``: one-hot or given features of the perturbation, float32, shape (n, n_features).
    - ``pert_name``, ``cell_type``, ``batch_name``: lists of n names.
    - ``cell_type_onehot``, ``batch``: one-hot vectors, float32, shape (n, n_categories).
    - ``pert_cell_counts``, ``ctrl_cell_counts``: with ``counts``, float32, shape (n, n_columns).

    One-hot vectors number the names of the whole collection in sorted order. STATE's transition
    model takes ``cell_sentence_len`` consecutive cells as a set, which share perturbation and
    cell type: let `GroupedSampling` with that ``set_size`` choose the treated cells.

    Elements that are stored sparse are made dense here if they are not yet: much faster is a
    dataset with ``dense=True``, whose threads do it.

    Parameters
    ----------
    collection
        The collection that the minibatches are of, opened with the three obs columns.
    perturbation, cell_type, batch
        Names of these obs columns: STATE's ``pert_col``, ``cell_type_key`` and ``batch_col``.
    embedding
        The element that the model reads, such as ``"obsm/X_hvg"``; the first element if None.
    counts
        The element of counts for a decoder, such as ``"X"``; none if None.
    features
        Features of perturbations in place of one-hot vectors, by name, each of the same length.

    Raises
    ------
    ColumnError
        A column was not opened, or is not categorical.
    ParameterError
        An element was not opened; or perturbations have no features. When a minibatch is made: its
        cells do not have one control each.
    ImportError
        torch is not installed.
    """

    def __init__(
        self,
        collection: Collection,
        *,
        perturbation: str,
        cell_type: str,
        batch: str,
        embedding: str | None = None,
        counts: str | None = None,
        features: Mapping[str, Any] | None = None,
    ) -> None:
        require_torch("`StateBatch`")
        for element in {embedding, counts} - {None, *collection.elements}:
            msg = (
                f"the collection has no element {element!r}, only {list(collection.elements)}; "
                f"open it with elements=[..., {element!r}]"
            )
            raise ParameterError(msg)
        self._embedding = next(iter(collection.elements)) if embedding is None else embedding
        self._counts = counts
        self._columns = perturbation, cell_type, batch
        self._names = {name: _names(collection, name) for name in self._columns}
        self._vectors = {name: _one_hot(names) for name, names in self._names.items()}
        if features is not None:
            missing = sorted({*self._names[perturbation].tolist()} - {*features})
            if missing:
                msg = f"`features` lack {len(missing)} perturbations, such as {missing[0]!r}"
                raise ParameterError(msg)
            rows = [torch.as_tensor(features[name]) for name in self._names[perturbation]]
            self._vectors[perturbation] = torch.stack(rows).float()

    def __call__(self, minibatch: Minibatch) -> dict[str, Any]:
        """Return the dictionary of a minibatch."""
        controls = minibatch.controls
        if controls is None or len(controls) != len(minibatch):
            has = "none" if controls is None else f"{len(controls)} for {len(minibatch)} cells"
            msg = (
                f"STATE needs one control for each cell, but the minibatch has {has}; use "
                "MatchedControls(..., k=1)"
            )
            raise ParameterError(msg)
        perturbation, cell_type, batch = self._columns
        made: dict[str, Any] = {
            "pert_cell_emb": _dense(minibatch[self._embedding]),
            "ctrl_cell_emb": _dense(controls[self._embedding]),
            "pert_emb": self._vectors_of(perturbation, minibatch),
            "pert_name": self._names_of(perturbation, minibatch),
            "cell_type": self._names_of(cell_type, minibatch),
            "cell_type_onehot": self._vectors_of(cell_type, minibatch),
            "batch": self._vectors_of(batch, minibatch),
            "batch_name": self._names_of(batch, minibatch),
        }
        if self._counts is not None:
            made["pert_cell_counts"] = _dense(minibatch[self._counts])
            made["ctrl_cell_counts"] = _dense(controls[self._counts])
        return made

    def _vectors_of(self, column: str, minibatch: Minibatch) -> "torch.Tensor":
        return self._vectors[column][_codes(column, minibatch)]

    def _names_of(self, column: str, minibatch: Minibatch) -> list[str]:
        names: list[str] = self._names[column][_codes(column, minibatch).numpy()].tolist()
        return names


def _codes(column: str, minibatch: Minibatch) -> "torch.Tensor":
    codes = minibatch.obs[column]
    if len(codes) and int(codes.min()) < 0:
        msg = f"a cell has no {column!r}, which STATE needs; leave such cells out with `indices`"
        raise ParameterError(msg)
    return codes


def _names(collection: Collection, name: str) -> NDArray[np.object_]:
    column = collection.obs.get(name)
    if not isinstance(column, CategoricalColumn):
        what = "no obs column" if column is None else "only numbers in the obs column"
        msg = f"the collection has {what} {name!r}; open it with obs=[{name!r}], stored as text"
        raise ColumnError(msg)
    return np.array([str(each) for each in column.categories], dtype=object)


def _one_hot(names: NDArray[np.object_]) -> "torch.Tensor":
    """Return a vector for each name, numbered in sorted order."""
    places = np.argsort(np.argsort(names))
    return torch.eye(len(names))[torch.from_numpy(places)]


def _dense(element: Any) -> "torch.Tensor":
    dense: torch.Tensor = element.to_dense() if element.layout == torch.sparse_csr else element
    return dense.float()
