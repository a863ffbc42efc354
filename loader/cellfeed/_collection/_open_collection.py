"""`open_collection`, which makes one collection of paths, URLs and objects."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from cellfeed._bytes import StorageOptions
from cellfeed._collection._collection import Collection
from cellfeed._collection._element_names import require_elements
from cellfeed._collection._join_obs import JoinObs
from cellfeed._collection._join_var import Genes, JoinVars
from cellfeed._collection._locations import Given, open_sources_of
from cellfeed._errors import ParameterError, require_list
from cellfeed._sizes import parse_size

__all__ = ["open_collection"]


_PARAMETERS = (
    "obs",
    "elements",
    "join_vars",
    "genes",
    "join_obs",
    "storage_options",
    "cache",
    "direct_io",
)


def open_collection(
    paths: Given | Iterable[Given] | Any,
    *,
    obs: Sequence[str] = (),
    elements: Sequence[str] = ("X",),
    join_vars: JoinVars = "same",
    genes: Sequence[str] | None = None,
    join_obs: JoinObs = "same",
    storage_options: Mapping[str, Any] | None = None,
    cache: int | str | None = None,
    direct_io: bool = False,
    **unknown: Any,
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
          files and ``.zarr`` stores, sorted by name;
        - URLs of these on web servers (``https://``, one for each file) and in object stores
          (``s3://``, ``gs://``, ``az://``, with folders and patterns), which are read in byte
          ranges and never downloaded as a whole;
        - cells in PostgreSQL (``postgresql://host/db?collection=NAME``);
        - the folder of a TileDB-SOMA experiment, a HuggingFace dataset (as ``save_to_disk`` writes
          it), BioNeMo SCDL, a memory-mapped CSR matrix or a token stream;
        - an archive of cellstream;
        - an open `cellfeed.sources.Source`, such as `SomaSource` or `TokenStream`;
        - an object: AnnData in memory or backed, AnnCollection, a ``datasets.Dataset``, BioNeMo's
          ``SingleCellMemMapDataset``, or an artifact, collection or MappedCollection of lamindb;
        - anything that other packages open, by suffix or URL; see `cellfeed.sources.Storage`.
    obs
        Names of the obs columns to include in minibatches; others are not read. In MuData, the
        columns of a modality have names such as ``"rna:plate"``, as in mudata.
    elements
        Names of the elements to include in minibatches: ``"X"``, ``"layers/NAME"``, ``"raw/X"``
        (with the genes of ``raw``) or ``"obsm/NAME"``. In MuData, each of these within a modality,
        such as ``"mod/rna/X"``, and the shared ``"obsm/NAME"``. The first element is
        ``minibatch.X``; each is ``minibatch[name]``. An ``obsm`` entry may be an array with any
        number of dimensions (images of shape n_cells x 32 x 32 x 3 keep that shape; an array with
        one dimension becomes one column), a sparse matrix, or a data frame of numbers and booleans,
        whose columns are aligned by name and must be the same in all files. The rows of MuData are
        its cells, in its order; a modality must have all of them.
    join_vars
        Which genes to read: "same", the genes of the first file, which every file must have, in any
        order; "inner", the genes that every file has; or "outer", the genes that any file has, with
        zeros where a file lacks one. This applies to all elements with genes, and to ``raw/X`` by
        its own genes.
    genes
        Names of the genes to read, in this order, in place of ``join_vars``. In MuData, these are
        genes of the modality of the first element; other modalities are read whole.
    join_obs
        "same" requires every file to have each column of ``obs``; "outer" fills the column with
        missing values (code -1, or NaN) for files that lack it.
    storage_options
        Options for servers and object stores, as obstore's stores take them: ``access_key_id``,
        ``endpoint``, ``region``, ``client_options`` with ``default_headers``, and so on. By
        default, they come from the environment (``AWS_ACCESS_KEY_ID`` and so on). They never
        appear in messages.
    cache
        Maximum disk space for a cache of bytes read from servers, such as ``"20GB"``. Processes
        share the cache, and later runs use it again. If None, only metadata are cached.
    direct_io
        Whether to read chunks of local ``.h5ad``, ``.h5mu`` and zarr with direct I/O
        (``O_DIRECT``), which bypasses the page cache, so that files far larger than memory do not
        evict other pages. The rows are the same, but every epoch reads from the disk what the page
        cache could have held. obs, var, and elements that are read by h5py or zarr (see
        `Collection.describe`) still go through the page cache.

    **unknown
        Refused, with what to write instead.

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
        none; ``join_vars``, ``genes`` or
        ``join_obs`` is invalid; or the system, the file system or the storage does not support
        ``direct_io``.
    MismatchError
        The files do not have the same genes, a file lacks one of ``genes``, or genes are matched by
        name and a file has two genes of that name; the rows of an ``obsm`` array differ in shape
        between files, or the columns of a data frame differ; or an obs column is numeric in one
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
    if unknown:
        name, value = next(iter(unknown.items()))
        msg = f"`open_collection` has no parameter `{name}`"
        if name in ("layer", "layers"):
            layer = value if isinstance(value, str) else "NAME"
            raise ParameterError(f"{msg}; write elements=['layers/{layer}']")
        near = difflib.get_close_matches(name, _PARAMETERS, n=1)
        raise ParameterError(f"{msg}; it has {', '.join(near or _PARAMETERS)}")
    require_list("obs", "column names", obs)
    if not isinstance(given := cast("object", storage_options), Mapping | None):
        kind = type(given).__name__  # values may be credentials
        msg = f"`storage_options` must be a dict, but got one of type {kind}"
        raise ParameterError(msg)
    names, joint_genes = require_elements(elements), Genes(join_vars, genes)
    options = StorageOptions(
        dict(storage_options or {}),
        0 if cache is None else parse_size(cache, "cache"),
        direct=direct_io,
    )
    sources = open_sources_of(paths, names, options)
    return Collection(sources, obs=obs, genes=joint_genes, join_obs=join_obs)
