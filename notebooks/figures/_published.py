"""The measurements behind the figures of the scDataset paper."""

from pathlib import Path

import pandas as pd

__all__ = ["published_grid", "published_macro_f1", "published_workers"]


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
    return _table("published_tahoe_grid.csv")


def published_workers() -> pd.DataFrame:
    """Return what the scDataset paper measured on Tahoe-100M with worker processes (Table 2).

    The collection and machine of `published_grid`, with 4 to 16 workers, each with its own buffer
    of ``fetch_factor`` minibatches; one run of 120 s per row.

    Returns
    -------
    The columns of `published_grid`, and ``num_workers`` (missing for AnnLoader).
    """
    return _table("published_tahoe_workers.csv")


def published_macro_f1() -> pd.DataFrame:
    """Return the scores of the scDataset paper's linear classifiers on Tahoe-100M (Figure 5).

    Trained for one epoch with Adam on plates 1 to 13, minibatches of 64, and tested on plate
    14. The buffer of streaming, and a fetch of block shuffling (block size 16), are 256
    minibatches.

    Returns
    -------
    Columns ``task`` (``cell_line``, ``drug``, ``moa_broad`` and ``moa_fine``), ``strategy``
    (``streaming``, ``streaming with buffer``, ``block shuffling`` and ``random``), ``macro_f1``
    (mean over runs), ``std`` (standard deviation over runs) and ``runs`` (their number, one for
    each seed).
    """
    names = {"streaming_buffer": "streaming with buffer", "block_16_fetch_256": "block shuffling"}
    return _table("published_macro_f1.csv").replace({"strategy": names})


def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(Path(__file__).parent / "data" / name)
