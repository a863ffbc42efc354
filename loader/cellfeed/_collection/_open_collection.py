"""What is opened, and how: paths, URLs and objects become one collection."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cellfeed._bytes import StorageOptions
from cellfeed._collection._collection import Collection
from cellfeed._collection._element_names import require_elements
from cellfeed._collection._join_obs import JoinObs
from cellfeed._collection._join_var import Genes, JoinVars
from cellfeed._collection._locations import Given, open_sources_of
from cellfeed._errors import ParameterError
from cellfeed._sizes import parse_size

__all__ = ["open_collection"]


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
) -> Collection:
    """Open files, stores and databases of cells as one collection.

    Parameters
    ----------
    paths
        An ``.h5ad`` or ``.h5mu`` file, a zarr store of AnnData or MuData (format v2 or v3) or one
        that annbatch or `preshuffle` wrote, a pattern such as ``"plates/*.h5ad"``, a folder (all
        its ``.h5ad`` and ``.h5mu`` files and ``.zarr`` stores, by name), or several of these. Also
        URLs of these on web servers (``https://``, each file by its URL) and in object stores
        (``s3://``, ``gs://``, ``az://``, with folders and patterns), read in ranges and never
        downloaded as a whole; cells in PostgreSQL (``postgresql://host/db?collection=NAME``); a
        folder that is a TileDB-SOMA experiment, a HuggingFace data set (as `save_to_disk` writes
        it), of BioNeMo SCDL, a memory-mapped CSR matrix or a token stream; an archive of
        cellstream; and whatever other packages open, by suffix or URL; see
        `cellfeed.sources.Storage`. In place of a path, an open `cellfeed.sources.Source`, such as
        `SomaSource` or `TokenStream`; or an object: AnnData in memory or backed, AnnCollection, a
        `datasets.Dataset`, BioNeMo's ``SingleCellMemMapDataset``, or an artifact, collection or
        MappedCollection of lamindb.
    obs
        The obs columns that minibatches carry. Others are not read. In MuData, those of a
        modality are called such as ``"rna:plate"``, as mudata calls them.
    elements
        What minibatches carry, all of the same cells: ``"X"``, ``"layers/NAME"``, ``"raw/X"``
        (with the genes of ``raw``), ``"obsm/NAME"``; of MuData, each of these of a modality, such
        as ``"mod/rna/X"``, and ``"obsm/NAME"`` of all together. The first is ``minibatch.X``;
        each is ``minibatch[name]``. An ``obsm`` entry may be an array of two or more dimensions
        (images of shape n_cells x 32 x 32 x 3 come in that shape; one of one dimension is one
        column), a sparse one, or a data frame of numbers and booleans, whose columns are aligned
        by name and must be the same in all files. Rows are the cells of MuData in its order, all
        of which a modality must have.
    join_vars
        Which genes: those of the first file, which all have, in whatever order ("same"), those
        that every file has ("inner"), or those that any has ("outer"; zero where a file lacks
        one). All that has genes is joined so, ``raw/X`` by its own.
    genes
        The names of the genes to read, in this order, in place of all. Of MuData, they are genes
        of the modality that comes first among ``elements``; others are read whole.
    join_obs
        Whether every file must have each column of ``obs`` ("same"), or those of files that lack
        one are missing: code -1 or NaN ("outer").
    storage_options
        How servers are reached: what obstore's stores take, such as ``access_key_id``,
        ``endpoint``, ``region``, or ``client_options`` with ``default_headers``. Without them,
        as the environment says (``AWS_ACCESS_KEY_ID`` and so on). They are shown nowhere.
    cache
        How much of this machine's disk may hold what was read from servers, such as ``"20GB"``.
        It is shared by processes, and found again later. None keeps metadata alone.
    direct_io
        Whether chunks of ``.h5ad``, ``.h5mu`` and zarr on this machine are read past the page
        cache (``O_DIRECT``), so that files far larger than memory push nothing else out of it.
        Rows are the same; what the cache could have held is read from the disk in each epoch.
        obs, var, and what `Collection.describe` says is read by h5py or zarr go through the cache.

    Raises
    ------
    PathError
        A path is missing or matches no file, or nothing is known that opens such a URL, or a
        server has no such object, or cannot list what a pattern stands for.
    RemoteError
        A server cannot be reached, or refuses.
    FormatError
        A file is truncated, is nothing that can be opened, lacks an element, or has a modality
        that lacks cells.
    ParameterError
        An element is named in another way, or twice, or there is none; or ``join_vars``,
        ``genes`` or ``join_obs`` is not what it may be; or ``direct_io`` is asked for where the
        system, the file system or the storage has none.
    MismatchError
        The files do not have the same genes, or lack one of ``genes``, or one of them has two of
        a name by which genes are put together or chosen; an ``obsm`` array has rows of another
        shape in one than in another, or a data frame other columns; or an obs column is numeric in
        one and categorical in another.
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
    if isinstance(obs, str):
        msg = f"`obs` must be a list of column names, but got the text {obs!r}; write [{obs!r}]"
        raise ParameterError(msg)
    names, joint_genes = require_elements(elements), Genes(join_vars, genes)
    options = StorageOptions(
        dict(storage_options or {}),
        0 if cache is None else parse_size(cache, "cache"),
        direct=direct_io,
    )
    sources = open_sources_of(paths, names, options)
    return Collection(sources, obs=obs, genes=joint_genes, join_obs=join_obs)
