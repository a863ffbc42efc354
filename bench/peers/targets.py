"""cellfeed's targets, and whether they were reached."""

from dataclasses import dataclass

from conversions import Store
from entries import cellfeed_name, decompression
from rounds import Estimate, Results, fastest, median_with_interval, ratio


@dataclass(frozen=True)
class Verdict:
    """Whether a target was reached.

    Attributes
    ----------
    text
        The target in words.
    against
        The other side of the ratio.
    ratio
        The measured ratio; None if not measured.
    verdict
        In words.
    """

    text: str
    against: str
    ratio: Estimate | None
    verdict: str


# Each with cellfeed's entry, how the names of the others begin (the fastest of them is the other
# side of the ratio), and the least ratio of speeds.
OF_SPEED = (
    ("on plates, blocks of 16, CSR: at least 14 x scDataset",
     cellfeed_name("h5ad", 16, 256, "CSR"), "scDataset, block 16, fetch 256, CSR", 14),
    ("on plates, blocks of 16 aligned with chunks, CSR: at least 17 x scDataset",
     cellfeed_name("h5ad", 16, 256, "CSR", aligned=True),
     "scDataset, block 16, fetch 256, CSR", 17),
    ("on plates, blocks of 16, dense: at least 12 x scDataset",
     cellfeed_name("h5ad", 16, 256, "dense"), "scDataset, block 16, fetch 256, dense", 12),
    ("on plates, single cells: at least 30 x AnnLoader",
     cellfeed_name("h5ad", 1, 256, "CSR"), "AnnLoader, CSR", 30),
    ("on plates, blocks of 256: at least 1.3 x annbatch on its own store with its defaults",
     cellfeed_name("h5ad", 256, 256, "CSR"),
     "annbatch, chunk 512, preload 32, CSR (defaults but", 1.3),
    ("on annbatch's store, with its defaults: at least 1.5 x annbatch",
     cellfeed_name("annbatch", 512, 256, "CSR"),
     "annbatch, chunk 512, preload 32, CSR (defaults but", 1.5),
    # Each chunk once: bytes decompressed but not delivered count as a loss.
    ("on plates, blocks of 256: at least 0.85 of decompressing each chunk once",
     cellfeed_name("h5ad", 256, 256, "CSR"), decompression("h5ad"), 0.85),
    ("on plates, blocks of 16: at least 0.8 of decompressing each chunk once",
     cellfeed_name("h5ad", 16, 256, "CSR"), decompression("h5ad"), 0.8),
    ("on a preshuffled store, blocks of 512: faster than cellstream's random cells",
     cellfeed_name("delta", 512, 256, "CSR"), "cellstream, ", 1),
    ("on a preshuffled store, single cells: at least 0.7 of cellstream's rate",
     cellfeed_name("delta", 1, 256, "CSR"), "cellstream, ", 0.7),
    ("on cellstream's archive, single cells: at least 0.8 of cellstream's rate",
     cellfeed_name("cellstream", 1, 256, "CSR"), "cellstream, ", 0.8),
)  # fmt: skip
# Each with a figure of a conversion, and the largest ratio to annbatch's.
OF_CONVERSION = (
    ("preshuffle: at most a quarter of the time of annbatch", "seconds", 0.25),
    ("preshuffle: no more memory than annbatch", "peak_bytes", 1.0),
)


def verdicts(results: Results, stores: dict[str, Store]) -> list[Verdict]:
    """Compare every target with the measurements."""
    found = []
    for text, own, others, least in OF_SPEED:
        rivals = [name for name in results if name.startswith(others)]
        ours, theirs = fastest([own], results), fastest(rivals, results)
        measured = None if ours is None or theirs is None else ratio(ours, theirs)
        against = "" if theirs is None else theirs.entry.name
        found.append(_verdict(text, against, measured, least, most=float("inf")))
    for text, figure, most in OF_CONVERSION:
        runs = [stores[name].runs if name in stores else [] for name in ("cellfeed", "annbatch")]
        ratios = [our[figure] / their[figure] for our, their in zip(*runs, strict=False)]
        against = stores["annbatch"].conversion.title if ratios else ""
        found.append(_verdict(text, against, median_with_interval(ratios), 0.0, most=most))
    return found


def _verdict(
    text: str, against: str, measured: Estimate | None, least: float, *, most: float
) -> Verdict:
    if measured is None:
        return Verdict(text, "", None, "not measured")
    held = [least <= each <= most for each in (measured.low, measured.value, measured.high)]
    words = "reached" if held[1] else "not reached"
    is_open = measured.n_samples > 1 and len(set(held)) > 1
    return Verdict(
        text, against, measured, f"{words}, but within the interval" if is_open else words
    )
