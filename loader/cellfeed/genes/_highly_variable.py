"""Highly variable genes of counts, by the formulas of scanpy."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.collection import Collection
from cellfeed.extending import ParameterError, one_line, pd, require_positive
from cellfeed.genes._sums import Batches, require_genes, sums_of

Floats = NDArray[np.float64]


def highly_variable_genes(
    collection: Collection,
    *,
    n_top_genes: int = 2000,
    batch_key: str | None = None,
    element: str | None = None,
    indices: ArrayLike | None = None,
    span: float = 0.3,
) -> pd.DataFrame:
    """Find highly variable genes of counts, without loading cells.

    Like ``scanpy.pp.highly_variable_genes(flavor="seurat_v3")``: the variance of each gene is
    standardised by a regression on its mean (Stuart et al., Cell 177, 2019). The regression needs
    scikit-misc (``pip install 'cellfeed[hvg]'``).

    Cells are read twice: once for means and variances, and once for the variances of values that
    are clipped at limits that depend on these. Sums are in float64. This takes up to 200 bytes for
    each gene and batch, some 20 for each cell, and memory for two fetches of 64 MiB.

    Parameters
    ----------
    collection
        The collection.
    n_top_genes
        Number of genes to select.
    batch_key
        Name of an obs column. Genes are ranked in each batch, and sorted by their median rank.
    element
        Name of the element, such as ``"layers/counts"``; the first one if None.
    indices
        Rows of the cells, such as those of a training set; all cells if None.
    span
        Share of genes in each local regression.

    Returns
    -------
    A table of genes, indexed by their names, with the columns that scanpy adds to ``var``:
    ``highly_variable``, ``means``, ``variances``, ``variances_norm``, ``highly_variable_rank`` and,
    with a ``batch_key``, ``highly_variable_nbatches``.

    Raises
    ------
    FormatError
        A value is NaN or infinite, or a file is damaged.
    ParameterError
        A parameter is invalid; scikit-misc is not installed; or counts are negative, no gene varies
        in a batch (which has a single cell, or only zeros), or the regression fails.
    ColumnError
        obs has no such column, or a cell has no value there.

    Warns
    -----
    UserWarning
        Values are no integers.

    Examples
    --------
    >>> import anndata
    >>> from cellfeed import open_collection
    >>> X = np.random.default_rng(0).poisson(np.linspace(0.1, 5, 50), (100, 50)).astype("float32")
    >>> X[::10, 7] = 20
    >>> table = highly_variable_genes(open_collection(anndata.AnnData(X)), n_top_genes=1)
    >>> table.index[table["highly_variable"]].tolist()
    ['7']
    """
    n_top_genes = require_positive("n_top_genes", n_top_genes)
    given: Any = span
    if not isinstance(given, int | float | np.floating) or not 0 < given <= 1:
        raise ParameterError(f"`0 < span <= 1` must hold, but got span={span!r}")
    try:
        import skmisc.loess  # noqa: F401, PLC0415
    except ImportError as error:
        msg = (
            "highly variable genes need scikit-misc; install it with `pip install 'cellfeed[hvg]'`"
        )
        raise ParameterError(msg) from error
    selected = require_genes(collection, element)
    batches = Batches.of(selected, batch_key, indices)
    found = sums_of(selected, batches)
    (only,) = selected.elements.values()
    what = f"{selected.locations[0]}: `{only.name}`"
    if found.n_negative:
        msg = f"{what} has {found.n_negative:,} negative values, which are no counts"
        raise ParameterError(f"{msg}; give an `element` that has them")
    if found.n_fractional:
        msg = f"{what} has {found.n_fractional:,} values that are no integers, and so no counts"
        warnings.warn(f"{msg}; give an `element` that has them", UserWarning, stacklevel=2)
    cells_of = np.bincount(batches.codes, minlength=len(batches.names))
    n_cells = cells_of[:, None].astype(np.float64)
    means, variances = _means_and_variances(found.sums, found.squares, n_cells)
    shown = [
        f"{n:,} cells" if name is None else f"batch {name!r} ({n:,} cells)"
        for name, n in zip(batches.names, cells_of.tolist(), strict=True)
    ]
    for k in np.flatnonzero(~(variances > 0).any(axis=1)).tolist():
        remedy = "give cells with counts" if batch_key is None else "leave it out of `indices`"
        raise ParameterError(f"no gene varies in {shown[k]}; {remedy}")
    each_batch = zip(means, variances, shown, strict=True)
    deviations = np.stack([_expected_deviations(*own, span) for own in each_batch])
    clipped = sums_of(selected, batches, deviations * np.sqrt(n_cells) + means)
    standardised = (1 / ((n_cells - 1) * np.square(deviations))) * (
        (n_cells * np.square(means)) + clipped.squares - 2 * clipped.sums * means
    )
    ranks = np.argsort(np.argsort(-standardised, axis=1), axis=1).astype(np.float32)
    chosen = np.ma.masked_greater_equal(ranks, n_top_genes)
    all_means, all_variances = _means_and_variances(
        found.sums.sum(axis=0), found.squares.sum(axis=0), float(n_cells.sum())
    )
    table = pd.DataFrame(
        {
            "means": all_means,
            "variances": all_variances,
            "highly_variable_nbatches": np.count_nonzero(ranks < n_top_genes, axis=0),
            "highly_variable_rank": np.ma.median(chosen, axis=0).filled(np.nan),  # type: ignore[no-untyped-call]
            "variances_norm": standardised.mean(axis=0),
            "highly_variable": False,
        }
    )
    order = ["highly_variable_rank", "highly_variable_nbatches"]
    best = table.sort_values(order, ascending=[True, False], na_position="last").index
    table.loc[best[:n_top_genes], "highly_variable"] = True
    if batch_key is None:
        table = table.drop(columns="highly_variable_nbatches")
    return table.set_axis(pd.Index(only.column_names), axis=0)


def _means_and_variances(sums: Floats, squares: Floats, n_cells: Any) -> tuple[Floats, Floats]:
    """Return means, and unbiased variances, in the order of operations of scanpy."""
    means = sums / n_cells
    return means, (squares / n_cells - means**2) * (n_cells / np.maximum(n_cells - 1, 1))


def _expected_deviations(means: Floats, variances: Floats, shown: str, span: float) -> Floats:
    """Return the standard deviation of each gene that is expected by its mean.

    Local regression (loess, degree 2) of log10 of the variance on log10 of the mean.
    """
    from skmisc.loess import loess  # noqa: PLC0415

    varies = variances > 0
    n_genes, expected = int(np.count_nonzero(varies)), np.zeros_like(means)
    failure = "too few genes"
    if n_genes * span >= 1:  # with none, the library ends the process
        model = loess(np.log10(means[varies]), np.log10(variances[varies]), span=span, degree=2)
        try:
            model.fit()
            expected[varies] = model.outputs.fitted_values
            return np.sqrt(10**expected)
        except ValueError as error:
            failure = one_line(error)
    msg = (
        f"the regression of the variances of {n_genes:,} genes in {shown} fails ({failure}); give "
        "a larger `span`, or leave out small batches with `indices`"
    )
    raise ParameterError(msg)
