"""Splits of perturbation studies: cell lines and perturbations held out for validation and test.

The layout of the TOML file is the one of cell-load, which reads it for STATE
(https://github.com/ArcInstitute/cell-load, "TOML Configuration Format").
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.bytes import Location
from cellfeed.collection import (
    Collection,
    Labels,
    Rows,
    as_weights,
    count_divided,
    labels_of,
    located,
    sizes_of_parts,
)
from cellfeed.extending import FormatError, ParameterError, PathError, pd, require_seed
from cellfeed.sampling import derive_key, factorized, named_values, random_words

__all__ = ["PerturbationSplit", "perturbation_datasets", "perturbation_split"]

Part = Literal["train", "val", "test"]
_PARTS: tuple[str, ...] = get_args(Part)
_TRAIN, _VAL, _TEST, _CONTROL, _UNUSED = range(5)
_NAMES = np.array([*_PARTS, "control", "unused"], object)
_HELD_OUT = _PARTS[1:]

_SECTIONS = ("datasets", "training", "zeroshot", "fewshot", "perturbations")
_MOST_NAMED = 10


# What is held out, as stated: sections of a TOML file, or of a mapping like it.


@dataclass(frozen=True, slots=True)
class _Stated:
    """The sections of a TOML file, each checked by itself.

    Parameters
    ----------
    origin
        What messages begin with: the path, or the name of the parameter.
    datasets
        Path, folder, pattern or URL of each dataset.
    training
        Datasets whose other conditions are trained on; None if there is no such section.
    zeroshot
        Part of each context, by key.
    fewshot
        Perturbations, or their share, of "val" and "test", by the key of the context.
    perturbations
        Perturbations of "val" and "test" in all contexts.
    """

    origin: str
    datasets: Mapping[str, str]
    training: Sequence[str] | None
    zeroshot: Mapping[Any, str]
    fewshot: Mapping[Any, Mapping[str, Any]]
    perturbations: Mapping[str, Sequence[Any]]

    def refused(self, section: str, what: str) -> ParameterError:
        return ParameterError(f"{self.origin}: {section}: {what}")

    def used_datasets(self) -> set[str]:
        """Return the names in ``training``, ``zeroshot`` and ``fewshot``."""
        of_keys = (str(key).partition(".")[0] for key in (*self.zeroshot, *self.fewshot))
        return {*(self.training or ()), *of_keys}


def _read(given: str | os.PathLike[str] | Mapping[str, Any]) -> _Stated:
    """Read and check the sections of a TOML file, or of a mapping like it."""
    if isinstance(given, Mapping):
        return _checked("held_out", given)
    if not isinstance(given, str | os.PathLike):
        msg = f"`held_out` must be the path of a TOML file, or a dict, but got {given!r}"  # type: ignore[unreachable]
        raise ParameterError(msg)
    path = Path(given).expanduser()
    try:
        with path.open("rb") as file:
            return _checked(str(path), tomllib.load(file))
    except OSError as error:
        raise PathError(f"{path}: {error.strerror or error}; give a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: is not TOML: {error}; correct it there") from None


def _checked(origin: str, given: Mapping[str, Any]) -> _Stated:
    tables = {name: value for name, value in given.items() if isinstance(value, Mapping)}
    for name in _SECTIONS:
        if name in given and name not in tables:
            msg = f"{origin}: {name!r} must be a table, but is {given[name]!r}"
            raise ParameterError(msg)
    unknown = [name for name in tables if name not in _SECTIONS]
    if unknown:
        raise ParameterError(f"{origin}: {_unknown('section', unknown[:1], _SECTIONS)}")
    sections = [tables.get(name, {}) for name in _SECTIONS]
    datasets, training, zeroshot, fewshot, perturbations = sections
    stated = _Stated(
        origin,
        {name: os.fspath(where) for name, where in _texts(origin, "[datasets]", datasets)},
        [*training] if "training" in tables else None,
        dict(_texts(origin, "[zeroshot]", zeroshot)),
        fewshot,
        perturbations,
    )
    for name, value in training.items():
        if value != "train":
            msg = f"{name} = {value!r} must be 'train'; leave the dataset out if it is not"
            raise stated.refused("[training]", msg)
    _check_keys(stated)
    _check_lists(stated, "[perturbations]", perturbations, may_be_shares=False)
    return stated


def _check_keys(stated: _Stated) -> None:
    """Check the names of datasets, and what is said of each context."""
    dotted = next((name for name in stated.datasets if "." in name), None)
    if dotted is not None:
        msg = f"the name {dotted!r} has a dot, which ends a dataset's name in keys; rename it"
        raise stated.refused("[datasets]", msg)
    for key, part in stated.zeroshot.items():
        if part not in _PARTS:
            raise stated.refused("[zeroshot]", f"{key!r} = {part!r} must be 'val' or 'test'")
        if key in stated.fewshot:
            msg = (
                f"{key!r} is also in [zeroshot], which holds out all its perturbations; keep one "
                "of the two"
            )
            raise stated.refused("[fewshot]", msg)
    for key, lists in stated.fewshot.items():
        _check_lists(stated, f'[fewshot."{key}"]', lists, may_be_shares=True)


def _texts(origin: str, section: str, table: Mapping[Any, Any]) -> Iterator[tuple[Any, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            msg = f'put "{key}.{next(iter(value), "...")}" in quotes, since it is one key'
            raise ParameterError(f"{origin}: {section}: {msg}")
        if not isinstance(value, str | os.PathLike):
            raise ParameterError(f"{origin}: {section}: {key!r} = {value!r} must be text")
        yield key, os.fspath(value)


def _check_lists(stated: _Stated, section: str, lists: Any, *, may_be_shares: bool) -> None:
    """Check the perturbations of "val" and "test": two lists of names, or two shares."""
    if not isinstance(lists, Mapping):
        raise stated.refused(section, f"must have `val` and `test`, but is {lists!r}")
    unknown = [name for name in lists if name not in _HELD_OUT]
    if unknown and isinstance(lists[unknown[0]], Mapping):
        msg = f'put the name in quotes, as in [fewshot."DATASET.{unknown[0]}"], since it is one key'
        raise stated.refused(section, msg)
    if unknown:
        msg = f"has {unknown[0]!r}, but only `val` and `test`; other perturbations are trained on"
        raise stated.refused(section, msg)
    shares = [each for each in lists.values() if isinstance(each, float | int)]
    shares = [each for each in shares if not isinstance(each, bool)]
    if may_be_shares and shares and len(shares) == len(lists):
        if not (min(shares) > 0 and sum(shares) <= 1):
            msg = f"the shares {shares} must be above 0, and sum to 1 at most"
            raise stated.refused(section, msg)
        return
    for part, names in lists.items():
        is_list = isinstance(names, Sequence) and not isinstance(names, str)
        if not is_list or not all(
            isinstance(each, str | int | float | np.generic) for each in names
        ):
            raise stated.refused(section, f"{part} = {names!r} must be a list of perturbations")
    twice = [each for each in lists.get("val", ()) if each in set(lists.get("test", ()))]
    if twice:
        msg = (
            f"{_listed(twice)} is in `val` and in `test`, but a condition belongs to one part; "
            "remove it from one of them"
        )
        raise stated.refused(section, msg)


def _listed(names: Sequence[str]) -> str:
    """Return quoted names, the first of which are written out."""
    shown = ", ".join(map(repr, names[:_MOST_NAMED]))
    n_others = len(names) - _MOST_NAMED
    return f"{shown} and {n_others:,} others" if n_others > 0 else shown


def _unknown(kind: str, names: Sequence[str], known: Iterable[str]) -> str:
    """Say that there are no such names, and which are near to the first."""
    among = [*known]
    lower = {each.casefold(): each for each in reversed(among)}
    near = difflib.get_close_matches(names[0].casefold(), lower, n=3)
    remedy = f"near: {_listed([lower[each] for each in near])}"
    if not near:
        remedy = f"there are: {_listed(among)}" if among else "there are none"
    return f"no {kind} {_listed(names)}; {remedy}"


# Which files a dataset has.


def _files_of(where: str) -> list[Location]:
    """Return the files of a path, folder, URL or pattern, which may have braces: ``{a,b}.h5ad``."""
    braces = re.search(r"\{([^{}]*)\}", where)
    if braces:
        before, after = where[: braces.start()], where[braces.end() :]
        options = [before + each.strip() + after for each in braces[1].split(",")]
        return [file for each in options for file in _files_of(each)]
    folder = Location.of(where).path
    single = [] if folder is None else sorted(folder.expanduser().glob("*.h5"))
    try:
        return [Location.of(path) for path in single] + [each.location for each in located([where])]
    except PathError:
        if not single:
            raise
    return [Location.of(path) for path in single]


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
    stated = _read(toml)
    return [str(file) for files in _files_of_datasets(stated).values() for file in files]


def _files_of_datasets(stated: _Stated) -> dict[str, list[Location]]:
    """Return the files of each dataset that is used."""
    used = stated.used_datasets()
    missing = sorted(used - {*stated.datasets})
    if missing:
        msg = _unknown("dataset", missing, stated.datasets)
        raise ParameterError(f"{stated.origin}: [datasets]: {msg}")
    found = dict[str, list[Location]]()
    for name in (each for each in stated.datasets if each in used):
        try:
            found[name] = _files_of(stated.datasets[name])
        except PathError as error:
            msg = f"{stated.origin}: [datasets]: {name}: {error}"
            raise PathError(msg) from None
    return found


def _datasets_by_file(collection: Any, stated: _Stated) -> Labels:
    """Return the dataset of each row, by the file that it is in."""
    if not isinstance(collection, Collection):
        msg = (
            f"{stated.origin} has datasets, but `{type(collection).__name__}` has no files; give "
            "the dataset of each row as `dataset`"
        )
        raise ParameterError(msg)
    files = _files_of_datasets(stated)
    names = [*files]
    owners = dict[Any, int]()
    for code, name in enumerate(names):
        for file in files[name]:
            owner = owners.setdefault(_resolved(file), code)
            if owner != code:
                msg = f"{file} is in {names[owner]!r} and in {name!r}; a file belongs to one"
                raise stated.refused("[datasets]", msg)
    of_files = [owners.get(_resolved(each), -1) for each in collection.locations]
    if -1 in of_files:
        file = collection.locations[of_files.index(-1)]
        msg = (
            f"{file} is in none of the datasets that are used; open "
            "`perturbation_datasets(...)`, or give the dataset of each row as `dataset`"
        )
        raise stated.refused("[datasets]", msg)
    absent = sorted({*range(len(names))} - {*of_files})
    if absent:
        msg = f"no file of {names[absent[0]]!r} is in the collection; open it, too"
        raise stated.refused("[datasets]", msg)
    n_cells = collection.cells_per_location
    codes = np.repeat(np.array(of_files, np.min_scalar_type(len(names))), n_cells)
    counts = np.bincount(of_files, weights=n_cells, minlength=len(names)).astype(np.int64)
    return Labels("dataset", codes, tuple(names), counts)


def _resolved(location: Location) -> Any:
    return location.path.expanduser().resolve() if location.path else location


# Which part each condition belongs to.


class _Conditions:
    """The pairs of context and treatment that occur, sorted by context and treatment.

    A context is a cell type of a dataset.

    Parameters
    ----------
    datasets, cell_types, treatments
        Labels of all rows; no datasets if there is only one, without a name.
    """

    def __init__(
        self, datasets: Labels | None, cell_types: Labels, treatments: Labels, controls: list[int]
    ) -> None:
        self.datasets, self.cell_types, self.treatments = datasets, cell_types, treatments
        contexts, self.context_labels = _joined(datasets, cell_types)
        n = len(treatments)
        codes, found = factorized(contexts.astype(np.int64) * n + treatments.codes)
        joint = np.array(found, np.int64)
        order = np.argsort(joint)
        ranks = np.empty(order.size, np.min_scalar_type(max(1, order.size - 1)))
        ranks[order] = np.arange(order.size)
        self.codes: NDArray[np.unsignedinteger] = ranks[codes]  # of each row
        self.contexts, self.treatment_codes = np.divmod(joint[order], n)
        self.counts = np.bincount(self.codes, minlength=order.size).astype(np.int64)
        self.starts = np.searchsorted(self.contexts, np.arange(len(self.context_labels) + 1))
        self.is_control = np.isin(self.treatment_codes, controls)
        of_context = np.array([None in each for each in self.context_labels])
        of_treatment = np.array([each is None for each in treatments.labels])
        self.is_missing = of_context[self.contexts] | of_treatment[self.treatment_codes]
        self.is_perturbed = ~self.is_control & ~self.is_missing

    def of(self, context: int) -> NDArray[np.intp]:
        """Return the conditions of a context with a treatment."""
        places = np.arange(self.starts[context], self.starts[context + 1])
        perturbed: NDArray[np.intp] = places[self.is_perturbed[places]]
        return perturbed

    def shown(self, condition: int) -> str:
        context = ".".join(map(str, self.context_labels[self.contexts[condition]]))
        return f"{self.treatments.labels[self.treatment_codes[condition]]!r} of {context!r}"


def _joined(
    datasets: Labels | None, cell_types: Labels
) -> tuple[NDArray[np.integer], list[tuple[Any, ...]]]:
    """Return a code for each row's context, and the contexts, sorted by both codes."""
    if datasets is None:
        return cell_types.codes, [(each,) for each in cell_types.labels]
    n = len(cell_types)
    codes, found = factorized(datasets.codes.astype(np.int64) * n + cell_types.codes)
    order = np.argsort(found)
    ranks = np.empty(order.size, np.int64)
    ranks[order] = np.arange(order.size)
    pairs = (divmod(found[place], n) for place in order.tolist())
    return ranks[codes], [(datasets.labels[i], cell_types.labels[j]) for i, j in pairs]


def _written(named: Any, labels: Sequence[Any]) -> str:
    """Return how the label that equals a value is written; text names what is written so."""
    if isinstance(named, str):
        return named
    return str(next((each for each in labels if each is not None and each == named), named))


def _codes_by_name(labels: Labels) -> dict[str, int]:
    """Return the code of each label that is not missing, by how it is written."""
    named = dict[str, int]()
    for code, label in enumerate(labels.labels):
        if label is not None and named.setdefault(str(label), code) != code:
            msg = f"{labels.name}: two labels are written {str(label)!r}; give them other names"
            raise ParameterError(msg)
    return named


class _Division:
    """Assigns conditions to parts as stated, and refuses what contradicts.

    What names a condition itself (exact) precedes what names a perturbation that it combines with
    others (combined: bit p is set for part p); everything else is trained on if its context is
    used.
    """

    def __init__(
        self, conditions: _Conditions, stated: _Stated, controls: list[str], separator: str | None
    ) -> None:
        self._conditions, self._stated = conditions, stated
        self._controls, self._separator = controls, separator
        n = conditions.counts.size
        self._exact = np.full(n, -1, np.int8)
        self._combined = np.zeros(n, np.int8)
        self._codes = _codes_by_name(conditions.treatments)
        self._contexts = {
            tuple(map(str, each)): k
            for k, each in enumerate(conditions.context_labels)
            if None not in each
        }
        self._parts_of = dict[int, frozenset[str]]()  # of combinations, by code
        if separator is not None:
            self._parts_of = {
                code: frozenset(name.split(separator)) - {*controls}
                for name, code in self._codes.items()
                if name not in controls
            }

    def parts(self, seed: int | None) -> NDArray[np.int8]:
        """Return the part of each condition."""
        stated, conditions = self._stated, self._conditions
        zeroshot = {self._context(key, "[zeroshot]"): part for key, part in stated.zeroshot.items()}
        fewshot = {self._context(key, "[fewshot]"): key for key in stated.fewshot}
        trained = self._trained_contexts()
        used = np.zeros(len(conditions.context_labels), bool)
        used[np.array([*trained, *zeroshot, *fewshot], np.intp)] = True
        for context, part in zeroshot.items():
            if part != "train":
                self._claim(conditions.of(context), part, "[zeroshot]")
        for part, names in stated.perturbations.items():
            there = np.flatnonzero(used[conditions.contexts] & conditions.is_perturbed)
            self._claim_names(there, part, names, "[perturbations]", "used cell types")
        for context, key in fewshot.items():
            lists, section = stated.fewshot[key], f'[fewshot."{key}"]'
            if lists and not isinstance(next(iter(lists.values())), Sequence):
                self._claim_shares(context, lists, seed, section)
                continue
            for part, names in lists.items():
                self._claim_names(conditions.of(context), part, names, section, repr(key))
        is_open = self._exact < 0
        both = np.flatnonzero(is_open & (self._combined == (1 << _VAL | 1 << _TEST)))
        if both.size:
            msg = (
                f"{stated.origin}: {conditions.shown(both[0])} combines perturbations of 'val' and "
                "of 'test', but a condition belongs to one part; name the combination in one"
            )
            raise ParameterError(msg)
        parts = np.where(is_open, np.log2(np.maximum(self._combined, 1)), self._exact)
        parts = parts.astype(np.int8)
        parts[conditions.is_control] = _CONTROL
        parts[~used[conditions.contexts] | conditions.is_missing] = _UNUSED
        return parts

    def _context(self, key: Any, section: str) -> int:
        """Return the context of a key: a cell type, after its dataset if there are datasets."""
        conditions, stated = self._conditions, self._stated
        wanted: tuple[str, ...] = (_written(key, conditions.cell_types.labels),)
        if conditions.datasets is not None:
            dataset, dot, cell_type = str(key).partition(".")
            if not dot:
                msg = f'{key!r} has no cell type; write "{key}.CELL_TYPE", in quotes'
                raise stated.refused(section, msg)
            self._require_dataset(dataset, section)
            wanted = (dataset, cell_type)
        if wanted in self._contexts:
            return self._contexts[wanted]
        there = [each[-1] for each in self._contexts if each[:-1] == wanted[:-1]]
        kind = "cell type" if len(wanted) == 1 else f"cell type of {wanted[0]}:"
        raise stated.refused(section, _unknown(kind, wanted[-1:], there))

    def _require_dataset(self, name: str, section: str) -> None:
        labels = self._conditions.datasets
        known = [] if labels is None else [str(each) for each in labels.labels]
        if name not in known:
            raise self._stated.refused(section, _unknown("dataset", [name], known))

    def _trained_contexts(self) -> list[int]:
        conditions, training = self._conditions, self._stated.training
        if conditions.datasets is None:
            if training is not None:
                msg = "names datasets, but there are none; give the dataset of each row as "
                raise self._stated.refused("[training]", msg + "`dataset`")
            return [*range(len(conditions.context_labels))]
        for name in training or ():
            self._require_dataset(name, "[training]")
        wanted = {*(training or ())}
        return [k for k, each in enumerate(conditions.context_labels) if str(each[0]) in wanted]

    def _claim(self, there: NDArray[np.intp], part: str, section: str) -> None:
        """Assign conditions that are named themselves."""
        claimed = self._exact[there]
        other = np.flatnonzero((claimed >= 0) & (claimed != _PARTS.index(part)))
        if other.size:
            found = _PARTS[claimed[other[0]]]
            msg = (
                f"{self._conditions.shown(there[other[0]])} is in {found!r} already and cannot be "
                f"in {part!r}, since a condition belongs to one part"
            )
            raise self._stated.refused(section, msg)
        self._exact[there] = _PARTS.index(part)

    def _claim_names(
        self, there: NDArray[np.intp], part: str, named: Sequence[Any], section: str, where: str
    ) -> None:
        """Assign the conditions with these perturbations, among those of some contexts."""
        names = [_written(each, self._conditions.treatments.labels) for each in named]
        control = [name for name in names if name in self._controls]
        if control:
            msg = f"{control[0]!r} is the control, whose cells are in no part; leave it out"
            raise self._stated.refused(section, msg)
        codes = self._conditions.treatment_codes[there]
        exact = [self._codes[name] for name in names if name in self._codes]
        self._claim(there[np.isin(codes, exact)], part, section)
        present = {*codes.tolist()}
        missing = [name for name in names if self._codes.get(name, -1) not in present]
        if self._separator is not None:
            wanted = {each: {*each.split(self._separator)} - {*self._controls} for each in names}
            combined = {
                name: [code for code in present if parts and self._parts_of[code] >= parts]
                for name, parts in wanted.items()
            }
            of_any = [code for found in combined.values() for code in found]
            self._combined[there[np.isin(codes, of_any)]] |= 1 << _PARTS.index(part)
            missing = [name for name in missing if not combined[name]]
        if missing:
            labels = self._conditions.treatments.labels
            known = [str(labels[code]) for code in sorted(present)]
            raise self._stated.refused(section, f"{where}: {_unknown('treatment', missing, known)}")

    def _claim_shares(
        self, context: int, shares: Mapping[str, float], seed: int | None, section: str
    ) -> None:
        """Draw perturbations of a context at random, among those that nothing else holds out."""
        if self._separator is not None:
            msg = "shares are drawn among conditions, not combinations; give lists, or leave out"
            raise self._stated.refused(section, f"{msg} `separator`")
        if seed is None:
            msg = f"shares such as {next(iter(shares.values()))} are drawn at random; give `seed`"
            raise self._stated.refused(section, msg)
        conditions = self._conditions
        there = conditions.of(context)
        there = there[self._exact[there] < 0]
        names = [str(conditions.treatments.labels[k]) for k in conditions.treatment_codes[there]]
        there = there[np.argsort(np.array(names, object), kind="stable")]
        given = [*shares.values()]
        rest = 1 - sum(given)
        weights = as_weights([*given, rest] if rest > 1e-9 else given)  # noqa: PLR2004 - rounding
        sizes = sizes_of_parts(there.size, weights, None)
        written = ".".join(map(str, conditions.context_labels[context]))
        digest = hashlib.blake2b(written.encode(), digest_size=8).digest()
        key = derive_key(require_seed(seed), int.from_bytes(digest, "little"))
        drawn = there[np.argsort(random_words(key, np.arange(there.size)))]
        for part, stop, size in zip(shares, np.cumsum(sizes), sizes, strict=False):
            if not size:
                msg = f"{part} = {shares[part]} is none of {there.size:,} perturbations; give more"
                raise self._stated.refused(section, msg)
            self._claim(drawn[stop - size : stop], part, section)


# The split.


class PerturbationSplit(Sequence[Rows]):
    """The rows of training, validation and test, as `perturbation_split` returns them.

    This is a sequence of three arrays, int64, ascending: ``train, val, test = split``. They have no
    row in common, and no control cells; `controls` returns these. Rows are computed when accessed:
    a split holds 1 to 4 bytes for each row.
    """

    def __init__(self, conditions: _Conditions, parts: NDArray[np.int8]) -> None:
        self._conditions, self._parts = conditions, parts

    def _rows(self, is_in: NDArray[np.bool_]) -> Rows:
        """Return the rows of conditions that a mask selects."""
        return np.flatnonzero(is_in[self._conditions.codes])

    def __len__(self) -> int:
        return len(_PARTS)

    @overload
    def __getitem__(self, part: int, /) -> Rows: ...

    @overload
    def __getitem__(self, part: slice, /) -> list[Rows]: ...

    def __getitem__(self, part: int | slice, /) -> Rows | list[Rows]:
        if isinstance(part, slice):
            return [self[each] for each in range(len(self))[part]]
        return self._rows(self._parts == range(len(self))[part])

    @property
    def train(self) -> Rows:
        """Rows of perturbed cells to train on."""
        return self[_TRAIN]

    @property
    def val(self) -> Rows:
        """Rows of perturbed cells to validate on."""
        return self[_VAL]

    @property
    def test(self) -> Rows:
        """Rows of perturbed cells to test on."""
        return self[_TEST]

    def _of_part(self, part: Part) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks of the perturbed and the control conditions of a part."""
        if part not in _PARTS:
            raise ParameterError(f"`part` must be one of {', '.join(_PARTS)}, but got {part!r}")
        is_perturbed, is_control = self._parts == _PARTS.index(part), self._parts == _CONTROL
        if part != "train":
            contexts = self._conditions.contexts
            is_control &= np.isin(contexts, contexts[is_perturbed])
        return is_perturbed, is_control

    def controls(self, part: Part = "train") -> Rows:
        """Return the rows of control cells that a part may use, ascending, int64.

        As in cell-load, the controls of a context are in every part that needs them: "train" has
        those of all contexts, also of cell types that are held out; "val" and "test" have those of
        the contexts of which they have conditions.
        """
        return self._rows(self._of_part(part)[1])

    def with_controls(self, part: Part) -> Rows:
        """Return the rows of a part and of its `controls`, ascending, int64.

        These are the cells of cell-load's ``should_yield_control_cells=True``.
        """
        is_perturbed, is_control = self._of_part(part)
        return self._rows(is_perturbed | is_control)

    def report(self) -> pd.DataFrame:
        """Return which conditions are where.

        Returns
        -------
        A data frame with a row for each condition, and the columns ``dataset`` (if there are
        datasets), ``cell_type``, ``treatment``, ``part`` ("train", "val" or "test"; "control"; or
        "unused", for contexts in no section and for cells without a label) and ``n_cells``.
        """
        conditions = self._conditions
        table = self._contexts().iloc[conditions.contexts].reset_index(drop=True)
        labels = pd.Series([*conditions.treatments.labels], dtype=object)
        table["treatment"] = labels.iloc[conditions.treatment_codes].to_numpy()
        table["part"] = _NAMES[self._parts]
        table["n_cells"] = conditions.counts
        return table

    def describe(self) -> pd.DataFrame:
        """Return how many conditions of each context are in each part.

        Returns
        -------
        A data frame with a row for each context, and the columns ``dataset`` (if there are
        datasets), ``cell_type``, the number of conditions in ``train``, ``val`` and ``test``, and
        the numbers of cells ``n_perturbed``, ``n_controls`` and ``n_unused``.
        """
        conditions, table = self._conditions, self._contexts()
        n = len(table)

        def sums(is_in: NDArray[np.bool_], weights: NDArray[np.int64] | None) -> Any:
            own = None if weights is None else weights[is_in]
            return np.bincount(conditions.contexts[is_in], own, n).astype(np.int64)

        for part, name in enumerate(_PARTS):
            table[name] = sums(self._parts == part, None)
        table["n_perturbed"] = sums(self._parts < _CONTROL, conditions.counts)
        table["n_controls"] = sums(self._parts == _CONTROL, conditions.counts)
        table["n_unused"] = sums(self._parts == _UNUSED, conditions.counts)
        return table

    def _contexts(self) -> pd.DataFrame:
        names = ["dataset", "cell_type"] if self._conditions.datasets else ["cell_type"]
        rows = [list(each) for each in self._conditions.context_labels]
        return pd.DataFrame(rows, columns=names, dtype=object)

    def __repr__(self) -> str:
        counts = np.bincount(self._parts, self._conditions.counts, len(_NAMES)).astype(np.int64)
        n_conditions = np.bincount(self._parts, minlength=len(_NAMES))
        said = [
            f"{name} {n_cells:,} cells of {n:,} condition{'' if n == 1 else 's'}"
            for name, n_cells, n in zip(_PARTS, counts, n_conditions, strict=False)
        ]
        said.append(f"{counts[_CONTROL]:,} controls")
        if counts[_UNUSED]:
            said.append(f"{counts[_UNUSED]:,} unused cells")
        return f"PerturbationSplit({', '.join(said)})"


def perturbation_split(
    collection: Any,
    held_out: str | os.PathLike[str] | Mapping[str, Any],
    *,
    treatment: str | ArrayLike = "gene",
    control: Any = "non-targeting",
    cell_type: str | ArrayLike = "cell_type",
    dataset: str | ArrayLike | None = None,
    separator: str | None = None,
    seed: int | None = None,
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
          perturbations of a cell type, and its others are trained on. With numbers in place of the
          lists, such shares of the perturbations are drawn at random.
        - ``[perturbations]``: ``val = [...]`` and ``test = [...]`` hold out perturbations in all
          cell types. cell-load does not have this section.

        Settings outside of sections are ignored.
    treatment
        The obs column with the perturbations, or an array with one for each row.
    control
        The perturbation of control cells, or several; like all labels that are named, a number or
        boolean names the label that equals it, and text the one that is written so. Controls are in
        no part; see `PerturbationSplit.controls`.
    cell_type
        The obs column with the cell types, or an array.
    dataset
        The obs column with the datasets, or an array, in place of the files of ``[datasets]``.
    separator
        What separates the names of a combination, such as "+" in "AARS+NUP107". Then all
        combinations with a held-out perturbation are held out with it, unless they are named
        themselves. Controls within a combination do not count ("AARS+ctrl").
    seed
        For shares; the same seed draws the same perturbations of a cell type, whatever other cell
        types there are.

    Returns
    -------
    A sequence of rows, ``train, val, test = perturbation_split(...)``, which also returns control
    cells and reports which conditions are where. Cells without a label are in no part.

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
    >>> split.describe()
      cell_type  train  val  test  n_perturbed  n_controls  n_unused
    0      k562      2    0     0            4           2         0
    1      rpe1      1    1     0            4           2         0
    2    jurkat      0    0     1            1           1         0
    """
    stated = _read(held_out)
    n_rows = count_divided(collection)
    every = slice(None)
    cell_types = labels_of(collection, cell_type, "cell_type", every, n_rows)
    treatments = labels_of(collection, treatment, "treatment", every, n_rows)
    datasets = None
    if dataset is not None:
        datasets = labels_of(collection, dataset, "dataset", every, n_rows)
    elif stated.datasets:
        datasets = _datasets_by_file(collection, stated)
    controls = [_written(each, treatments.labels) for each in named_values(control)]
    codes = _codes_by_name(treatments)
    unknown = [each for each in controls if each not in codes]
    if unknown or not controls:
        msg = _unknown("treatment", unknown or [""], codes)
        raise ParameterError(f"`control`: {treatments.name} has {msg}")
    conditions = _Conditions(datasets, cell_types, treatments, [codes[each] for each in controls])
    division = _Division(conditions, stated, controls, separator)
    return PerturbationSplit(conditions, division.parts(seed))
