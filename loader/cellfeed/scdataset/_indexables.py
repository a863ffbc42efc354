"""Aligned modalities that are indexed together, and functions that make them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cellfeed.collection import count_indexable_rows, in_memory, require_indexable
from cellfeed.extending import ColumnError, FormatError, ParameterError, require_positive

if TYPE_CHECKING:
    from torch import Tensor


class MultiIndexable:
    """Several indexables of the same length, such as X and y, or RNA and protein.

    ``multi[rows]`` indexes all of them and returns a `MultiIndexable`; ``multi["X"]`` or
    ``multi[0]`` returns one of them.

    Parameters
    ----------
    *indexables
        Indexables of the same length, or a single dictionary from names to indexables.
    names
        Names of the positional indexables.
    unstructured
        Data that belong to all rows, such as gene names; indexing does not change them.
    **named_indexables
        Indexables by name.

    Raises
    ------
    ParameterError
        There are no indexables, their lengths differ, or ``names`` does not match them. Also where
        rows are asked of one that cannot be indexed by row numbers.

    Examples
    --------
    >>> multi = MultiIndexable(X=np.eye(4), y=np.array([0, 1, 0, 1]))
    >>> multi[np.array([1, 3])]["y"]
    array([1, 1])
    """

    def __init__(
        self,
        *indexables: Any,
        names: list[str] | None = None,
        unstructured: Mapping[str, Any] | None = None,
        **named_indexables: Any,
    ) -> None:
        if unstructured is not None and not isinstance(unstructured, Mapping):
            msg = f"`unstructured` must be a mapping by name, but got {unstructured!r}"  # type: ignore[unreachable]
            raise ParameterError(msg)
        by_name = dict(named_indexables)
        if len(indexables) == 1 and isinstance(indexables[0], Mapping):
            by_name = {**indexables[0], **by_name}
            indexables = ()
        if indexables and by_name:
            msg = "indexables must all be named or all be unnamed, but got both"
            raise ParameterError(msg)
        if names is not None and len(names) != len(indexables):
            msg = f"`names` must name each indexable, but got {len(names)} for {len(indexables)}"
            raise ParameterError(msg)
        self.names = list(by_name) if by_name else names
        self.unstructured = dict(unstructured or {})
        self._indexables = tuple(by_name.values()) or indexables
        lengths = {count_indexable_rows(indexable) for indexable in self._indexables}
        if len(lengths) != 1:
            msg = (
                "indexables must have the same length, but got lengths "
                f"{sorted(lengths) or 'of none'}"
            )
            raise ParameterError(msg)
        (self._length,) = lengths

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int | str | slice | list[int] | NDArray[np.integer]) -> Any:
        if isinstance(key, str):
            if key not in (self.names or ()):
                msg = f"no indexable is named {key!r}; the names are {self.names}"
                raise KeyError(msg)
            return self._indexables[(self.names or []).index(key)]
        if isinstance(key, int | np.integer):
            return self._indexables[key]
        rows = key if isinstance(key, slice) else np.asarray(key)
        for each in () if isinstance(key, slice) else self:
            require_indexable(each)
        selected = MultiIndexable(
            *(indexable[rows] for indexable in self._indexables), unstructured=self.unstructured
        )
        selected.names = self.names
        return selected

    def __iter__(self) -> Iterator[Any]:
        return iter(self._indexables)

    def to_memory(self) -> "MultiIndexable":
        """Return the same with what is backed by a file in memory."""
        return MultiIndexable(
            *map(in_memory, self), names=self.names, unstructured=self.unstructured
        )

    @property
    def count(self) -> int:
        """Number of indexables."""
        return len(self._indexables)

    @property
    def unstructured_keys(self) -> list[str]:
        """Names of the unstructured data."""
        return list(self.unstructured)

    def keys(self) -> list[Any]:
        """Return the names of the indexables, or 0, 1, 2, ... if they have none."""
        return list(range(self.count) if self.names is None else self.names)

    def values(self) -> list[Any]:
        """Return the indexables."""
        return list(self._indexables)

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Iterate over pairs of key and indexable."""
        return zip(self.keys(), self._indexables, strict=True)

    def __repr__(self) -> str:
        parts = ", ".join(self.names or map(str, range(len(self._indexables))))
        return f"MultiIndexable({parts}; {len(self)} rows)"


# Transforms of batches from AnnData and HuggingFace datasets, under scDataset's names.

_GENES_OF_TAHOE = 62_713


def adata_to_mindex(batch: Any, columns: Sequence[str] | None = None) -> MultiIndexable:
    """Return the dense expression matrix and obs columns of AnnData.

    Use it as ``fetch_transform`` for AnnData (in memory or backed) or an AnnCollection, with
    ``functools.partial`` to choose columns. A `Collection` does not need it, and reads many times
    as fast.

    Parameters
    ----------
    batch
        The AnnData of a fetch.
    columns
        Names of obs columns; no columns if None.

    Returns
    -------
    NumPy arrays: ``X`` of shape (n_rows, n_vars), and each column by its name.

    Raises
    ------
    ColumnError
        obs has no such column.
    ParameterError
        A column is called ``X``.

    Examples
    --------
    >>> import anndata, pandas as pd
    >>> obs = pd.DataFrame({"plate": [7, 8]}, index=["a", "b"])
    >>> adata_to_mindex(anndata.AnnData(np.eye(2), obs=obs), ["plate"])
    MultiIndexable(X, plate; 2 rows)
    """
    if isinstance(columns, str):
        msg = f"`columns` must be a list, but got the text {columns!r}; write [{columns!r}]"
        raise ParameterError(msg)
    names = list(columns or ())
    if "X" in names:
        msg = "an obs column must not be named 'X', the name of the matrix; rename it"
        raise ParameterError(msg)
    read = in_memory(batch)
    X: Any = read.X
    arrays = {"X": X.toarray() if hasattr(X, "toarray") else np.asarray(X)}
    for name in names:
        try:
            arrays[name] = np.asarray(read.obs[name])
        except KeyError as error:
            msg = f"obs has no column {name!r}; leave it out of `columns`, or add it to obs"
            raise ColumnError(msg) from error
    return MultiIndexable(arrays)


def hf_tahoe_to_tensor(
    batch: "Mapping[str, Any] | Sequence[Mapping[str, Any]]", num_genes: int = _GENES_OF_TAHOE
) -> "Tensor":
    """Return the expression of cells of a HuggingFace dataset as a dense tensor.

    Use it as ``fetch_transform`` for a dataset in which each cell has two lists, gene numbers and
    their values. All entries are used unchanged. `HuggingFaceSource` reads such a dataset as a
    sparse matrix, and leaves out entries that are not genes.

    Parameters
    ----------
    batch
        A dictionary with lists of lists under ``genes`` and ``expressions``, or a list of cells
        that each have both.
    num_genes
        Number of columns of the tensor; by default, the number of genes of Tahoe-100M.

    Returns
    -------
    Values, float32, shape (n_rows, num_genes).

    Raises
    ------
    ParameterError
        ``batch`` is something else.
    FormatError
        The lists of a cell differ in length, or a gene number is not below ``num_genes``.

    Examples
    --------
    >>> hf_tahoe_to_tensor({"genes": [[0, 2], [1]], "expressions": [[3, 4], [5]]}, num_genes=3)
    tensor([[3., 0., 4.],
            [0., 5., 0.]])
    """
    from cellfeed.extending import require_torch, torch  # noqa: PLC0415 - only this needs it

    require_torch("`hf_tahoe_to_tensor`")
    width = require_positive("num_genes", num_genes)
    if isinstance(batch, list | tuple):
        genes, values = ([cell[name] for cell in batch] for name in ("genes", "expressions"))
    elif isinstance(batch, Mapping):
        genes, values = batch["genes"], batch["expressions"]
    else:
        msg = (
            "`batch` must be a dictionary or a list of dictionaries with 'genes' and "
            f"'expressions', but got one of type {type(batch).__name__}"
        )
        raise ParameterError(msg)
    lengths = np.array([len(each) for each in genes], np.int64)
    if lengths.tolist() != [len(each) for each in values]:
        msg = "the lists 'genes' and 'expressions' of a cell differ in length; leave out such cells"
        raise FormatError(msg)
    columns = _joined(genes, np.dtype(np.int64))
    if columns.size and not 0 <= columns.min() <= columns.max() < width:
        msg = (
            f"gene numbers are from {columns.min()} to {columns.max()}, which does not fit "
            f"num_genes={width}; give a larger `num_genes`"
        )
        raise FormatError(msg)
    dense = np.zeros((lengths.size, width), np.float32)
    dense[np.repeat(np.arange(lengths.size), lengths), columns] = _joined(
        values, np.dtype(np.float32)
    )
    return torch.from_numpy(dense)


def _joined(lists: Sequence[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *(np.asarray(each, dtype) for each in lists)])
