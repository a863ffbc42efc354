"""Highly variable genes, by the formulas of scanpy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cellfeed.collection import Collection
from cellfeed.extending import ParameterError, one_line, pd, require_one_of, require_positive
from cellfeed.genes._sums import N_LARGEST, Batches, Sums, require_genes, sums_of
from cellfeed.transforms import Transform

Flavor = Literal["seurat_v3", "seurat_v3_paper", "seurat", "cell_ranger"]
Floats = NDArray[np.float64]

# The median absolute deviation of a normal distribution with variance 1, as in statsmodels.
_NORMAL_MAD = 0.6744897501960817
_LEAST_MEAN = 1e-12  # in place of 0, as in scanpy


def highly_variable_genes(
    collection: Collection,
    *,
    n_top_genes: int = 2000,
    flavor: Flavor = "seurat_v3",
    batch_key: str | None = None,
    element: str | None = None,
    indices: ArrayLike | None = None,
    transform: Transform | Sequence[Transform] | None = None,
    span: float = 0.3,
    n_bins: int = 20,
    num_threads: int | None = None,
) -> pd.DataFrame:
    """Find highly variable genes, like `scanpy.pp.highly_variable_genes`, without loading cells.

    One pass over the cells takes the sums from which all else follows (float64); later calls find
    them in the user's cache, as long as the files stay the same. This takes up to 500 bytes for
    each gene and batch, some 20 for each cell, and memory for two fetches of 64 MiB.
    ``"seurat_v3"`` clips large values at limits that depend on all cells. The 16 largest values of
    each gene and batch are kept for that; if more of them must be clipped, the cells are read once
    more.

    Parameters
    ----------
    collection
        The collection.
    n_top_genes
        Number of genes to select.
    flavor
        The method. ``"seurat_v3"`` (Stuart et al., Cell 177, 2019) takes counts, and needs
        scikit-misc (``pip install 'cellfeed[hvg]'``); with a ``batch_key``, it sorts genes by their
        median rank, and ``"seurat_v3_paper"`` by the number of batches first. ``"seurat"`` (Satija
        et al., Nat. Biotechnol. 33, 2015) and ``"cell_ranger"`` (Zheng et al., Nat. Commun. 8,
        2017) take log-normalised values.
    batch_key
        Name of an obs column. Genes are ranked in each batch, and ranks are combined.
    element
        Name of the element, such as ``"layers/counts"``; the first one if None.
    indices
        Rows of the cells, such as those of a training set; all cells if None.
    transform
        Applied first, in the threads that read: ``[NormalizeTotal(1e4), Log1p()]`` of
        `cellfeed.transforms` makes log-normalised values of counts.
    span
        Share of genes in each local regression of ``"seurat_v3"``.
    n_bins
        Number of bins by mean expression of ``"seurat"``.
    num_threads
        Number of threads that read, and of those that sum. If None, the number of processors
        available to this process.

    Returns
    -------
    A table of genes, indexed by their names, with the columns that scanpy adds to ``var``:
    ``highly_variable``; ``means``; ``variances``, ``variances_norm`` and ``highly_variable_rank``
    or, of log-normalised values, ``dispersions`` and ``dispersions_norm``; and, with a
    ``batch_key``, ``highly_variable_nbatches`` and, of log-normalised values,
    ``highly_variable_intersection``.

    Raises
    ------
    FormatError
        A value is NaN or infinite, or a file is damaged.
    ParameterError
        A parameter is invalid; scikit-misc is needed and not installed; or values do not suit the
        method: counts are negative, no gene varies in a batch (which has a single cell, or only
        zeros), the regression fails, or bins are not distinct.
    ColumnError
        obs has no such column, or a cell has no value there.

    Warns
    -----
    UserWarning
        Values are no integers where counts are expected, or all are integers where they should be
        log-normalised.

    Examples
    --------
    >>> import anndata
    >>> from cellfeed import open_collection
    >>> from cellfeed.transforms import Log1p
    >>> X = np.random.default_rng(0).poisson(1.0, (100, 50)).astype("float32")
    >>> X[:, 7] = 10 * (np.arange(100) % 10 == 0)
    >>> table = highly_variable_genes(
    ...     open_collection(anndata.AnnData(X)), n_top_genes=1, flavor="seurat", transform=Log1p()
    ... )
    >>> table.index[table["highly_variable"]].tolist()
    ['7']
    """
    require_one_of("flavor", flavor, get_args(Flavor))
    n_top_genes = require_positive("n_top_genes", n_top_genes)
    n_bins = require_positive("n_bins", n_bins)
    given: Any = span
    if not isinstance(given, int | float | np.floating) or not 0 < given <= 1:
        raise ParameterError(f"`0 < span <= 1` must hold, but got span={span!r}")
    are_counts = flavor.startswith("seurat_v3")
    if are_counts:
        _require_loess(flavor)
    selected = require_genes(collection, element)
    batches = Batches.of(selected, batch_key, indices)

    def sums(limits: Floats | None = None) -> Sums:
        return sums_of(
            selected,
            batches,
            transform=transform,
            are_logs=flavor == "seurat",
            limits=limits,
            n_largest=N_LARGEST if are_counts else 0,
            num_threads=num_threads,
        )

    found = sums()
    (only,) = selected.elements.values()
    _tell_of_values(found, f"{selected.locations[0]}: `{only.name}`", flavor)
    if are_counts:
        table = _by_regression(found, batches, span, n_top_genes, flavor, sums)
    else:
        table = _by_dispersion(found, batches, n_bins, n_top_genes, flavor)
    if batch_key is None:
        table = table.drop(columns="highly_variable_nbatches", errors="ignore")
    return table.set_axis(pd.Index(only.column_names), axis=0)


def _require_loess(flavor: str) -> None:
    try:
        import skmisc.loess  # noqa: F401, PLC0415
    except ImportError as error:
        msg = (
            f"flavor={flavor!r} needs scikit-misc, which is not installed; install it with "
            "`pip install 'cellfeed[hvg]'`, or use another flavor"
        )
        raise ParameterError(msg) from error


def _tell_of_values(sums: Sums, what: str, flavor: str) -> None:
    """Raise an error, or warn, if values do not suit the method."""
    if flavor.startswith("seurat_v3"):
        if sums.n_negative:
            msg = f"{what} has {sums.n_negative:,} negative values, but {flavor!r} takes counts"
            raise ParameterError(f"{msg}; give an `element` that has them")
        if sums.n_fractional:
            msg = (
                f"{what} has {sums.n_fractional:,} values that are no integers, but {flavor!r} "
                "takes counts; give an `element` that has them, or flavor='seurat'"
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
    elif not sums.n_fractional and sums.counts.any():
        msg = (
            f"{what} has integers only, but {flavor!r} takes log-normalised values; give "
            "transform=[NormalizeTotal(1e4), Log1p()]"
        )
        if not np.isfinite(sums.whole_squares).all():
            raise ParameterError(f"{msg}: their exponentials are infinite")
        warnings.warn(msg, UserWarning, stacklevel=3)


def _means_and_variances(sums: Floats, squares: Floats, n_cells: Any) -> tuple[Floats, Floats]:
    """Return means, and unbiased variances, in the order of operations of scanpy."""
    means = sums / n_cells
    return means, (squares / n_cells - means**2) * (n_cells / np.maximum(n_cells - 1, 1))


# Counts: variances of values that are standardised by a regression on the mean.


def _by_regression(
    found: Sums, batches: Batches, span: float, n_top_genes: int, flavor: str, sums: Any
) -> pd.DataFrame:
    whole_sums, whole_squares = found.whole_sums, found.whole_squares
    n_cells = found.n_cells[:, None].astype(np.float64)
    means, variances = _means_and_variances(whole_sums, whole_squares, n_cells)
    _require_variance(variances, batches, found)
    deviations = np.stack(
        [
            _expected_deviations(means[k], variances[k], span, _shown(batches, found, k))
            for k in range(len(n_cells))
        ]
    )
    limits = deviations * np.sqrt(n_cells) + means
    n_clipped = np.count_nonzero(found.largest > limits[..., None], axis=-1)
    if (n_clipped < found.largest.shape[-1]).all():
        largest = np.minimum(found.largest, limits[..., None])
        clipped_sums = found.sums + largest.sum(axis=-1)
        clipped_squares = found.squares + np.square(largest).sum(axis=-1)
    else:
        clipped = sums(limits)
        clipped_sums, clipped_squares = clipped.whole_sums, clipped.whole_squares
    standardised = (1 / ((n_cells - 1) * np.square(deviations))) * (
        (n_cells * np.square(means)) + clipped_squares - 2 * clipped_sums * means
    )
    ranks = np.argsort(np.argsort(-standardised, axis=1), axis=1).astype(np.float32)
    n_batches = np.count_nonzero(ranks < n_top_genes, axis=0)
    chosen = np.ma.masked_greater_equal(ranks, n_top_genes)
    rank = np.ma.median(chosen, axis=0).filled(np.nan)  # type: ignore[no-untyped-call]
    all_means, all_variances = _means_and_variances(
        whole_sums.sum(axis=0), whole_squares.sum(axis=0), float(n_cells.sum())
    )
    table = pd.DataFrame(
        {
            "means": all_means,
            "variances": all_variances,
            "highly_variable_nbatches": n_batches,
            "highly_variable_rank": rank,
            "variances_norm": standardised.mean(axis=0),
            "highly_variable": False,
        }
    )
    order = ["highly_variable_rank", "highly_variable_nbatches"]
    ascending = [True, False]
    if flavor == "seurat_v3_paper":
        order, ascending = order[::-1], ascending[::-1]
    best = table.sort_values(order, ascending=ascending, na_position="last").index[:n_top_genes]
    table.loc[best, "highly_variable"] = True
    return table


def _require_variance(variances: Floats, batches: Batches, sums: Sums) -> None:
    """Check that a gene varies in each batch, which therefore has two cells, and some counts."""
    for k in np.flatnonzero(~(variances > 0).any(axis=1)).tolist():
        is_all = batches.names[k] is None
        remedy = "give cells with counts" if is_all else "leave it out of `indices`"
        raise ParameterError(f"no gene varies in {_shown(batches, sums, k)}; {remedy}")


def _shown(batches: Batches, sums: Sums, batch: int) -> str:
    name, n_cells = batches.names[batch], int(sums.n_cells[batch])
    return f"{n_cells:,} cells" if name is None else f"batch {name!r} ({n_cells:,} cells)"


def _expected_deviations(means: Floats, variances: Floats, span: float, shown: str) -> Floats:
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


# Log-normalised values: dispersions, standardised among genes of similar mean.


def _by_dispersion(
    found: Sums, batches: Batches, n_bins: int, n_top_genes: int, flavor: str
) -> pd.DataFrame:
    means, variances = _means_and_variances(
        found.whole_sums, found.whole_squares, found.n_cells[:, None].astype(np.float64)
    )
    _require_variance(variances, batches, found)

    def standardised(k: int, genes: NDArray[np.intp] | slice) -> pd.DataFrame:
        shown = _shown(batches, found, k)
        return _standardised(
            means[k, genes], variances[k, genes], n_bins, n_top_genes, flavor, shown
        )

    if len(batches.names) == 1 and batches.names[0] is None:
        return standardised(0, slice(None))
    tables = list[pd.DataFrame]()
    for k in range(len(batches.names)):
        genes = np.flatnonzero(found.counts[k])
        own = standardised(k, genes).astype({"highly_variable": int})
        own.index = pd.Index(genes)
        tables.append(own.reindex(np.arange(means.shape[1]), fill_value=0))
    table = (
        pd.concat(tables)
        .groupby(level=0)
        .agg(
            {"means": "mean", "dispersions": "mean", "dispersions_norm": "mean"}
            | {"highly_variable": "sum"}
        )
    )
    table["highly_variable_nbatches"] = table["highly_variable"]
    table["highly_variable_intersection"] = table["highly_variable"] == len(tables)
    best = table.sort_values(
        ["highly_variable_nbatches", "dispersions_norm"], ascending=False, na_position="last"
    ).index[:n_top_genes]
    table["highly_variable"] = table.index.isin(best)
    return table


def _standardised(
    means: Floats, variances: Floats, n_bins: int, n_top_genes: int, flavor: str, shown: str
) -> pd.DataFrame:
    means = np.where(means == 0, _LEAST_MEAN, means)
    dispersions = variances / means
    bins: Any = n_bins
    if flavor == "seurat":
        dispersions = np.log(np.where(dispersions == 0, np.nan, dispersions))
        means = np.log1p(means)
    else:
        bins = np.r_[-np.inf, np.percentile(means, np.arange(10, 105, 5)), np.inf]
        if np.unique(bins).size < bins.size:
            msg = (
                f"'cell_ranger' bins {means.size:,} genes by percentiles of their means in "
                f"{shown}, but too many means are the same "
                f"({np.count_nonzero(means == _LEAST_MEAN):,} are 0); open the collection with the "
                "`genes` that have counts, or use another flavor"
            )
            raise ParameterError(msg)
    table = pd.DataFrame({"means": means, "dispersions": dispersions})
    bin_of = pd.cut(table["means"], bins=bins)
    grouped = table["dispersions"].groupby(bin_of, observed=True)
    if flavor == "seurat":
        centre, scale = grouped.transform("mean"), grouped.transform("std")
        is_alone = scale.isna()  # a bin with one gene, whose value becomes 1
        centre, scale = centre.mask(is_alone, 0), scale.mask(is_alone, centre)
    else:
        centre = grouped.transform("median")
        deviations = (table["dispersions"] - centre).abs().groupby(bin_of, observed=True)
        scale = deviations.transform("median") / _NORMAL_MAD
    standardised = (table["dispersions"] - centre) / scale
    known = np.sort(standardised.dropna())
    least = known[-min(n_top_genes, known.size)] if known.size else np.inf
    table["dispersions_norm"] = standardised
    table["highly_variable"] = standardised.fillna(-np.inf) >= least
    return table
