"""The inputs of a copy: which elements are written, and everything that is read of the files."""

import re
import tempfile
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anndata as ad
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from cellfeed.bytes import Location
from cellfeed.collection import Collection, located, require_elements
from cellfeed.extending import FormatError, ParameterError, require_list
from cellfeed.preshuffling._job import Contents, Job, Matrix, OutputFolder
from cellfeed.preshuffling._tables import CellTable, FileTable, ObsTable
from cellfeed.sampling import Fetch
from cellfeed.sources import Source, as_text, open_location
from cellfeed.sources.anndata import ANNDATA, AnnDataSource, FileSource

_UNS = "uns"


_WRITTEN = ("dense", "csr", "csc", "dataframe")  # encodings of elements


def contents_of(paths: Any, elements: Sequence[str] | Literal["all"]) -> Contents:
    """Return what is written of files.

    Parameters
    ----------
    paths
        Paths and URLs.
    elements
        Names of elements, and ``"uns"``; or ``"all"``.

    Raises
    ------
    ParameterError
        A name is not one of an element, there is no matrix among them, or ``"all"`` is given for
        files that do not list their elements.
    """
    if elements != "all":
        require_list("elements", "names", elements)
        names = [name for name in elements if name != _UNS]
        if names:
            require_elements(names)
        if not any("obsm/" in name for name in names):
            return _contents(names, {}, uns=_UNS in elements)
    encodings = dict[str, str]()
    for location, storage in located(paths):
        if storage.name == ANNDATA.name:
            for source in open_location(storage, location, ()):
                if isinstance(source, FileSource):
                    encodings = source.stored_elements() | encodings
        elif elements == "all":
            msg = f"{location}: is {storage.name}, which does not list its elements"
            raise ParameterError(f"{msg}; name them, such as elements=['X']")
    if elements == "all":
        _require_written(encodings)
        return _contents([*encodings], encodings, uns=True)
    return _contents(names, encodings, uns=_UNS in elements)


def _require_written(encodings: Mapping[str, str]) -> None:
    """Check that each element has an encoding that is written."""
    for name, encoding in encodings.items():
        if encoding not in _WRITTEN:
            others = [each for each in encodings if encodings[each] in _WRITTEN]
            msg = f"`{name}` cannot be written (encoding {encoding!r}); name the others"
            raise ParameterError(f"{msg}: elements={[*others, _UNS]!r}")


def _contents(names: Sequence[str], encodings: Mapping[str, str], *, uns: bool) -> Contents:
    frames = tuple(name for name in names if encodings.get(name) == "dataframe")
    matrices = tuple(name for name in names if name not in frames)
    if not matrices:
        msg = f"`elements` must name at least one matrix, such as 'X', but got {[*names]!r}"
        raise ParameterError(msg)
    return Contents(matrices=matrices, frames=frames, uns=uns)


def open_parts(paths: Sequence[str | Path], matrices: Sequence[Matrix]) -> list[Source]:
    """Open matrices of parts of a copy, by the names that they have in the files."""
    sources = list[Source]()
    for path in paths:
        [source] = open_location(ANNDATA, Location.of(path), [each.path for each in matrices])
        source.elements = {each.name: source.elements[each.path] for each in matrices}
        sources.append(source)
    return sources


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The opened inputs of a job.

    Parameters
    ----------
    collection
        The collection of the matrices.
    rows
        The rows to write, ascending, int64; None for all.
    obs, frames
        The table of cells, and data frames in ``obsm`` by name.
    tables
        Tables of genes, by path in a part: ``var``, ``raw/var``, ``mod/rna/var``.
    uns
        ``uns`` by path in a part; empty if it is not written.
    modalities
        Names of the modalities of MuData; None for AnnData.
    groups
        The columns of obs by which cells are grouped; None if they are not.
    """

    collection: Collection
    rows: NDArray[np.int64] | None
    obs: ObsTable
    frames: Mapping[str, CellTable]
    tables: Mapping[str, pd.DataFrame]
    uns: Mapping[str, Any]
    modalities: tuple[str, ...] | None
    groups: CellTable | None

    @classmethod
    def open(
        cls,
        job: Job,
        folder: OutputFolder,
        collection: Collection,
        rows: NDArray[np.int64] | None,
    ) -> "Inputs":
        """Open what else is read of the files of a job."""
        first = collection.sources[0]
        modalities = None
        if isinstance(first, AnnDataSource) and first.modalities():
            kept = (*job.elements, *job.frames)
            of_kept = [each for each in first.modalities() if _in_modality(kept, each)]
            modalities = tuple(of_kept) or None
        obs, groups = ObsTable(collection.sources, job.paths, n_stored=job.n_stored), None
        if job.group_by:
            groups = _groups(collection.sources, job.group_by)
        found = cls(
            collection,
            rows,
            obs,
            {name: _frame(collection.sources, name) for name in job.frames},
            _gene_tables(job, collection, modalities),
            _uns_of(collection.sources, modalities) if job.uns else {},
            modalities,
            groups,
        )
        found._check_names(job, folder.path)
        return found

    def _check_names(self, job: Job, out: Path) -> None:
        """Check that a zarr store can have groups and arrays with all names.

        Raises
        ------
        FormatError
            It cannot.
        """
        tables = {"`obs`": self.obs} | {f"`{path}`": each for path, each in self.frames.items()}
        named = {where: table.names for where, table in tables.items()}
        for path, frame in self.tables.items():
            own = () if frame.index.name is None else (str(frame.index.name),)
            named[f"`{path}`"] = (*frame.columns, *own)
        for path, uns in self.uns.items():
            named |= dict(_names_by_group(uns, f"`{path}`"))
        for path in (*(each.path for each in job.matrices), *job.frames):
            found = re.match("((?:mod/[^/]*/)?(?:layers|obsm))/(.*)", path, re.DOTALL)
            if found is not None:
                named[f"`{found[1]}`"] = (*named.get(f"`{found[1]}`", ()), found[2])
        for where, names in named.items():
            alike = dict[str, str]()
            for name in names:
                files = tables[where].files if where in tables else ()
                with_name = [each.location for each in files if name in each.names]
                location = [*with_name, *self.collection.locations][0]
                if (why := _why_not_stored(name)) is not None:
                    msg = f"{location}: {where} has the name {name!r}, which zarr cannot store"
                    raise FormatError(f"{msg}, since it {why}; rename it")
                other = alike.setdefault(_folded(name), name)
                if other != name and not _distinguishes_case(out):
                    msg = f"{location}: {where} has the names {other!r} and {name!r}, which are one"
                    raise FormatError(f"{msg} in the file system of {out}; rename one of them")

    def part(self, job: Job, number: int) -> Fetch:
        """Return the rows of a part in the collection, ascending, and their order in it."""
        part = job.part(number)
        rows = part.rows if self.rows is None else np.asarray(self.rows[part.rows])
        if self.groups is None:
            return Fetch(rows=rows, order=part.order)
        codes = [_sorted_codes(column) for _, column in self.groups.read(rows).items()]
        by_group = np.lexsort([each[part.order] for each in reversed(codes)])
        return Fetch(rows=rows, order=part.order[by_group])


_RESERVED = ("", ".", "..", "zarr.json", "_index")
_MOST_BYTES = 255  # of a name, for most file systems


def _why_not_stored(name: str) -> str | None:
    """Return why a name cannot be that of an array in a zarr store; None if it can."""
    if "/" in name or "\\" in name:  # zarr turns one into the other
        return "has a slash"
    if name in _RESERVED:
        return "is reserved"
    if "\0" in name or name != name.encode(errors="replace").decode():
        return "is not text"
    if len(name.encode()) > _MOST_BYTES:
        return f"has more than {_MOST_BYTES} bytes"
    return None


def _names_by_group(nested: Mapping[str, Any], path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the path of each of nested dictionaries, and its names."""
    yield path, tuple(nested)
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _names_by_group(value, f"{path[:-1]}/{name}`")


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def _distinguishes_case(out: Path) -> bool:
    """Return whether the file system of a folder distinguishes upper and lower case."""
    existing = next(each for each in (out, *out.parents) if each.is_dir())
    with tempfile.NamedTemporaryFile(prefix="cellfeed-", dir=existing) as file:
        path = Path(file.name)
        return not path.with_name(path.name.upper()).exists()


def _groups(sources: Sequence[Source], columns: Sequence[str]) -> CellTable:
    files = [
        FileTable(each.location, each.n_rows, tuple(each.obs_names()), each.read_obs_rows)
        for each in sources
    ]
    there = list(dict.fromkeys(name for each in files for name in each.names))
    for name in columns:
        if name not in there:
            msg = f"`group_by` names {name!r}, but the columns of obs are: {', '.join(there)}"
            raise ParameterError(msg)
    return CellTable("obs", files, columns)


def _sorted_codes(column: "pd.Series[Any]") -> NDArray[np.integer]:
    """Return the group of each cell, in the order of categories or of values; missing ones last."""
    if not isinstance(column.dtype, pd.CategoricalDtype):
        column = column.astype("category")
    codes = column.cat.codes.to_numpy().astype(np.int64)
    codes[codes < 0] = len(column.cat.categories)
    return codes


def _in_modality(names: Sequence[str], modality: str) -> bool:
    return any(name.startswith(f"mod/{modality}/") for name in names)


def _frame(sources: Sequence[Source], name: str) -> CellTable:
    files = list[FileTable]()
    for source in sources:
        if not isinstance(source, AnnDataSource):
            msg = f"{source.location}: has no data frame `{name}`; leave it out of `elements`"
            raise ParameterError(msg)
        columns, read = source.frame_columns(name), partial(source.read_frame_rows, name)
        files.append(FileTable(source.location, source.n_rows, columns, read))
    return CellTable(name, files)


def table_of(path: str) -> str:
    """Return the path of the table of genes of a matrix, both as in a part.

    Examples
    --------
    >>> table_of("layers/counts"), table_of("mod/rna/raw/X")
    ('var', 'mod/rna/raw/var')
    """
    within = path[: path.index("/", 4) + 1] if path.startswith("mod/") else ""
    return f"{within}raw/var" if path == f"{within}raw/X" else f"{within}var"


def _gene_tables(
    job: Job, collection: Collection, modalities: Sequence[str] | None
) -> dict[str, pd.DataFrame]:
    tables = dict[str, pd.DataFrame]()
    for matrix in job.matrices:
        if matrix.table is not None and table_of(matrix.path) not in tables:
            tables[table_of(matrix.path)] = _gene_table(collection, matrix.name)
    first = collection.sources[0]
    for path in ["var"] if modalities is None else [f"mod/{each}/var" for each in modalities]:
        if path not in tables:  # there are only elements of obsm
            tables[path] = (
                first.read_table(path) if isinstance(first, AnnDataSource) else first.read_var()
            )
    return tables


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


def _uns_of(sources: Sequence[Source], modalities: Sequence[str] | None) -> dict[str, Any]:
    paths = ["uns", *(f"mod/{each}/uns" for each in modalities or ())]
    return {path: _joined_uns(sources, path) for path in paths}


def _joined_uns(sources: Sequence[Source], path: str) -> Any:
    """Return ``uns`` of one file, or the entries on which all files that have them agree."""
    found = [each.read_stored(path) for each in sources if isinstance(each, AnnDataSource)]
    parts = [each for each in found if each]
    if len(parts) < 2:  # noqa: PLR2004 - nothing to join
        return parts[0] if parts else {}
    empty = pd.DataFrame(index=pd.Index([], dtype=str))
    joined = ad.concat([ad.AnnData(obs=empty, uns=each) for each in parts], uns_merge="unique").uns
    lost = sorted({name for each in parts for name in _names(each)}.difference(_names(joined)))
    if lost:
        msg = f"`{path}` differs between files, and is written without {', '.join(map(repr, lost))}"
        warnings.warn(msg, UserWarning, stacklevel=4)
    return dict(joined)


def _names(nested: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """Yield the paths of the entries of nested dictionaries."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _names(value, f"{above}{name}/")
        else:
            yield f"{above}{name}"
