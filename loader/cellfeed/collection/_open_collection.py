"""`open_collection`, which makes one collection of paths, URLs and objects."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from cellfeed._errors import ParameterError, PathError, require_list
from cellfeed.bytes import SCHEMES, Location, StorageOptions, has_suffix, require_file
from cellfeed.bytes._remote import expand_url
from cellfeed.bytes._tables import save_records
from cellfeed.collection._collection import Collection
from cellfeed.collection._join_elements import Genes, JoinVars, side_by_side
from cellfeed.collection._join_obs import JoinObs
from cellfeed.sources import Source, Storage
from cellfeed.sources._in_memory import locations_or_sources
from cellfeed.sources._registry import (
    built_in,
    find_storage,
    open_location,
    select_elements,
    storage_of,
    suffixes,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

# Names of the elements of a collection.


def require_elements(names: Sequence[str]) -> tuple[str, ...]:
    """Check the names of elements, and return them as a tuple.

    Raises
    ------
    ParameterError
        There are none, one is given twice, or one is not a name of an element.

    Examples
    --------
    >>> require_elements(["X", "layers/counts"])
    ('X', 'layers/counts')
    >>> require_elements(["mod/rna/X", "mod/protein/obsm/X_pca"])
    ('mod/rna/X', 'mod/protein/obsm/X_pca')
    """
    require_list("elements", "names", names)
    for name in names:
        if not _is_element(name):
            msg = (
                "`elements` must be 'X', 'raw/X', 'layers/NAME' or 'obsm/NAME' (in MuData, after "
                "'mod/MODALITY/'), or for token streams 'spans', but got "
                f"{name!r}; give its path in the file"
            )
            if "/" not in str(name):
                msg += f", such as 'layers/{name}' for a layer"
            raise ParameterError(msg)
    if not names or len(set(names)) < len(names):
        msg = f"`elements` must name at least one element, each once, but got {list(names)!r}"
        raise ParameterError(msg)
    return tuple(names)


def _is_element(name: object) -> bool:
    if not isinstance(name, str):
        return False
    if name == "spans":
        return True
    folder, _, rest = name.partition("/")
    if folder == "mod":
        modality, _, name = rest.partition("/")
        folder, _, rest = name.partition("/")
        if not modality:
            return False
    return name in ("X", "raw/X") or (folder in ("layers", "obsm") and bool(rest.strip("/")))


# Which sources the given paths, folders, patterns and URLs stand for.

PathLike = str | os.PathLike[str]
Given = PathLike | Source


def open_sources_of(
    given: Any,
    elements: Sequence[str],
    options: StorageOptions | None = None,
) -> list[Source]:
    """Open the sources of all given locations.

    Parameters
    ----------
    given
        Paths, folders, patterns and URLs, open sources, and objects of other libraries; see
        `open_collection`.
    elements
        The elements to read.
    options
        How to reach servers and read files.

    Raises
    ------
    PathError
        A path is missing, matches no file or is given twice, or no storage opens such URLs.
    FormatError
        No storage opens a file, or its storage cannot read it.
    ParameterError
        An object cannot be opened, or is given twice.
    """
    found = _find(given, elements, options)
    opened = side_by_side(partial(_open, elements=elements), found)
    return [source for sources in opened for source in sources]


def located(paths: Sequence[PathLike]) -> "list[_Found]":
    """Return the locations of paths, folders, patterns and URLs, each with its storage.

    Raises
    ------
    PathError, FormatError
        See `open_sources_of`; no file is opened.
    """
    return [each for each in _find(paths, (), None) if isinstance(each, _Found)]


def _find(
    given: Any, elements: Sequence[str], options: StorageOptions | None
) -> "list[_Found | Source]":
    one_or_more = _listed(given, elements, {})
    if not one_or_more:
        msg = "no path was given; give .h5ad files or zarr stores, a folder of them, or a pattern"
        raise PathError(msg)
    found = [each for where in one_or_more for each in _found(where, options)]
    seen = set[Location | Path]()
    for location in (each.location for each in found if isinstance(each, _Found)):
        resolved = location.path.resolve() if location.path else location
        if resolved in seen:
            msg = f"{location}: given twice, so its cells would count twice; give it once"
            raise PathError(msg)
        seen.add(resolved)
    return found


def _listed(given: Any, elements: Sequence[str], seen: dict[int, Any]) -> list[Given]:
    """Return the given paths, URLs and sources, including those of objects of other libraries.

    ``seen`` holds the objects so far, by `id`.
    """
    if isinstance(given, str | os.PathLike):
        return [given]
    is_open = isinstance(given, Source)
    found: list[Any] | None = [given] if is_open else locations_or_sources(given, elements)
    if found is not None:
        if id(given) in seen:
            msg = f"the same `{type(given).__name__}` is given twice, so its cells would"
            raise ParameterError(f"{msg} count twice; give it once")
        seen[id(given)] = given
        return found
    # Sets have another order in each process; a matrix would be iterated over by rows.
    is_listed = isinstance(given, Iterable) and not isinstance(given, bytes | Mapping | AbstractSet)
    if not is_listed or getattr(given, "ndim", 1) != 1:
        msg = f"`{type(given).__name__}` cannot be opened; give paths, URLs, sources or AnnData"
        raise ParameterError(f"{msg}, several of them in a list, and a matrix in `AnnData(X)`")
    return [each for one in given for each in _listed(one, elements, seen)]


class _Found(NamedTuple):
    location: Location
    storage: Storage


def _found(where: Given, options: StorageOptions | None) -> "list[_Found | Source]":
    if isinstance(where, Source):
        return [where]
    location = Location.of(where)
    if options is not None:
        location = location.with_options(options)
    if location.path is None:
        return [*_found_on_server(location)]
    return [*_found_at(location.path)]


def _open(found: _Found | Source, elements: Sequence[str]) -> list[Source]:
    if isinstance(found, Source):
        return [select_elements(found, elements)]
    return open_location(found.storage, found.location, elements)


_SINGLE = (".h5",)  # suffixes of files that are opened, but not all of a folder


def _found_on_server(location: Location) -> list[_Found]:
    storage = storage_of(location)
    if location.scheme not in SCHEMES or storage.url_suffixes:
        return [_Found(location, storage)]
    names = list(storage.suffixes or suffixes())
    if has_suffix(location.text, *_SINGLE):
        names += _SINGLE
    wholes = [each for each in built_in() if each.parts]
    found = expand_url(location, [*names, *(part for each in wholes for part in each.parts)])
    folder = location.text.rstrip("/")
    within = [each.name for each in found if each.text.rpartition("/")[0] == folder]
    for whole in wholes:
        if any(name.endswith(whole.parts) for name in within):
            return [_Found(location, whole)]
    return [_Found(each, storage) for each in found]


def _found_at(given: Path) -> list[_Found]:
    """Return the locations of a path, folder or pattern."""
    # Functions of os.path take unknown home folders, and paths that are too long, as missing.
    path = Path(os.path.expanduser(given))  # noqa: PTH111
    if os.path.isdir(path):  # noqa: PTH112
        return _found_in(path)
    matches = [str(path)] if os.path.exists(path) else _matching(path)  # noqa: PTH110
    if not matches:
        what = "matches no file" if glob.has_magic(str(path)) else "no such file or folder"
        raise PathError(f"{path}: {what}; check the path")
    return [_Found(each, storage_of(each)) for each in map(_readable, map(Path, matches))]


def _matching(path: Path) -> list[str]:
    """Return what matches a pattern, by name; folders that are there as written are no pattern.

    Files whose names begin with a dot only match if that is written.
    """
    n_parts = len(path.parts)
    n = next(n for n in range(n_parts, -1, -1) if os.path.exists(Path(*path.parts[:n])))  # noqa: PTH110
    written, pattern = Path(*path.parts[:n]), Path(*path.parts[n:])
    return sorted(glob.glob(str(Path(glob.escape(str(written)), pattern)), recursive=True))  # noqa: PTH207 - absolute patterns too


def _readable(path: Path) -> Location:
    """Return the location of a file or folder; refuse what opening would wait for, as pipes."""
    if not path.is_dir():
        require_file(path)
    return Location.of(path)


def _found_in(folder: Path) -> list[_Found]:
    """Return a folder itself if it is a store, else the files in it that can be opened, by name.

    Files whose names begin with a dot are left out, as by patterns.
    """
    own = find_storage(Location.of(folder))
    if own is not None:
        return [_Found(Location.of(folder), own)]
    known = suffixes()
    entries = [each for each in sorted(folder.iterdir()) if not each.name.startswith(".")]
    found = [
        _Found(_readable(entry), known[suffix])
        for entry in entries
        for suffix in known
        if has_suffix(entry.name, suffix)
    ]
    if not found:
        msg = f"{folder}: the folder has nothing that can be opened ({', '.join(known)}); "
        remedy = "give the folder that holds them"
        single = [each.name for each in entries if has_suffix(each.name, *_SINGLE)]
        if single:
            remedy = f"give the file itself: {', '.join(single)}"
        elif any((folder / f"matrix.mtx{packed}").exists() for packed in ("", ".gz")):
            msg = f"{folder}: the folder has a matrix of 10x Genomics as text; give its .h5, or "
            remedy = "write .h5ad with `scanpy.read_10x_mtx(folder).write_h5ad(path)`"
        raise PathError(msg + remedy)
    return found


def open_collection(
    paths: Given | Iterable[Given] | Any,
    *,
    obs: Sequence[str] = (),
    obs_names: bool = False,
    elements: Sequence[str] = ("X",),
    join_vars: JoinVars = "same",
    genes: "Sequence[str] | pd.Series[bool] | NDArray[np.bool_] | None" = None,
    join_obs: JoinObs = "same",
    storage_options: Mapping[str, Any] | None = None,
) -> Collection:
    """Open files, stores and databases of cells as one collection.

    Parameters
    ----------
    paths
        One or several of:

        - an ``.h5ad`` or ``.h5mu`` file;
        - a zarr store of AnnData or MuData (format v2 or v3), or one that annbatch or `preshuffle`
          wrote;
        - a pattern such as ``"plates/*.h5ad"``, or a folder, for all its ``.h5ad`` and ``.h5mu``
          files and ``.zarr`` stores, sorted by name, without hidden ones; folders that are there
          as written are no patterns, whatever their names;
        - an ``.h5`` file of 10x Genomics, such as ``filtered_feature_bc_matrix.h5``, also as
          `TenxSource`;
        - URLs of these on web servers (``https://``, one for each file) and in object stores
          (``s3://``, ``gs://``, ``az://``, with folders and patterns), which are read in byte
          ranges and never downloaded as a whole;
        - Parquet files with a row for each cell, as Tahoe-100M is published: a file, a folder, a
          pattern, a URL, or ``hf://datasets/OWNER/NAME/path`` on the HuggingFace hub; see
          `ParquetSource`;
        - cells in PostgreSQL (``postgresql://host/db?collection=NAME``);
        - the folder of a TileDB-SOMA experiment, a HuggingFace dataset (as ``save_to_disk`` writes
          it), BioNeMo SCDL, a memory-mapped CSR matrix or a token stream;
        - an archive of cellstream;
        - an open `cellfeed.sources.Source`, such as `SomaSource` or `TokenStream`;
        - an object: AnnData, in memory or backed, AnnCollection, ``datasets.Dataset``, BioNeMo's
          ``SingleCellMemMapDataset``;
        - anything that other packages open, by suffix or URL; see `cellfeed.sources.Storage`.
    obs
        Names of the obs columns to include in minibatches; others are not read. In MuData, the
        columns of a modality have names such as ``"rna:plate"``, as in mudata.
    obs_names
        Whether minibatches include the names of their cells, ``minibatch.obs_names``. Each fetch
        reads those of its own rows; see `Collection.obs_names`.
    elements
        Names of the elements to include in minibatches: ``"X"``, ``"layers/NAME"``, ``"raw/X"``
        (with the genes of ``raw``) or ``"obsm/NAME"``. In MuData, each of these within a modality,
        such as ``"mod/rna/X"``, and the shared ``"obsm/NAME"``. The first element is
        ``minibatch.X``; each is ``minibatch[name]``. An ``obsm`` entry may be an array with any
        number of dimensions (images of shape n_cells x 32 x 32 x 3 keep that shape; an array with
        one dimension becomes one column) or a sparse matrix. The rows of MuData are its cells, in
        its order; a modality must have all of them.
    join_vars
        Which genes to read: "same", the genes of the first file, which every file must have, in any
        order; "inner", the genes that every file has; or "outer", the genes that any file has, with
        zeros where a file lacks one. This applies to all elements with genes, and to ``raw/X`` by
        its own genes.
    genes
        Names of the genes to read, in this order, in place of ``join_vars``. In MuData, these are
        genes of the modality of the first element; other modalities are read whole. Also booleans:
        a mask of the genes of the first file, such as ``~is_mitochondrial``, which applies by
        position to all files with the same genes in the same order, so that names may repeat; or a
        pandas Series indexed by names, such as ``table["highly_variable"]``, which is a mask if
        its index is the genes of the first file, or pandas' own numbers from 0.
    join_obs
        "same" requires every file to have each column of ``obs``; "outer" fills the column with
        missing values (code -1, or NaN) for files that lack it.
    storage_options
        Options for servers and object stores, as obstore's stores take them: ``access_key_id``,
        ``endpoint``, ``region``, ``client_options`` with ``default_headers``, and so on. By
        default, they come from the environment (``AWS_ACCESS_KEY_ID`` and so on). They never
        appear in messages.

    Raises
    ------
    PathError
        A path is missing or matches no file, no storage opens such a URL, a server does not have
        the object, or a server cannot list the files of a pattern.
    RemoteError
        A server cannot be reached, or refuses the request.
    FormatError
        A file is truncated, has an unknown format, lacks an element, or has a modality that
        lacks cells.
    ParameterError
        An argument has the wrong type; an element name is invalid or given twice, or there are
        none; or ``join_vars``, ``genes`` or ``join_obs`` is invalid.
    MismatchError
        The files do not have the same genes, a file lacks one of ``genes``, or genes are matched by
        name and a file has two genes of that name; the rows of an ``obsm`` array differ in shape
        between files; or an obs column is numeric in one
        file and categorical in another.
    ColumnError
        A file lacks an obs column, or, with ``join_obs="outer"``, all files do.

    Examples
    --------
    >>> import anndata, numpy as np, pandas as pd, tempfile
    >>> from pathlib import Path
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in "ab":
    ...     obs = pd.DataFrame({"plate": [name] * 3}, index=list("xyz"))
    ...     anndata.AnnData(np.eye(3, dtype="float32"), obs=obs).write_h5ad(folder / f"{name}.h5ad")
    >>> collection = open_collection(folder, obs=["plate"])
    >>> len(collection), collection.n_vars
    (6, 3)
    >>> collection.obs["plate"].codes
    array([0, 0, 0, 1, 1, 1], dtype=int8)
    """
    require_list("obs", "column names", obs)
    if obs_names not in (True, False):
        msg = f"`obs_names` must be True or False, but got {obs_names!r}; name columns in `obs`"
        raise ParameterError(msg)
    if not isinstance(given := cast("object", storage_options), Mapping | None):
        kind = type(given).__name__  # values may be credentials
        msg = f"`storage_options` must be a dict, but got one of type {kind}"
        raise ParameterError(msg)
    names, joint_genes = require_elements(elements), Genes(join_vars, genes)
    sources = open_sources_of(paths, names, StorageOptions(dict(storage_options or {})))
    collection = Collection(
        sources, obs=obs, genes=joint_genes, join_obs=join_obs, obs_names=obs_names
    )
    save_records()
    return collection
