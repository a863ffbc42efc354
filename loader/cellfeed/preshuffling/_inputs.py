"""The inputs of a copy: which elements are written, and everything that is read of the files."""

import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection, located, require_elements
from cellfeed.extending import FormatError, ParameterError, require_list
from cellfeed.preshuffling._job import Job
from cellfeed.preshuffling._tables import ObsTable
from cellfeed.sampling import Fetch
from cellfeed.sources import Source, as_text, open_location
from cellfeed.sources.anndata import ANNDATA, AnnDataSource, FileSource

_WRITTEN = ("dense", "csr", "csc")  # encodings of elements; the last one has an error of its own


def names_of(paths: Any, elements: Sequence[str] | Literal["all"]) -> Sequence[str]:
    """Return the names of the elements to write.

    Parameters
    ----------
    paths
        Paths and URLs.
    elements
        Names of elements, at least one; or ``"all"``.

    Raises
    ------
    ParameterError
        A name is not one of an element, there is none, or ``"all"`` is given for files that do not
        list their elements, or have one that is not written.
    """
    if elements != "all":
        require_list("elements", "names", elements)
        require_elements(elements)
        return elements
    encodings = dict[str, str]()
    for location, storage in located(paths):
        if storage.name != ANNDATA.name:
            msg = f"{location}: is {storage.name}, which does not list its elements"
            raise ParameterError(f"{msg}; name them, such as elements=['X']")
        for source in open_location(storage, location, ()):
            if isinstance(source, FileSource):
                encodings = source.stored_elements() | encodings
    for name, encoding in encodings.items():
        if encoding not in _WRITTEN:
            others = [each for each in encodings if encodings[each] in _WRITTEN]
            msg = f"`{name}` cannot be written (encoding {encoding!r}); name the others"
            raise ParameterError(f"{msg}: elements={others!r}")
    return [*encodings]


def open_parts(paths: Sequence[str | Path], names: Sequence[str]) -> list[Source]:
    """Open elements of parts of a copy."""
    return [each for path in paths for each in open_location(ANNDATA, Location.of(path), names)]


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The opened inputs of a job.

    Parameters
    ----------
    collection
        The collection of the elements.
    rows
        The rows to write, ascending, int64; None for all.
    obs
        The table of cells.
    tables
        Tables of genes, by path in a part: ``var``, ``raw/var``.
    """

    collection: Collection
    rows: NDArray[np.int64] | None
    obs: ObsTable
    tables: Mapping[str, pd.DataFrame]

    @classmethod
    def open(cls, job: Job, collection: Collection, rows: NDArray[np.int64] | None) -> "Inputs":
        """Open what else is read of the files of a job.

        Raises
        ------
        ParameterError
            A column to group by is not there.
        FormatError
            A zarr store cannot have groups or arrays with all names.
        """
        obs = ObsTable(collection.sources, job.paths, n_stored=job.n_stored)
        for name in job.group_by:
            if name not in obs.columns:
                there = ", ".join(obs.columns[:-2])
                msg = f"`group_by` names {name!r}, but the columns of obs are: {there}"
                raise ParameterError(msg)
        tables = dict[str, pd.DataFrame]()
        for matrix in job.matrices:
            if matrix.table is not None and table_of(matrix.name) not in tables:
                tables[table_of(matrix.name)] = _gene_table(collection, matrix.name)
        if "var" not in tables:  # there are only elements of obsm
            tables["var"] = collection.sources[0].read_var()
        _check_names(collection, obs, tables)
        return cls(collection, rows, obs, tables)

    def part(self, job: Job, number: int) -> Fetch:
        """Return the rows of a part in the collection, ascending, and their order in it."""
        part = job.plan.fetch(number)
        rows = part.rows if self.rows is None else self.rows[part.rows]
        order, codes = part.order, list[NDArray[np.int64]]()
        for _, column in self.obs.read(rows, job.group_by).items() if job.group_by else ():
            groups = column.astype("category").cat
            of_cells = groups.codes.to_numpy().astype(np.int64)[order]
            codes.insert(0, of_cells % (1 + len(groups.categories)))  # missing ones are the last
        return Fetch(rows=rows, order=order[np.lexsort(codes)] if codes else order)


def _check_names(collection: Collection, obs: ObsTable, tables: Mapping[str, pd.DataFrame]) -> None:
    named = {"obs": obs.names}
    for path, table in tables.items():
        named[path] = (*table.columns, *(() if table.index.name is None else (table.index.name,)))
    for name in collection.elements:
        folder, _, own = name.partition("/")
        named[folder] = (*named.get(folder, ()), own or name)
    for where, names in named.items():
        for name in names:
            if (why := _why_not_stored(name)) is not None:
                has_it = [each.location for each in collection.sources if name in each.obs_names()]
                location = [*(has_it if where == "obs" else ()), *collection.locations][0]
                msg = f"{location}: `{where}` has the name {name!r}, which zarr cannot store"
                raise FormatError(f"{msg}, since it {why}; rename it")
        folded = [unicodedata.normalize("NFC", name).casefold() for name in names]
        if sys.platform == "darwin" and len({*folded}) < len({*names}):
            alike = ", ".join(
                repr(n) for n, f in zip(names, folded, strict=True) if folded.count(f) > 1
            )
            msg = f"{collection.locations[0]}: `{where}` has the names {alike}, which are one"
            raise FormatError(f"{msg} in file systems of this machine; rename one of them")


def _why_not_stored(name: str) -> str | None:
    """Return why a name cannot be that of an array in a zarr store; None if it can."""
    if "/" in name or "\\" in name:  # zarr turns one into the other
        return "has a slash"
    if name in ("", ".", "..", "zarr.json", "_index"):
        return "is reserved"
    if "\0" in name or name != name.encode(errors="replace").decode():
        return "is not text"
    if len(name.encode()) > 255:  # noqa: PLR2004 - the limit of most file systems
        return "has more than 255 bytes"
    return None


def table_of(name: str) -> str:
    """Return the path of the table of genes of a matrix in a part."""
    return "raw/var" if name == "raw/X" else "var"


def _gene_table(collection: Collection, name: str) -> pd.DataFrame:
    """Return the table of the genes of a matrix: each gene's row is that of the first file."""
    names = pd.Index(collection.elements[name].column_names)
    table = _own_gene_table(collection.sources[0], name)
    by_position = collection.chosen_genes.rows_of(table, names)
    if by_position is not None:
        return by_position
    joint = table[~table.index.duplicated()]
    for source in collection.sources[1:]:
        if names.isin(joint.index).all():
            break
        table = _own_gene_table(source, name)
        new = table[~table.index.isin(joint.index) & ~table.index.duplicated()]
        joint = pd.concat([joint, new]) if len(new) else joint
    return as_text(joint.loc[names])


def _own_gene_table(source: Source, name: str) -> pd.DataFrame:
    stored = source.elements[name]
    if isinstance(source, AnnDataSource) and stored.var is not None:
        return source.read_table(stored.var)
    if stored.var == next(iter(source.elements.values())).var:
        return source.read_var()
    return pd.DataFrame(index=pd.Index(stored.var_names()))
