"""Find the fastest loader, with its settings, for some plates on this machine.

python -m bench.tunables PLATE... --label plate
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
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
from cellfeed_tuner._constants import DEFAULT_BUDGET_SECONDS, DEFAULT_ENTROPY_FLOOR
from cellfeed_tuner._interval import interval

# The loaders to try; None is cellfeed's own.
LOADERS: dict[str, type[OfPlates] | None] = {
    "cellfeed": None,
    "scDataset": ScDataset,
    "annbatch": Annbatch,
    "TileDB-SOMA-ML": TileDBSOMAML,
    "AnnLoader": AnnLoader,
    "DataLoader": PlainDataLoader,
}


@click.command()
@click.argument("plates", nargs=-1, required=True, metavar="PLATE.h5ad...",
                type=click.Path(exists=True, dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--label", required=True, help="obs column to mix minibatches by.")
@click.option("--batch-size", default=64, show_default=True, help="Cells of a minibatch.")
@click.option("--budget", default=DEFAULT_BUDGET_SECONDS, show_default=True,
              help="Seconds for each loader.")  # fmt: skip
@click.option("--entropy-floor", default=DEFAULT_ENTROPY_FLOOR, show_default=True,
              help="Least entropy, as a share of true random sampling's.")  # fmt: skip
@click.option("--loader", "names", multiple=True, type=click.Choice(list(LOADERS)),
              help="A loader to try; default: all that are installed.")  # fmt: skip
@click.option("--annbatch-store", type=click.Path(exists=True, path_type=Path),
              help="Store of the same cells, written by annbatch.")  # fmt: skip
@click.option("--soma-experiment", type=click.Path(exists=True, path_type=Path),
              help="Experiment of the same cells.")  # fmt: skip
def main(
    plates: tuple[Path, ...],
    *,
    label: str,
    batch_size: int,
    budget: float,
    entropy_floor: float,
    names: tuple[str, ...],
    annbatch_store: Path | None,
    soma_experiment: Path | None,
) -> None:
    """Tune each installed loader over the same cells, and print the results."""
    stores = {"annbatch": annbatch_store, "TileDB-SOMA-ML": soma_experiment}
    found = dict[str, AutotuneResult]()
    for name in names or LOADERS:
        kind, store = LOADERS[name], stores.get(name)
        if kind is not None and kind.missing():
            packages = " ".join(kind.missing()).replace("_", "-")
            reason = f"skipped, not installed; install it: pip install {packages}"
            click.echo(f"{name}: {reason}", err=True)
            continue
        if kind is not None and kind.store_option and store is None:
            reason = f"skipped, needs its own copy of the cells; give {kind.store_option}"
            click.echo(f"{name}: {reason}", err=True)
            continue
        common: dict[str, Any] = {"budget": budget, "entropy_floor": entropy_floor}
        try:
            if kind is None:
                collection = open_collection([*map(str, plates)], obs=[label])
                found[name] = autotune(collection, label=label, batch_size=batch_size, **common)
            else:
                loader = kind(plates, label, batch_size=batch_size, store=store)
                found[name] = autotune(loader, **common)
        except CellfeedError as error:
            click.echo(f"{name}: {error}", err=True)
    click.echo(table(found))


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


if __name__ == "__main__":
    main()
