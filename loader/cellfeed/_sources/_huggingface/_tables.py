"""Where the rows of a HuggingFace dataset are: in a folder, or in an object of the library."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import FormatError, ParameterError, PathError
from cellfeed._lazy import pd
from cellfeed._sources._base import import_arrow, to_frame
from cellfeed._sources._huggingface._batches import (
    EXTRA,
    ListColumns,
    Placed,
    batches_in_files,
    batches_in_memory,
    list_columns,
    open_table,
)

__all__ = ["ArrowTable", "is_saved"]

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
