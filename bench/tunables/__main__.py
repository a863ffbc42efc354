"""Find the fastest loader, with its settings, for some plates on this machine.

python -m bench.tunables PLATE... --label plate
"""

from pathlib import Path

import click

from bench.tunables.choice import LOADERS, table, tuned
from cellfeed_tuner._constants import DEFAULT_BUDGET_SECONDS, DEFAULT_ENTROPY_FLOOR


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
    found = tuned(
        plates, label, names=names or tuple(LOADERS), stores=stores, batch_size=batch_size,
        budget=budget, entropy_floor=entropy_floor, say=lambda said: click.echo(said, err=True),
    )  # fmt: skip
    click.echo(table(found))


if __name__ == "__main__":
    main()
