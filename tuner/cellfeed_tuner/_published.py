"""The measurements behind the figures of the scDataset paper."""

from importlib import resources

import pandas as pd

__all__ = ["published_grid"]


def published_grid() -> pd.DataFrame:
    """Return what the scDataset paper measured on Tahoe-100M over its grid.

    14 AnnData files, one plate each, minibatches of 64, one core, a SATA SSD; one run of 120 s
    per row. At fetch factor 1024 such a run holds 1 to 8 fetches, so those throughputs are
    rough; the entropies are means over many minibatches.

    Returns
    -------
    Columns ``loader``, ``strategy``, ``block_size`` and ``fetch_factor`` (missing where a loader
    has none), ``cells_per_second``, ``entropy_bits`` (mean over minibatches of the plate's
    entropy) and ``entropy_bits_std`` (its standard deviation).
    """
    with resources.files("cellfeed_tuner").joinpath("data/published_tahoe_grid.csv").open() as file:
        return pd.read_csv(file)
