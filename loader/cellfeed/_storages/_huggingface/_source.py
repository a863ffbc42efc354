"""`HuggingFaceSource`: datasets with a row for each cell, and its genes in two lists."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed._bytes import Location
from cellfeed._errors import (
    ColumnError,
    FormatError,
    ParameterError,
    PathError,
    require_integer,
    require_positive,
)
from cellfeed._lazy import pd
from cellfeed._storages._base import (
    Source,
    Storage,
    StorageFacts,
    StoredElement,
    import_arrow,
    to_frame,
)
from cellfeed._storages._huggingface._elements import (
    EXTRA,
    ArrowLists,
    ArrowRows,
    Columns,
    ListColumns,
    Placed,
    batches_in_files,
    batches_in_memory,
    list_columns,
    open_table,
    type_of_lists,
)

# Where the rows of a HuggingFace dataset are: in a folder, or in an object of the library.

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved(path: Path) -> bool:
    """Return whether `save_to_disk` of a `Dataset` or a `DatasetDict` wrote this folder."""
    is_dataset = (path / _STATE).is_file() and (path / "dataset_info.json").is_file()
    return is_dataset or (path / _SPLITS).is_file()


class ArrowTable:
    """The rows of a dataset, opened in each process that reads them.

    Parameters
    ----------
    given
        A folder that `Dataset.save_to_disk` wrote, or a `datasets.Dataset`.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        It is neither.
    ParameterError
        The dataset has several splits, is iterable only, or has a row twice.
    """

    def __init__(self, given: Any) -> None:
        self._opened: tuple[int, Any] | None = None
        self._dataset = None if isinstance(given, str | os.PathLike) else given
        self.row_order: NDArray[np.int64] | None = None
        if self._dataset is None:
            self.location = Location.of(given)
            self.paths = _saved_files(self.location)
        else:
            self.paths = _files_of(given)
            self.location = Location.of(_folder_of(self.paths))
            indices = given._indices  # noqa: SLF001 - it has no public name
            if indices is not None:
                self.row_order = indices.column(0).to_numpy().astype(np.int64)
                if np.unique(self.row_order).size != self.row_order.size:
                    msg = f"{self.location}: the dataset has a row twice"
                    raise ParameterError(f"{msg}; call its `flatten_indices` first")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def __call__(self) -> Any:
        """Return all rows as a `pyarrow.Table`, without `row_order`."""
        if self._dataset is not None:
            return self._dataset.data.table
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), open_table(self.location, self.paths)
        return self._opened[1]

    def list_columns(self, names: tuple[str, str]) -> tuple[Sequence[Path], ListColumns | None]:
        """Return some files, and where the lists of two columns lie in them.

        None if the lists are not in files.
        """
        if self._dataset is None:
            batches: Iterable[Placed] = batches_in_files(self.location, self.paths)
            return self.paths, list_columns(self.location, batches, names)
        paths, batches = batches_in_memory(self())
        return paths, list_columns(self.location, batches, names)

    def obs_names(self) -> list[str]:
        """Return the columns with one number, boolean or text per row."""
        arrow = import_arrow(self.location, EXTRA)
        schema, types = self().schema, arrow.types
        tests = (
            types.is_integer, types.is_floating, types.is_boolean, types.is_string,
            types.is_large_string, types.is_dictionary,
        )  # fmt: skip
        return [each.name for each in schema if any(test(each.type) for test in tests)]

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Return some columns, in row order; class labels as their names."""
        table = self().select(list(columns))
        frame = to_frame(table)
        for name, classes in self._class_labels().items():
            if name in frame:
                codes = frame[name].fillna(-1).astype(np.int64)
                frame[name] = pd.Categorical.from_codes(codes, categories=pd.Index(classes))
        if self.row_order is not None:
            frame = frame.iloc[self.row_order].reset_index(drop=True)
        return frame

    def _class_labels(self) -> dict[str, list[str]]:
        if self._dataset is not None:
            features = self._dataset.features
            return {k: each.names for k, each in features.items() if hasattr(each, "int2str")}
        metadata = self().schema.metadata or {}
        info = json.loads(metadata.get(b"huggingface", b"{}"))
        features = (info.get("info") or {}).get("features") or {}
        is_label = {
            k: isinstance(v, dict) and v.get("_type") == "ClassLabel" for k, v in features.items()
        }
        return {name: features[name]["names"] for name in features if is_label[name]}


def _saved_files(folder: Location) -> list[Path]:
    path = Path(folder)
    if (path / _SPLITS).is_file():
        try:
            splits = json.loads((path / _SPLITS).read_text())["splits"]
            listed = ", ".join(str(path / split) for split in splits)
        except (ValueError, KeyError, TypeError) as error:
            msg = f"{folder}: {_SPLITS} does not list the splits ({type(error).__name__})"
            raise FormatError(f"{msg}; copy the folder again") from error
        raise ParameterError(f"{folder}: has several splits; give one of: {listed}")
    if not (path / _STATE).is_file():
        if not path.is_dir():
            raise PathError(f"{folder}: there is no such folder; check the path")
        msg = f"{folder}: has no {_STATE}, which `Dataset.save_to_disk` writes"
        raise FormatError(f"{msg}; give the folder that it wrote")
    try:
        state = json.loads((path / _STATE).read_text())
        names = [each["filename"] for each in state["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"{folder}: {_STATE} does not list the files ({type(error).__name__})"
        raise FormatError(f"{msg}; copy the folder again") from error
    if not names:
        raise FormatError(f"{folder}: has no cells; give a folder that has some")
    return [path / name for name in names]


def _files_of(dataset: Any) -> list[Path]:
    if not hasattr(dataset, "cache_files") or not hasattr(dataset, "_indices"):
        kind = type(dataset).__name__
        if hasattr(dataset, "keys"):
            msg = f"a {kind} has several splits; give one of: {', '.join(map(repr, dataset))}"
        else:
            article = "an" if kind[0] in "AEIOU" else "a"
            msg = (
                f"{article} {kind} cannot be read by row; give a `datasets.Dataset`, or its folder"
            )
        raise ParameterError(msg)
    return [Path(each["filename"]) for each in dataset.cache_files]


def _folder_of(paths: Sequence[Path]) -> str:
    if not paths:
        return "memory://datasets.Dataset"
    return os.path.commonpath([path.absolute().parent for path in paths])


_MOST_IDS = 1 << 20  # only gene numbers below it may be left out; their table takes 4 MB

_LEFT_OUT, _NOT_THERE = -1, -2  # stands for columns that are not in the element


class HuggingFaceSource(Source):
    """A HuggingFace dataset with a row for each cell and its genes in two lists.

    One list has the numbers of the expressed genes, and the other one their values, as in
    Tahoe-100M. All other columns of numbers and text are obs columns. Compiled threads read
    uncompressed Arrow files, the kind that the ``datasets`` library writes, without the library.

    Parameters
    ----------
    dataset
        A folder that ``Dataset.save_to_disk`` wrote, or a ``datasets.Dataset``.
    n_vars
        Number of genes, if gene numbers are columns of the matrix, from 0. Without ``n_vars`` and
        ``gene_ids``, all gene numbers are read first, and this is the largest plus one.
    gene_ids
        Gene number of each column of the matrix, distinct, shape (n_vars,), such as the token ids
        of Tahoe-100M. Elements with other numbers are left out, such as the marker at the beginning
        of each cell of Tahoe-100M; rows are then read in two passes.
    n_markers
        Number of elements at the beginning of each cell's lists that are not genes, if known; 1 for
        Tahoe-100M. They are left out, and all other elements must be of ``gene_ids``, so rows are
        read in one pass, several times faster.
    var_names
        Names of the genes, shape (n_vars,); by default, ``gene_ids`` or the column numbers.
    genes, values
        Names of the columns with the two lists.

    Raises
    ------
    PathError
        There is no such folder.
    FormatError
        The folder is something else, or a column is not a list of numbers. Also when rows are read:
        the lists of a cell differ in length, or a gene number is not below ``n_vars`` or not among
        ``gene_ids``.
    ColumnError
        There is no such column.
    ParameterError
        ``gene_ids`` are not distinct integers, or the number of names is not the number of genes.

    Examples
    --------
    >>> import datasets
    >>> from cellfeed import HuggingFaceSource, open_collection
    >>> columns = {"genes": [[1, 5, 9], [1, 9]], "expressions": [[-2.0, 3.0, 4.0], [-2.0, 7.0]]}
    >>> source = HuggingFaceSource(datasets.Dataset.from_dict(columns), gene_ids=[9, 7, 5])
    >>> open_collection(source)[[1, 0]].X.toarray()
    array([[7., 0., 0.],
           [4., 0., 3.]])
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str] | Any,
        *,
        n_vars: int | None = None,
        gene_ids: ArrayLike | None = None,
        n_markers: int | None = None,
        var_names: Sequence[str] | None = None,
        genes: str = "genes",
        values: str = "expressions",
    ) -> None:
        self._table = ArrowTable(dataset)
        self.location = self._table.location
        self._lists = genes, values
        ids = None if gene_ids is None else _distinct(gene_ids)
        schema = self._table().schema
        for name in self._lists:
            if name not in schema.names:
                msg = f"{self.location}: has no column {name!r}; give `genes=` and `values=` to"
                raise ColumnError(f"{msg} `HuggingFaceSource`, from: {', '.join(schema.names)}")
        arrow = import_arrow(self.location, EXTRA)
        dtypes = [
            np.dtype(type_of_lists(arrow, self.location, schema, name).value_type.to_pandas_dtype())
            for name in self._lists
        ]
        if dtypes[0].kind not in "iu":
            msg = f"{self.location}: column {genes!r} has {dtypes[0]}, which are not gene numbers"
            raise FormatError(f"{msg}; give another column as `genes=`")
        if n_vars is None:
            n_vars = self._largest() + 1 if ids is None else ids.size
        elif ids is not None and n_vars != ids.size:
            msg = f"`n_vars` must be the number of `gene_ids`, {ids.size}, but got {n_vars}"
            raise ParameterError(f"{self.location}: {msg}; leave it out")
        require_positive("n_vars", n_vars)
        if n_markers is not None and require_integer("n_markers", n_markers) < 0:
            msg = f"`n_markers >= 0` must hold, but got n_markers={n_markers}"
            raise ParameterError(f"{self.location}: {msg}")
        n_stored = n_vars if ids is None else max(_MOST_IDS, int(ids.max()) + 1)
        columns = Columns(
            self.location, self._lists, n_stored, _names(var_names, ids, n_vars), n_markers or 0
        )
        element = self._element(columns, dtypes[1], n_vars)
        element.row_order = self._table.row_order
        if ids is not None:
            other = _LEFT_OUT if n_markers is None else _NOT_THERE
            element.stored_columns = np.full(n_stored, other, np.int32)
            element.stored_columns[ids] = np.arange(ids.size)
        self.elements = {"X": element}

    def __repr__(self) -> str:
        return f"HuggingFaceSource({str(self.location)!r})"

    def _element(self, columns: Columns, dtype: np.dtype[Any], n_vars: int) -> StoredElement:
        order = self._table.row_order
        n_rows = len(self._table()) if order is None else order.size
        paths, stored = self._table.list_columns(self._lists)
        if stored is not None and dtype != np.float16:
            return ArrowLists(columns, *stored.of_files(paths), (n_rows, n_vars))
        reason = (
            "cellfeed does not decode float16"
            if stored
            else "its files do not have the layout of memory"
        )
        return ArrowRows(
            columns, self._table, dtype, (n_rows, n_vars), reason if self._table.paths else None
        )

    def _largest(self) -> int:
        """Return the largest gene number, after reading all of them."""
        import pyarrow.compute as pc  # noqa: PLC0415

        chunks = self._table().column(self._lists[0]).chunks
        found = [pc.max(pc.list_flatten(chunk)).as_py() for chunk in chunks]
        return max((each for each in found if each is not None), default=0)

    def obs_names(self) -> list[str]:
        """Return the names of the obs columns."""
        return self._table.obs_names()

    def read_obs(self, columns: Sequence[str]) -> pd.DataFrame:
        """Read obs columns, and nothing else."""
        return self._table.read_obs(columns)

    def files(self) -> Sequence[Path]:
        """Return the files of its rows."""
        return self._table.paths


def _distinct(gene_ids: ArrayLike) -> NDArray[np.int64]:
    ids = np.asarray(gene_ids)
    is_list = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.size > 0
    if not is_list or ids.min() < 0 or np.unique(ids).size != ids.size:
        msg = "`gene_ids` must be one-dimensional, distinct integers from 0, at least one"
        raise ParameterError(f"{msg}, but got {str(gene_ids)[:50]}")
    return ids.astype(np.int64)


def _names(
    names: Sequence[str] | None, ids: NDArray[np.int64] | None, n_vars: int
) -> NDArray[np.object_] | None:
    if names is None:
        return None if ids is None else ids.astype(str).astype(object)
    if len(names) != n_vars:
        msg = f"`var_names` must name {n_vars} genes, but got {len(names)} names"
        raise ParameterError(msg)
    return np.array([str(name) for name in names], object)


# Folders that HuggingFace's ``datasets`` library wrote.


def _open(location: Location, elements: Sequence[str]) -> list[Source]:  # noqa: ARG001 - it has X
    return [HuggingFaceSource(location)]


HUGGINGFACE = Storage(
    name="HuggingFace Datasets",
    open=_open,
    recognizes=is_saved,
    extra="huggingface",
    facts=StorageFacts(
        recognized="a folder written by `save_to_disk`; a `datasets.Dataset`; `HuggingFaceSource`",
        reading="fast: lists are read directly from Arrow files; compressed ones by pyarrow",
        labels="columns of numbers, booleans, text and class labels",
    ),
)
