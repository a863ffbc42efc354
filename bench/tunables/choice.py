"""Tune one loader after the other over the same cells, and report which is the fastest."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.tunables.loaders import (
    Annbatch,
    AnnLoader,
    OfPlates,
    PlainDataLoader,
    ScDataset,
    TileDBSOMAML,
)
from cellfeed import CellfeedError, open_collection
from cellfeed_tuner import AutotuneResult, autotune
from cellfeed_tuner._interval import interval

__all__ = ["LOADERS", "table", "tuned"]

LOADERS: dict[str, type[OfPlates] | None] = {
    "cellfeed": None,
    "scDataset": ScDataset,
    "annbatch": Annbatch,
    "TileDB-SOMA-ML": TileDBSOMAML,
    "AnnLoader": AnnLoader,
    "DataLoader": PlainDataLoader,
}
"""The loaders to try; None is cellfeed's own."""


def tuned(
    plates: Sequence[Path],
    label: str,
    *,
    names: Sequence[str],
    stores: Mapping[str, Path | None],
    batch_size: int,
    budget: float,
    entropy_floor: float,
    say: Callable[[str], object],
) -> dict[str, AutotuneResult]:
    """Return the result of ``autotune`` for each loader that is installed.

    Parameters
    ----------
    plates, label, batch_size
        The files, the obs column to mix minibatches by, and cells of a minibatch.
    names
        Of `LOADERS`.
    stores
        Where copies of the files lie, by the name of the loader that reads one.
    budget, entropy_floor
        As in ``autotune``, for each.
    say
        Called with the reason if a loader is skipped, or failed.
    """
    found = dict[str, AutotuneResult]()
    for name in names:
        kind, store = LOADERS[name], stores.get(name)
        if kind is not None and kind.missing():
            packages = " ".join(kind.missing()).replace("_", "-")
            say(f"{name}: skipped, not installed; install it: pip install {packages}")
            continue
        if kind is not None and kind.store_option and store is None:
            say(f"{name}: skipped, needs its own copy of the cells; give {kind.store_option}")
            continue
        try:
            if kind is None:
                collection = open_collection([*map(str, plates)], obs=[label])
                found[name] = autotune(
                    collection, label=label, batch_size=batch_size, budget=budget,
                    entropy_floor=entropy_floor,
                )  # fmt: skip
            else:
                loader = kind(plates, label, batch_size=batch_size, store=store)
                found[name] = autotune(loader, budget=budget, entropy_floor=entropy_floor)
        except CellfeedError as error:
            say(f"{name}: {error}")
    return found


def table(results: Mapping[str, AutotuneResult]) -> str:
    """Return a line for each loader, the fastest first, as Markdown."""
    lines = [
        "| loader | settings | cells/s [95 % interval] | of random sampling's entropy | memory |",
        "|---|---|---|---|---|",
    ]

    def speed(result: AutotuneResult) -> float:
        found = result.recommended and result.recommended.cells_per_second
        return found.value if found else 0.0

    for name, result in sorted(results.items(), key=lambda each: -speed(each[1])):
        chosen, known = result.recommended, result.chosen
        if chosen is None or known is None:
            nearest = f"; nearest: {result.nearest.problem}" if result.nearest else ""
            lines.append(f"| {name} | none is feasible{nearest} | | | |")
            continue
        memory = f"{(chosen.peak_memory_bytes or 0) / 1e6:,.0f} MB"
        share = f"{known.least_mixed.share_of_random:.1%}"
        shown = interval(chosen.cells_per_second) if chosen.cells_per_second else "predicted"
        lines.append(f"| {name} | {chosen.settings} | {shown} | {share} | {memory} |")
    return "\n".join(lines)
