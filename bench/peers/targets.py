"""cellfeed's targets, and whether they were reached."""

from collections.abc import Callable
from dataclasses import dataclass

from conversions import Store
from entries import Entry, cellfeed_name, decompression
from rounds import Estimate, Results, fastest, median_with_interval, ratio


@dataclass(frozen=True)
class SpeedTarget:
    """A least ratio of speeds.

    Attributes
    ----------
    text
        The target in words.
    ours
        Name of cellfeed's entry.
    theirs
        Selects the entries; the fastest of them is the other side of the ratio.
    least
        The ratio.
    """

    text: str
    ours: str
    theirs: Callable[[Entry], bool]
    least: float


@dataclass(frozen=True)
class ConversionTarget:
    """A largest ratio of conversion costs.

    Attributes
    ----------
    text
        The target in words.
    figure
        "seconds" or "peak_bytes".
    most
        The ratio.
    """

    text: str
    figure: str
    most: float


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


def _scdataset(block_size: int, output: str) -> Callable[[Entry], bool]:
    return lambda entry: (
        entry.peer == "scdataset"
        and entry.settings["block_size"] == block_size
        and entry.output == output
    )


def _annbatch_defaults(entry: Entry) -> bool:
    settings = entry.settings
    return (
        entry.peer == "annbatch"
        and entry.storage == "annbatch"
        and entry.batch_size > 1
        and (settings["chunk_size"], entry.output) == (512, "CSR")
    )


def _named(name: str) -> Callable[[Entry], bool]:
    return lambda entry: entry.name == name


def _cellstream(entry: Entry) -> bool:
    return entry.peer == "cellstream"


SPEED_TARGETS = (
    SpeedTarget(
        "on plates, blocks of 16, CSR: at least 14 x scDataset",
        cellfeed_name("h5ad", 16, 256, "CSR"), _scdataset(16, "CSR"), 14,
    ),
    SpeedTarget(
        "on plates, blocks of 16 aligned with chunks, CSR: at least 17 x scDataset",
        cellfeed_name("h5ad", 16, 256, "CSR", aligned=True), _scdataset(16, "CSR"), 17,
    ),
    SpeedTarget(
        "on plates, blocks of 16, dense: at least 12 x scDataset",
        cellfeed_name("h5ad", 16, 256, "dense"), _scdataset(16, "dense"), 12,
    ),
    SpeedTarget(
        "on plates, single cells: at least 30 x AnnLoader",
        cellfeed_name("h5ad", 1, 256, "CSR"), _named("AnnLoader, CSR"), 30,
    ),
    SpeedTarget(
        "on plates, blocks of 256: at least 1.3 x annbatch on its own store with its defaults",
        cellfeed_name("h5ad", 256, 256, "CSR"), _annbatch_defaults, 1.3,
    ),
    SpeedTarget(
        "on annbatch's store, with its defaults: at least 1.5 x annbatch",
        cellfeed_name("annbatch", 512, 256, "CSR"), _annbatch_defaults, 1.5,
    ),
    # Each chunk once: bytes decompressed but not delivered count as a loss.
    SpeedTarget(
        "on plates, blocks of 256: at least 0.85 of decompressing each chunk once",
        cellfeed_name("h5ad", 256, 256, "CSR"), _named(decompression("h5ad")), 0.85,
    ),
    SpeedTarget(
        "on plates, blocks of 16: at least 0.8 of decompressing each chunk once",
        cellfeed_name("h5ad", 16, 256, "CSR"), _named(decompression("h5ad")), 0.8,
    ),
    SpeedTarget(
        "on a preshuffled store, blocks of 512: faster than cellstream's random cells",
        cellfeed_name("delta", 512, 256, "CSR"), _cellstream, 1,
    ),
    SpeedTarget(
        "on a preshuffled store, single cells: at least 0.7 of cellstream's rate",
        cellfeed_name("delta", 1, 256, "CSR"), _cellstream, 0.7,
    ),
    SpeedTarget(
        "on cellstream's archive, single cells: at least 0.8 of cellstream's rate",
        cellfeed_name("cellstream", 1, 256, "CSR"), _cellstream, 0.8,
    ),
)  # fmt: skip
CONVERSION_TARGETS = (
    ConversionTarget("preshuffle: at most a quarter of the time of annbatch", "seconds", 0.25),
    ConversionTarget("preshuffle: no more memory than annbatch", "peak_bytes", 1.0),
)


def verdicts(results: Results, stores: dict[str, Store]) -> list[Verdict]:
    """Compare every target with the measurements."""
    return [
        *(_of_speed(target, results) for target in SPEED_TARGETS),
        *(_of_conversion(target, stores) for target in CONVERSION_TARGETS),
    ]


def _of_speed(target: SpeedTarget, results: Results) -> Verdict:
    rivals = [name for name, result in results.items() if target.theirs(result.entry)]
    ours, theirs = fastest([target.ours], results), fastest(rivals, results)
    measured = None if ours is None or theirs is None else ratio(ours, theirs)
    if measured is None:
        return Verdict(target.text, "", None, "not measured")
    verdict = _verdict(
        measured,
        reached=measured.value >= target.least,
        is_sure=measured.low >= target.least or measured.high < target.least,
    )
    return Verdict(target.text, theirs.entry.name, measured, verdict)


def _of_conversion(target: ConversionTarget, stores: dict[str, Store]) -> Verdict:
    ours, theirs = stores.get("cellfeed"), stores.get("annbatch")
    pairs = [] if ours is None or theirs is None else zip(ours.runs, theirs.runs, strict=False)
    measured = median_with_interval(
        [our[target.figure] / their[target.figure] for our, their in pairs]
    )
    if measured is None:
        return Verdict(target.text, "", None, "not measured")
    verdict = _verdict(
        measured,
        reached=measured.value <= target.most,
        is_sure=measured.high <= target.most or measured.low > target.most,
    )
    return Verdict(target.text, theirs.conversion.title, measured, verdict)


def _verdict(measured: Estimate, *, reached: bool, is_sure: bool) -> str:
    words = "reached" if reached else "not reached"
    is_open = measured.n_samples > 1 and not is_sure
    return f"{words}, but within the interval" if is_open else words
