"""Joining the elements of the sources of a collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._errors import (
    FormatError,
    MismatchError,
    ParameterError,
    require_list,
    require_one_of,
)
from cellfeed._lazy import pd
from cellfeed.bytes import Location, cancellable_threads
from cellfeed.bytes._remote import outside_lock
from cellfeed.bytes._tables import save_records
from cellfeed.fetch import prefetched
from cellfeed.rows import ColumnMap, ColumnNames, Element, column_maps
from cellfeed.sources import Source, StoredElement

# Reading from many files, concurrently if they are on servers.

_AT_ONCE = 16


_Read = TypeVar("_Read")


def side_by_side(read: Callable[[Any], _Read], items: Sequence[Any]) -> Iterator[_Read]:
    """Iterate over ``read(item)``; an error is raised in place of its result.

    Parameters
    ----------
    read
        Reads from an item. It must be repeatable, since it is called again if it needs pages from
        a server.
    items
        Items with a location. Local ones are read one after another.
    """
    # One after another in this thread, which Ctrl-C interrupts.
    if len(items) == 1 or not any(item.location.is_remote for item in items):
        yield from (outside_lock(partial(read, item)) for item in items)
        return
    with cancellable_threads(_AT_ONCE, "cellfeed-open") as threads:
        yield from prefetched(
            lambda item: outside_lock(partial(read, item)), items, threads, _AT_ONCE
        )


# Joining the genes of the sources of a collection.

JoinVars = Literal["same", "inner", "outer"]

_SHOWN = 5

Names = NDArray[np.object_]
Places = NDArray[np.int64]
_Part = tuple[Location, "pd.Index[str]"]


class Genes:
    """Which genes a collection has.

    Parameters
    ----------
    join_vars
        "same": all files have the same genes; "inner": the genes that every file has; "outer": the
        genes that any file has.
    names
        Names of the genes, in this order, in place of a join; every file must have them. Or a
        mask, with a boolean for each gene of the first file: it applies by position, to this file
        and to those with the same genes in the same order. A mask that is a Series whose index is
        neither numbers from 0 nor the genes of the first file names genes instead.
    of_first
        Whether the genes are those of the first file in any case. ``join_vars`` then says which
        others a file may have: "inner": more, which are left out; "outer": more or fewer.

    Raises
    ------
    ParameterError
        ``join_vars`` is something else, ``names`` is not a list of distinct names, or both are
        given.
    """

    def __init__(
        self,
        join_vars: JoinVars = "same",
        names: Sequence[str] | pd.Series[bool] | NDArray[np.bool_] | None = None,
        *,
        of_first: bool = False,
    ) -> None:
        require_one_of("join_vars", join_vars, get_args(JoinVars))
        if names is not None:
            if join_vars != "same":
                msg = (
                    f"`genes` and `join_vars` cannot be combined; leave out join_vars={join_vars!r}"
                )
                raise ParameterError(msg)
            require_list("genes", "names or booleans", names)
            n_missing = int(pd.isna(np.asarray(names, object)).sum())
            if n_missing:
                msg = f"`genes` has {n_missing:,} missing values; leave them out, or write False"
                raise ParameterError(msg)
        self.join_vars, self.of_first = join_vars, of_first
        self.mask: NDArray[np.bool_] | None = None
        self._labels = self._names = None
        if names is None:
            return
        given = np.asarray(names, object)
        if given.size and all(isinstance(each, bool | np.bool_) for each in given.tolist()):
            self.mask = given.astype(bool)
            labels = getattr(names, "index", None)
            numbers = pd.RangeIndex(given.size)  # of a Series without names; a list has a method
            if not (labels is None or callable(labels) or numbers.equals(labels)):
                self._labels = np.array([*map(str, labels)], object)
        else:
            self._names = _distinct([*map(str, names)])

    @property
    def are_chosen(self) -> bool:
        """Whether genes are given, in place of a join."""
        return self._names is not None or self.mask is not None

    def of_file(self, first: Location, names: Names) -> tuple[Names | None, Places | None]:
        """Return the chosen genes, and their positions if these choose them.

        Parameters
        ----------
        first, names
            The first file, and its genes.

        Raises
        ------
        ParameterError
            The mask does not have a boolean for each of them, or chooses none.
        """
        if self.mask is None:
            return self._names, None
        if self._labels is not None and not np.array_equal(self._labels, names):
            return _distinct(self._labels[self.mask].tolist()), None
        if self.mask.shape != names.shape:
            msg = (
                f"{first}: has {names.size:,} genes, but `genes` is a mask of shape "
                f"{self.mask.shape}; give names, or booleans in a pandas Series indexed by names"
            )
            raise ParameterError(msg)
        if not self.mask.any():
            raise ParameterError("`genes` is empty; give each gene once, and at least one")
        return names[self.mask], np.flatnonzero(self.mask)

    def rows_of(self, table: pd.DataFrame, names: Names | pd.Index[str]) -> pd.DataFrame | None:
        """Return the rows of a file's table of genes that these are by position, if they are."""
        if np.array_equal(table.index, names):
            return table
        if self.mask is None or self.mask.size != len(table):
            return None
        chosen = table[self.mask]
        return chosen if np.array_equal(chosen.index, names) else None


def _distinct(names: list[str]) -> Names:
    index = pd.Index(names, dtype=object)
    twice = [str(name) for name in index[index.duplicated()].unique()]
    if twice or not names:
        what = f"names {listed(twice)} twice" if twice else "is empty"
        msg = f"`genes` {what}; give each gene once, and at least one"
        msg += ", or a mask where several genes have one name" if twice else ""
        raise ParameterError(msg)
    return index.to_numpy()


def join_var(
    parts: Sequence[tuple[Location, Names]], genes: Genes
) -> tuple[Names, tuple[ColumnMap, ...] | None]:
    """Join the gene names of files.

    Parameters
    ----------
    parts
        Each file with its genes.
    genes
        Which genes the collection has.

    Returns
    -------
    The genes of the collection, and the position of each file's genes among them; None if all
    files have the same genes in the same order.

    Raises
    ------
    MismatchError
        A file has other genes than the first, or lacks a requested gene; no gene is left; or genes
        are matched by name, and a file has a gene without a name, or two genes with a name that the
        collection has.
    """
    (where_first, first), *_ = parts
    is_same = all(names is first or np.array_equal(names, first) for _, names in parts)
    chosen, places = genes.of_file(where_first, first)
    if is_same and (chosen is None or np.array_equal(chosen, first)):
        return first, None
    distinct = dict[int, _Part]()  # of most files they are those of the first
    for where, names in parts:
        if id(names) not in distinct:
            distinct[id(names)] = where, pd.Index(names, dtype=object)
    if chosen is None:
        for where, index in distinct.values():
            require_named(where, index.to_numpy())
        joint = _joint(list(distinct.values()), genes)
    else:
        joint = pd.Index(chosen, dtype=object)
    maps = dict[int, NDArray[np.integer]]()
    for key, (where, index) in distinct.items():
        if places is not None and key == id(first):
            maps[key] = np.full(first.size, -1)
            maps[key][places] = np.arange(places.size)
            continue
        require_named(where_first, joint.to_numpy())
        lacking = joint[~joint.isin(index)]
        if chosen is not None and len(lacking):
            msg = f"{where}: lacks {listed([*lacking])} of `genes`; leave out these genes, or the"
            raise MismatchError(f"{msg} file")
        repeated = index[index.duplicated()].append(joint[joint.duplicated()]).unique()
        ambiguous = repeated[repeated.isin(joint)]
        if len(ambiguous):
            msg = (
                f"{where}: several genes have the same name: {listed([*ambiguous])}; leave them "
                "out with `genes`, which may be a mask: it applies by position where files have "
                "the same genes in the same order"
            )
            raise MismatchError(msg)
        maps[key] = joint.get_indexer(index)
    return joint.to_numpy(), column_maps([maps[id(names)] for _, names in parts], len(joint))


def _joint(parts: Sequence[_Part], genes: Genes) -> pd.Index[str]:
    """Return the gene names of a collection, each once, unless genes are chosen."""
    joint = parts[0][1].unique()
    if genes.of_first and genes.join_vars != "same":
        _check_has_some(parts, joint, genes.join_vars)
    elif genes.join_vars == "inner":
        for _, index in parts[1:]:
            joint = joint[joint.isin(index)]
        if not len(joint):
            msg = (
                f"{parts[0][0]}: none of its genes is in all other files, such as {parts[1][0]}; "
                "use the same kind of gene names in all files, or give join_vars='outer'"
            )
            raise MismatchError(msg)
    elif genes.join_vars == "outer":
        joint = pd.Index(pd.unique(np.concatenate([index.to_numpy() for _, index in parts])))
    else:
        for where, index in parts:
            own = index.unique()
            n_shared = int(own.isin(joint).sum())
            if not len(own) == len(joint) == n_shared:
                msg = (
                    f"{where}: has other genes than {parts[0][0]} ({n_shared:,} of {len(joint):,} "
                    "are shared); give join_vars='inner' or join_vars='outer'"
                )
                raise MismatchError(msg)
    return joint


def _check_has_some(parts: Sequence[_Part], joint: pd.Index[str], join_vars: JoinVars) -> None:
    """Check that all files have the genes of the first, or at least one of them."""
    for where, index in parts:
        lacking = [str(name) for name in joint[~joint.isin(index)]]
        if len(lacking) == len(joint):
            msg = f"{where}: has none of the genes of {parts[0][0]}, such as {joint[0]!r}"
            raise MismatchError(f"{msg}; use the same kind of gene names")
        if lacking and join_vars == "inner":
            msg = f"{where}: lacks {listed(lacking)} of the genes of {parts[0][0]}"
            raise MismatchError(f"{msg}; give join_vars='outer', which makes them zero")


def join_tables(names: Names, tables: Sequence[pd.DataFrame], genes: Genes) -> pd.DataFrame:
    """Return the columns of tables of genes in which no two tables differ.

    Parameters
    ----------
    names
        The genes of the result, str.
    tables
        Tables of some of these and of other genes, indexed by their names.
    genes
        Which genes of the first table were chosen.

    Returns
    -------
    A table indexed by ``names``, with the columns that all tables have; missing where none has the
    gene, or where several genes have its name and positions do not tell them apart.
    """
    index = pd.Index(names, dtype=object)
    once = index[~index.duplicated(keep=False)]

    def rows_of(table: pd.DataFrame) -> pd.DataFrame:
        by_position = genes.rows_of(table, index)
        if by_position is not None:
            return by_position
        is_known = table.index.isin(once) & ~table.index.duplicated(keep=False)
        return table[is_known].reindex(index)

    tables = [rows_of(each).reset_index(drop=True) for each in tables]
    if not all(each.equals(tables[0]) for each in tables[1:]):
        tables = [each.astype(object) for each in tables]
        joined = reduce(pd.DataFrame.combine_first, tables)
        same = [
            name
            for name in tables[0]
            if all(
                name in each and (each[name].eq(joined[name]) | each[name].isna()).all()
                for each in tables
            )
        ]
        tables = [joined[same].infer_objects()]
    return tables[0].set_axis(index, axis=0)


def require_named(where: Location, names: Names) -> None:
    """Check that all genes have a name, by which they are matched.

    Raises
    ------
    MismatchError
        A gene has none.
    """
    n_missing = int(np.count_nonzero(pd.isna(names)))
    if n_missing:
        genes = "1 gene has" if n_missing == 1 else f"{n_missing:,} genes have"
        msg = f"{where}: {genes} no name, but genes are matched by name; write the file again with"
        raise MismatchError(f"{msg} all `adata.var_names`")


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first few, and the number of others."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else "")


# The number of columns, their names, and where those of each source are among them.
_Columns = tuple[int, ColumnNames, tuple[ColumnMap, ...] | None]


def join_elements(sources: Sequence[Source], genes: Genes) -> dict[str, Element]:
    """Return the elements of all sources, each joined over all of them.

    Raises
    ------
    MismatchError
        Sources cannot be joined by their genes, or differ in the columns of an array without
        genes.
    FormatError
        An array and its table differ in the number of columns.
    ParameterError
        Genes are chosen, but no element has gene names.
    """
    elements, tables = dict[str, Element](), dict[str, _Columns]()
    for name, first in sources[0].elements.items():
        stored = [source.elements[name] for source in sources]
        layouts = [each.layout for each in stored]
        _require_same(name, sources, _columns_of)
        if first.layout == "ragged":
            columns: _Columns = 0, ColumnNames(partial(np.array, [], object)), None
        elif first.var is None:
            _require_same(name, sources, partial(_shape_of, start=1))
            columns = first.shape[1], ColumnNames(first.var_names), None
        else:
            if first.var not in tables:
                # Of MuData, `genes` are of one modality; others have names of another kind.
                own_genes = genes
                if _modality(first.var) != _modality(next(iter(tables), first.var)):
                    own_genes = Genes(genes.join_vars, of_first=genes.of_first)
                tables[first.var] = _joined(name, sources, own_genes)
            columns = tables[first.var]
            _require_same(name, sources, partial(_shape_of, start=2))
        n_columns, names, maps = columns
        if "csr" in layouts and n_columns > np.iinfo(np.int32).max:
            msg = f"{sources[0].location}: `{name}` has {n_columns:,} columns, and sparse rows have"
            raise FormatError(f"{msg} fewer than 2^31; leave it out")
        if maps is not None and first.shape[2:]:
            msg = (
                f"{sources[0].location}: `{name}` has {len(first.shape)} dimensions, which "
                "requires all files to have the same genes in the same order; leave it out, or "
                "read these files alone"
            )
            raise MismatchError(msg)
        if any(each.stored_columns is not None for each in stored):
            maps = _of_stored_columns(stored, maps, n_columns)
        elements[name] = Element(
            name=name,
            dtype=_dtype_of(name, sources),
            layout="csr" if "csr" in layouts else layouts[0],
            row_shape=() if first.layout == "ragged" else (n_columns, *first.shape[2:]),
            names=names,
            stored_as=tuple(each.stored_as for each in stored),
            column_maps=maps,
        )
    if genes.are_chosen and not tables:
        msg = (
            f"{sources[0].location}: `genes` are given, but {listed([*elements])} has no gene names"
        )
        raise ParameterError(f"{msg}; leave out `genes`, or read an element that has them")
    return elements


def _dtype_of(name: str, sources: Sequence[Source]) -> np.dtype[Any]:
    """Return the dtype that NumPy joins those of all sources to, as anndata does."""
    dtypes = [source.elements[name].dtype for source in sources]
    if all(each.names is None for each in dtypes):
        return np.result_type(*dtypes)
    _require_same(name, sources, lambda stored: f"values of {stored.dtype}")
    return dtypes[0]


def _of_stored_columns(
    stored: Sequence[StoredElement], maps: tuple[ColumnMap, ...] | None, n_columns: int
) -> tuple[ColumnMap, ...]:
    """Return the target of each stored column, from the target of each column of the elements."""
    found = list[NDArray[np.int32]]()
    for k, element in enumerate(stored):
        own = np.arange(element.shape[1], dtype=np.int32) if maps is None else maps[k].columns
        order = element.stored_columns
        found.append(own if order is None else np.where(order < 0, order, own[order]))
    return column_maps(found, n_columns)


def _modality(table: str) -> str:
    return table.split("/")[1] if table.startswith("mod/") else ""


def _joined(name: str, sources: Sequence[Source], genes: Genes) -> _Columns:
    # Names that are those of the first file can be read again.
    names_of_first = ColumnNames(partial(_names_again, name, sources[0]))
    if len(sources) == 1 and not genes.are_chosen:
        return sources[0].elements[name].shape[1], names_of_first, None
    parts = list[tuple[Location, NDArray[np.object_]]]()
    found = side_by_side(partial(_names_of, name), sources)
    for source, own in zip(sources, found, strict=True):
        is_same = parts and np.array_equal(own, parts[0][1])  # then memory is shared
        parts.append((source.location, parts[0][1] if is_same else own))
    names, maps = join_var(parts, genes)
    if maps is None:
        return len(names), names_of_first, None
    return len(names), ColumnNames(partial(np.asarray, names)), maps


def _names_of(name: str, source: Source) -> NDArray[np.object_]:
    stored = source.elements[name]
    own = stored.var_names()
    if len(own) != stored.shape[1]:
        msg = (
            f"{source.location}: {stored.var} has {len(own)} names, but `{name}` has "
            f"{stored.shape[1]} columns; write the file again"
        )
        raise FormatError(msg)
    return own


def _names_again(name: str, source: Source) -> NDArray[np.object_]:
    names = _names_of(name, source)
    save_records()
    return names


def _require_same(
    name: str, sources: Sequence[Source], described: Callable[[StoredElement], str]
) -> None:
    """Check that an element has the same description in all files."""
    first, *others = sources
    expected = described(first.elements[name])
    for source in others:
        own = described(source.elements[name])
        if own != expected:
            msg = f"{source.location}: `{name}` has {own}, but {expected} in {first.location}"
            raise MismatchError(f"{msg}; write the same kind to all files")


def _columns_of(stored: StoredElement) -> str:
    if stored.layout == "ragged":
        return "rows of any length"
    return "columns without names" if stored.var is None else "named columns"


def _shape_of(stored: StoredElement, start: int) -> str:
    """Return the dimensions from ``start`` on."""
    return f"{' x '.join(map(str, stored.shape[start:])) or 1} columns"
