"""Joining the genes of the sources of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cellfeed._bytes import Location
from cellfeed._errors import MismatchError, ParameterError
from cellfeed._layouts import ColumnMap, column_maps
from cellfeed._lazy import pd

__all__ = ["Genes", "JoinVars", "join_var", "listed"]

JoinVars = Literal["same", "inner", "outer"]

_SHOWN = 5

Names = NDArray[np.object_]
_Part = tuple[Location, "pd.Index[str]"]


class Genes:
    """Which genes a collection has.

    Parameters
    ----------
    join_vars
        "same": all files have the same genes; "inner": the genes that every file has; "outer": the
        genes that any file has.
    names
        Names of the genes, in this order, in place of a join; every file must have them.

    Raises
    ------
    ParameterError
        ``join_vars`` is something else, ``names`` is not a list of distinct names, or both are
        given.
    """

    def __init__(self, join_vars: JoinVars = "same", names: Sequence[str] | None = None) -> None:
        if join_vars not in get_args(JoinVars):
            msg = f"`join_vars` must be 'same', 'inner' or 'outer', but got {join_vars!r}"
            raise ParameterError(msg)
        if names is not None:
            if join_vars != "same":
                msg = (
                    f"`genes` and `join_vars` cannot be combined; leave out join_vars={join_vars!r}"
                )
                raise ParameterError(msg)
            if isinstance(names, str):
                msg = f"`genes` must be a list, but got the text {names!r}; write [{names!r}]"
                raise ParameterError(msg)
            if np.asarray(names).dtype == bool:
                msg = (
                    "`genes` takes names, but got a boolean mask; write genes=names[mask], where "
                    "names are the `var_names` of the mask"
                )
                raise ParameterError(msg)
        self.join_vars = join_vars
        self.names = None if names is None else np.array([str(name) for name in names], object)
        if self.names is not None:
            twice = _twice(self.names)
            if twice or not self.names.size:
                what = f"names {listed(twice)} twice" if twice else "is empty"
                raise ParameterError(f"`genes` {what}; give each gene once, and at least one")


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
    first = parts[0][1]
    is_same = all(names is first or np.array_equal(names, first) for _, names in parts)
    if is_same and (genes.names is None or np.array_equal(genes.names, first)):
        return first, None
    distinct = dict[int, _Part]()  # of most files they are those of the first
    for where, names in parts:
        if id(names) not in distinct:
            _check_named(where, names)
            distinct[id(names)] = where, pd.Index(names, dtype=object)
    joint = _joint(list(distinct.values()), genes)
    for where, index in distinct.values():
        _check_distinct(where, index, joint)
    maps = {key: joint.get_indexer(index) for key, (_, index) in distinct.items()}
    return joint.to_numpy(), column_maps([maps[id(names)] for _, names in parts], len(joint))


def _joint(parts: Sequence[_Part], genes: Genes) -> pd.Index[str]:
    """Return the gene names of a collection, each once."""
    joint = parts[0][1].unique()
    if genes.names is not None:
        joint = pd.Index(genes.names, dtype=object)
        for where, index in parts:
            lacking = [str(name) for name in joint[~joint.isin(index)]]
            if lacking:
                msg = (
                    f"{where}: lacks {listed(lacking)} of `genes`; leave out these genes, or the "
                    "file"
                )
                raise MismatchError(msg)
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
                    "are shared); give join_vars='inner' or 'outer', or `genes`"
                )
                raise MismatchError(msg)
    return joint


def _check_named(where: Location, names: Names) -> None:
    """Check that all genes have a name, by which they are matched."""
    n_missing = int(np.count_nonzero(pd.isna(names)))
    if n_missing:
        genes = "1 gene has" if n_missing == 1 else f"{n_missing:,} genes have"
        msg = f"{where}: {genes} no name, but genes are matched by name; write the file again with"
        raise MismatchError(f"{msg} all `adata.var_names`")


def _check_distinct(where: Location, index: pd.Index[str], joint: pd.Index[str]) -> None:
    """Check that no two genes of a file share a name that the collection has."""
    repeated = index[index.duplicated()].unique()
    if repeated.isin(joint).any():
        names = listed(repeated[repeated.isin(joint)].tolist())
        msg = (
            f"{where}: several genes have the same name: {names}; write the file again after "
            "`adata.var_names_make_unique()`"
        )
        raise MismatchError(msg)


def _twice(names: Names) -> list[str]:
    index = pd.Index(names, dtype=object)
    return [str(name) for name in index[index.duplicated()].unique()]


def listed(names: Sequence[str]) -> str:
    """Return names for a message: the first few, and the number of others."""
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else "")
