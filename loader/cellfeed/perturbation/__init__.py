"""Splits of perturbation studies: cell lines and perturbations held out for validation and test.

The layout of the TOML file is the one of cell-load, which reads it for STATE
(https://github.com/ArcInstitute/cell-load, "TOML Configuration Format").
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection as Values
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection, located
from cellfeed.extending import FormatError, ParameterError, PathError, pd, require_one_of
from cellfeed.perturbation._controls import MatchedControls, named_values, unknown
from cellfeed.splits import Labels, Rows, count_divided, labels_of

__all__ = ["MatchedControls", "PerturbationSplit", "perturbation_datasets", "perturbation_split"]

Part = Literal["train", "val", "test"]
_PARTS: tuple[str, ...] = get_args(Part)
_HELD_OUT = _PARTS[1:]
_CONTROL, _UNUSED = "control", "unused"
_SECTIONS = ("datasets", "training", "zeroshot", "fewshot", "perturbations")
_KEYS = 'keys are in quotes, as in "DATASET.CELL_TYPE"'


# What is held out, as stated: sections of a TOML file, or of a mapping like it.


class _Stated:
    """What is held out, checked as far as this is possible without cells.

    Parameters
    ----------
    origin
        What messages begin with: the path, or the name of the parameter.
    sections
        The sections of a TOML file, or of a mapping like it, in the order of `_SECTIONS`.

    Attributes
    ----------
    datasets
        Path, folder, pattern or URL of each dataset.
    training
        Datasets whose other conditions are trained on.
    contexts
        Keys of the contexts that are named, each with the section that names it.
    rules
        What is held out: section, context (None: all that are used), part and perturbations (None:
        all).
    """

    def __init__(self, origin: str, sections: Sequence[Mapping[Any, Any]]) -> None:
        self.origin = origin
        self.datasets, self.training, zeroshot, fewshot, perturbations = sections
        self.contexts = dict.fromkeys(map(str, zeroshot), "[zeroshot]")
        self.contexts |= dict.fromkeys(map(str, fewshot), "[fewshot]")
        self.rules = list[tuple[str, str | None, str, list[str] | None]]()
        for name, where in self.datasets.items():
            if not isinstance(where, str | os.PathLike):
                raise self.refused("[datasets]", f"{name!r} = {where!r} must be text")
            if "." in name:
                msg = f"the name {name!r} has a dot, which ends a dataset's name in keys; rename it"
                raise self.refused("[datasets]", msg)
        for name, value in self.training.items():
            if value != _PARTS[0]:
                msg = f"{name} = {value!r} must be 'train'; leave the dataset out if it is not"
                raise self.refused("[training]", msg)
        for key, part in zeroshot.items():
            if part not in _PARTS:
                msg = f"{key!r} = {part!r} must be 'val' or 'test'; {_KEYS}"
                raise self.refused("[zeroshot]", msg)
            if key in fewshot:
                msg = f"{key!r} is also in [zeroshot], which holds out all its perturbations; keep "
                raise self.refused("[fewshot]", msg + "one of the two")
            self.rules.append(("[zeroshot]", str(key), part, None))
        self._hold_out("[perturbations]", None, perturbations)
        for key, lists in fewshot.items():
            self._hold_out(f'[fewshot."{key}"]', str(key), lists)

    def _hold_out(self, section: str, context: str | None, lists: Any) -> None:
        """Check the perturbations of "val" and "test", and add their rules."""
        if not isinstance(lists, Mapping):
            raise self.refused(section, f"must have `val` and `test`, but is {lists!r}")
        for part, names in lists.items():
            if part not in _PARTS[1:]:
                msg = f"has {part!r}, but only `val` and `test`; others are trained on, and {_KEYS}"
                raise self.refused(section, msg)
            is_list = isinstance(names, Sequence) and not isinstance(names, str)
            if not is_list or not all(
                isinstance(each, str | int | float | np.generic) for each in names
            ):
                raise self.refused(section, f"{part} = {names!r} must be a list of perturbations")
            self.rules.append((section, context, part, [str(each) for each in names]))

    def refused(self, section: str, what: str) -> ParameterError:
        return ParameterError(f"{self.origin}: {section}: {what}")


def _read(given: str | os.PathLike[str] | Mapping[str, Any]) -> _Stated:
    """Read and check a TOML file, or a mapping like it."""
    if isinstance(given, Mapping):
        origin, content = "held_out", given
    elif isinstance(given, str | os.PathLike):
        path = Path(given).expanduser()
        try:
            origin, content = str(path), tomllib.loads(path.read_text("utf-8"))
        except OSError as error:
            raise PathError(f"{path}: {error.strerror or error}; give a TOML file") from None
        except ValueError as error:
            raise FormatError(f"{path}: is not TOML: {error}; correct it there") from None
    else:
        msg = f"`held_out` must be the path of a TOML file, or a dict, but got {given!r}"  # type: ignore[unreachable]
        raise ParameterError(msg)
    for name, table in content.items():
        if name in _SECTIONS and not isinstance(table, Mapping):
            raise ParameterError(f"{origin}: {name!r} must be a table, but is {table!r}")
        if name not in _SECTIONS and isinstance(table, Mapping):
            raise ParameterError(f"{origin}: {unknown('section', [name], _SECTIONS)}")
    return _Stated(origin, [content.get(name, {}) for name in _SECTIONS])


# Which files a dataset has.


def _files_of(where: str) -> list[Location]:
    """Return the files of a path, folder, URL or pattern, which may have braces: ``{a,b}.h5ad``."""
    braces = re.search(r"\{([^{}]*)\}", where)
    if braces:
        options = [where.replace(braces[0], each.strip(), 1) for each in braces[1].split(",")]
        return [file for each in options for file in _files_of(each)]
    folder = Location.of(where).path
    files = [*map(Location.of, sorted(folder.expanduser().glob("*.h5")))] if folder else []
    try:
        return files + [each.location for each in located([where])]
    except PathError:
        if not files:
            raise
    return files


def _files_of_datasets(stated: _Stated) -> list[tuple[str, Location]]:
    """Return the files of the datasets that are used, each with the name of its dataset."""
    used = {*stated.training, *(key.partition(".")[0] for key in stated.contexts)}
    missing = sorted(used - {*stated.datasets})
    if missing:
        raise stated.refused("[datasets]", unknown("dataset", missing, stated.datasets))
    files = list[tuple[str, Location]]()
    for name in (each for each in stated.datasets if each in used):
        try:
            files += [(name, file) for file in _files_of(os.fspath(stated.datasets[name]))]
        except PathError as error:
            raise PathError(f"{stated.origin}: [datasets]: {name}: {error}") from None
    return files


def perturbation_datasets(toml: str | os.PathLike[str]) -> list[str]:
    """Return the files of the datasets in a TOML file, for `open_collection`.

    These are the datasets in ``[training]``, ``[zeroshot]`` and ``[fewshot]``, as in cell-load.
    Each is a file, a folder, a URL or a pattern, which may have braces: ``"lines/{k562,rpe1}.h5"``.
    A folder has its ``.h5ad`` and ``.h5`` files, and whatever else `open_collection` opens in it.

    Parameters
    ----------
    toml
        The path; for its layout, see `perturbation_split`.

    Raises
    ------
    PathError
        There is no such file, or a dataset has none.
    FormatError
        It is not TOML.
    ParameterError
        A dataset is used, but not in ``[datasets]``.
    """
    return [str(file) for _, file in _files_of_datasets(_read(toml))]


def _datasets_by_file(collection: Any, stated: _Stated) -> pd.Categorical[str]:
    """Return the dataset of each row, by the file that it is in."""
    if not isinstance(collection, Collection):
        msg = (
            f"{stated.origin} has datasets, but `{type(collection).__name__}` has no files; give "
            "the dataset of each row as `dataset`"
        )
        raise ParameterError(msg)
    owners = dict[Any, str]()
    for name, file in _files_of_datasets(stated):
        owner = owners.setdefault(_resolved(file), name)
        if owner != name:
            msg = f"{file} is in {owner!r} and in {name!r}; a file belongs to one"
            raise stated.refused("[datasets]", msg)
    found = [owners.get(_resolved(file), "") for file in collection.locations]
    for file, owner in zip(collection.locations, found, strict=True):
        if not owner:
            msg = (
                f"{file} is in none of the datasets that are used; open "
                "`perturbation_datasets(...)`, or give the dataset of each row as `dataset`"
            )
            raise stated.refused("[datasets]", msg)
    datasets = dict.fromkeys(owners.values())
    for name in datasets:
        if name not in found:
            msg = f"no file of {name!r} is in the collection; open it, too"
            raise stated.refused("[datasets]", msg)
    return pd.Categorical(found, [*datasets]).repeat(collection.cells_per_location)


def _resolved(location: Location) -> Any:
    return location.path.expanduser().resolve() if location.path else location


# Which part each condition belongs to.


def _conditions_of(levels: Mapping[str, Labels]) -> tuple[pd.DataFrame, NDArray[np.integer]]:
    """Return a table of the conditions that occur, and the condition of each row.

    Parameters
    ----------
    levels
        Labels of all rows: datasets (if there are any), cell types and treatments.

    Returns
    -------
    The labels of each condition; and the key of its context and the name of its treatment, as text,
    or None if a label is missing; sorted by the codes of the labels. And the condition of each row.
    """
    sizes = [len(each) for each in levels.values()]
    joint = np.ravel_multi_index([each.codes for each in levels.values()], sizes)
    codes, conditions = pd.factorize(joint, sort=True)
    places = zip(levels.items(), np.unravel_index(conditions, sizes), strict=True)
    table = pd.DataFrame(
        {name: [each.labels[k] for k in place] for (name, each), place in places},
        dtype=object,  # in which None remains None; pandas 3 would infer text
    )
    table[["context", "name"]] = [
        (None, None) if None in labels else (".".join(map(str, labels[:-1])), str(labels[-1]))
        for labels in table.itertuples(index=False, name=None)
    ]
    return table, codes.astype(np.min_scalar_type(max(1, len(table) - 1)))


def _are_used(stated: _Stated, table: pd.DataFrame) -> pd.Series[bool]:
    """Return whether a section names the context or the dataset of each condition."""
    contexts, is_used = table["context"], table["name"].notna()
    if "dataset" in table:
        datasets = table["dataset"].map(str)
        missing = [name for name in stated.training if name not in {*datasets}]
        if missing:
            msg = unknown("dataset", missing, dict.fromkeys(datasets))
            raise stated.refused("[training]", msg)
        is_used &= datasets.isin([*stated.training]) | contexts.isin([*stated.contexts])
    elif stated.training:
        msg = "names datasets, but there are none; give the dataset of each row as `dataset`"
        raise stated.refused("[training]", msg)
    for key, section in stated.contexts.items():
        if key not in {*contexts}:
            msg = unknown("cell type", [key], dict.fromkeys(contexts.dropna()))
            raise stated.refused(section, msg)
    return is_used


def _divide(stated: _Stated, table: pd.DataFrame, controls: Values[str]) -> None:
    """Assign conditions to parts as stated, in the column ``part``; refuse what contradicts."""
    contexts, names, is_used = table["context"], table["name"], _are_used(stated, table)
    is_control = is_used & names.isin([*controls])
    table["part"] = np.select([is_control, is_used], [_CONTROL, _PARTS[0]], _UNUSED)
    for section, context, part, named in stated.rules:
        is_there = is_used & ~is_control & (True if context is None else contexts == context)
        if named is not None:
            known = dict.fromkeys(names[is_there])
            for name in named:
                if name in controls:
                    msg = f"{name!r} is the control, whose cells are in no part; leave it out"
                    raise stated.refused(section, msg)
            missing = [name for name in named if name not in known]
            if missing:
                where = section if context else f"{section} in used cell types"
                raise stated.refused(where, unknown("treatment", missing, known))
            is_there &= names.isin(named)
        for condition in table.index[is_there & ~table["part"].isin([_PARTS[0], part])]:
            msg = (
                f"{table['treatment'][condition]!r} of {contexts[condition]!r} is in "
                f"{table['part'][condition]!r} already and cannot be in {part!r}, since a "
                "condition belongs to one part"
            )
            raise stated.refused(section, msg)
        table.loc[is_there, "part"] = part


# The split.


class PerturbationSplit:
    """The rows of training, validation and test, as `perturbation_split` returns them.

    Three arrays, int64, ascending: ``train, val, test = split``. They have no row in common, and no
    control cells; `controls` returns these. Rows are computed when they are asked for: a split
    holds 1 to 4 bytes for each row.
    """

    def __init__(self, table: pd.DataFrame, codes: NDArray[np.integer]) -> None:
        self._table, self._codes = table, codes

    def _rows(self, is_in: pd.Series[bool]) -> Rows:
        """Return the rows of conditions that a mask selects."""
        return np.flatnonzero(is_in.to_numpy()[self._codes])

    def __iter__(self) -> Iterator[Rows]:
        for part in _PARTS:
            yield self._rows(self._table["part"] == part)

    def controls(self, part: Part = "train") -> Rows:
        """Return the rows of control cells that a part may use, ascending, int64.

        As in cell-load, the controls of a context are in every part that needs them: "train" has
        those of all contexts, also of cell types that are held out; "val" and "test" have those of
        the contexts of which they have conditions.
        """
        require_one_of("part", part, _PARTS)
        parts, contexts = self._table["part"], self._table["context"]
        is_needed = (part == "train") | contexts.isin(contexts[parts == part])
        return self._rows((parts == _CONTROL) & is_needed)

    def report(self) -> pd.DataFrame:
        """Return which conditions are where.

        Returns
        -------
        A data frame with a row for each condition, and the columns ``dataset`` (if there are
        datasets), ``cell_type``, ``treatment``, ``part`` ("train", "val" or "test"; "control"; or
        "unused", for contexts in no section and for cells without a label) and ``n_cells``.
        """
        return self._table.drop(columns=["context", "name"])

    def __repr__(self) -> str:
        cells = self._table.groupby("part")["n_cells"].sum()
        return f"PerturbationSplit({', '.join(f'{part} {n:,}' for part, n in cells.items())} cells)"


def perturbation_split(
    collection: Any,
    held_out: str | os.PathLike[str] | Mapping[str, Any],
    *,
    treatment: str | ArrayLike = "gene",
    control: Any = "non-targeting",
    cell_type: str | ArrayLike = "cell_type",
    dataset: str | ArrayLike | None = None,
) -> PerturbationSplit:
    """Split a perturbation study by conditions: cell lines, perturbations, or pairs of both.

    A condition is a perturbation in a context, and a context is a cell type of a dataset. All cells
    of a condition are in the same part. What assigns a condition to two parts is refused.

    Parameters
    ----------
    collection
        A `Collection`, or another object with ``obs`` or with a length.
    held_out
        What is held out: the path of a TOML file in the layout of cell-load and STATE, or a
        dictionary with the same sections:

        - ``[datasets]``: the file, folder, URL or pattern of each dataset. Without this section and
          without ``dataset``, all cells are of one dataset, which is trained on, and keys below are
          cell types alone.
        - ``[training]``: ``DATASET = "train"`` for each dataset whose conditions are trained on,
          except for those that are held out.
        - ``[zeroshot]``: ``"DATASET.CELL_TYPE" = "test"`` or ``"val"`` holds out all perturbations
          of a cell type.
        - ``[fewshot."DATASET.CELL_TYPE"]``: ``val = [...]`` and ``test = [...]`` hold out these
          perturbations of a cell type, and its others are trained on.
        - ``[perturbations]``: ``val = [...]`` and ``test = [...]`` hold out perturbations in all
          cell types. cell-load does not have this section.

        Settings outside of sections are ignored.
    treatment
        The obs column with the perturbations, or an array with one for each row.
    control
        The perturbation of control cells, or several; like all labels that are named, it is
        compared as text. Controls are in no part; see `PerturbationSplit.controls`.
    cell_type
        The obs column with the cell types, or an array.
    dataset
        The obs column with the datasets, or an array, in place of the files of ``[datasets]``.

    Returns
    -------
    Rows, ``train, val, test = perturbation_split(...)``; the split also returns control cells and
    reports which conditions are where. Cells without a label are in no part.

    Raises
    ------
    ParameterError
        A condition would be in two parts; a dataset, cell type or perturbation does not occur; or a
        section is not of this layout.
    ColumnError
        obs has no such column.
    PathError, FormatError
        There is no such TOML file or dataset, or it is not TOML.

    Examples
    --------
    >>> import pandas as pd
    >>> obs = pd.DataFrame({
    ...     "cell_type": ["k562"] * 6 + ["rpe1"] * 6 + ["jurkat"] * 2,
    ...     "gene": ["AARS", "NUP107", "non-targeting"] * 4 + ["AARS", "non-targeting"],
    ... })
    >>> held_out = {"zeroshot": {"jurkat": "test"}, "fewshot": {"rpe1": {"val": ["AARS"]}}}
    >>> split = perturbation_split(
    ...     len(obs), held_out, treatment=obs["gene"], cell_type=obs["cell_type"]
    ... )
    >>> train, val, test = split
    >>> train.tolist(), val.tolist(), test.tolist()
    ([0, 1, 3, 4, 7, 10], [6, 9], [12])
    >>> split.controls("val").tolist()
    [8, 11]
    """
    stated = _read(held_out)
    n_rows = count_divided(collection)
    of_rows: dict[str, Any] = {"cell_type": cell_type, "treatment": treatment}
    if dataset is None and stated.datasets:
        dataset = _datasets_by_file(collection, stated)
    if dataset is not None:
        of_rows = {"dataset": dataset, **of_rows}
    levels = {
        name: labels_of(collection, labels, name, slice(None), n_rows)
        for name, labels in of_rows.items()
    }
    table, codes = _conditions_of(levels)
    treatments = levels["treatment"]
    names = [str(each) for each in treatments.labels if each is not None]
    controls = [str(each) for each in named_values(control)]
    missing = [each for each in controls if each not in names]
    if missing or not controls:
        msg = unknown("treatment", missing or [""], names)
        raise ParameterError(f"`control`: {treatments.name} has {msg}")
    _divide(stated, table, controls)
    table["n_cells"] = np.bincount(codes, minlength=len(table))
    return PerturbationSplit(table, codes)
