"""Compare cellfeed with other loaders on the same cells.

``python bench/peers/compare.py --collection FOLDER --output FOLDER`` makes an environment for
each peer and the stores that some of them need, checks what each loader delivers, times all of
them in interleaved rounds, and writes tables and a picture.
"""

import datetime as dt
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import psutil
import table
from collection import Collection, open_collection
from conversions import CONVERSIONS, Stores
from entries import PROCESSES, Entry, all_entries
from processes import DEFAULT_FOLDER, Interpreters, say
from rounds import Plan, Result, Runner, measuring_code
from targets import verdicts

from cellfeed import ParameterError
from cellfeed.console import OneLineErrorCommand

ROOT = Path(__file__).parents[2]


@click.command(cls=OneLineErrorCommand)
@click.option(
    "--collection",
    "folder",
    required=True,
    type=click.Path(path_type=Path),
    help="Folder of gzip .h5ad plates.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, resolve_path=True),
    help="Folder for tables, picture, logs and stores.",
)
@click.option("--rounds", "n_rounds", default=5, show_default=True, help="Timed rounds.")
@click.option("--seconds", default=10.0, show_default=True, help="Seconds timed of each epoch.")
@click.option("--peers", default=None, metavar="A,B", help="Only these peers; default: all.")
@click.option(
    "--label", default="plate", show_default=True, help="obs column that loaders deliver too."
)
@click.option("--only", default="", metavar="REGEX", help="Only rows whose names contain a match.")
@click.option(
    "--conversions",
    "n_conversions",
    default=1,
    show_default=True,
    help="How often to measure each conversion; stores and their times are kept.",
)
@click.option(
    "--timeout", default=300.0, show_default=True, help="Seconds after which a job is ended."
)
@click.option(
    "--seed", default=0, show_default=True, help="Seed of the order of entries and of loaders."
)
@click.option(
    "--environments",
    default=DEFAULT_FOLDER,
    type=click.Path(path_type=Path),
    help="Folder of the peers' virtual environments; default: .peers in the repository.",
)
@click.option(
    "--python312",
    default=None,
    type=click.Path(path_type=Path),
    help="A Python 3.12, if neither PATH nor pyenv has one.",
)
def main(
    *,
    folder: Path,
    peers: str | None,
    only: str,
    label: str,
    environments: Path,
    python312: Path | None,
    **settings: Any,
) -> None:
    """Compare cellfeed with other loaders on the same cells."""
    entries, plan = choose(peers, only), Plan(**settings)
    for name in ("n_rounds", "seconds", "timeout"):
        value = getattr(plan, name)
        if value <= 0:
            raise ParameterError(f"`--{name.removeprefix('n_')} > 0` must hold, but got {value}")
    say("Reading the collection ...")
    collection = open_collection(folder, label)
    plan.output.mkdir(parents=True, exist_ok=True)
    interpreters = Interpreters(environments, {"3.12": python312} if python312 else {})
    stores = convert(plan, collection, entries, interpreters)
    click.echo(compare(plan, collection, entries, interpreters, stores))


def choose(peers: str | None, only: str) -> list[Entry]:
    """Return the entries of the given peers, separated by commas, whose names match a pattern."""
    entries = all_entries()
    known = sorted({entry.peer for entry in entries})
    wanted = set(known if peers is None else peers.split(","))
    if unknown := sorted(wanted - set(known)):
        raise ParameterError(f"peers are {', '.join(known)}, but got {', '.join(unknown)}")
    try:
        pattern = re.compile(only)
    except re.error as error:
        raise ParameterError(f"`--only` must be a regular expression, but {error}") from error
    chosen = [entry for entry in entries if entry.peer in wanted and pattern.search(entry.name)]
    if not chosen:
        raise ParameterError(f"`--only` must match rows, but no name matches `{only}`")
    return chosen


def convert(
    plan: Plan, collection: Collection, entries: list[Entry], interpreters: Interpreters
) -> Stores:
    """Make the stores that entries read, in turns, until each was measured often enough."""
    needed = {entry.storage for entry in entries if not entry.is_limit}
    stores = Stores(
        plan.output / "stores", collection, [each for each in CONVERSIONS if each.storage in needed]
    )
    (plan.output / "stores").mkdir(exist_ok=True)
    for number in range(max(1, plan.n_conversions)):
        order = np.random.default_rng([plan.seed, number]).permutation(len(stores.all))
        for store in (list(stores.all.values())[i] for i in order):
            if len(store.runs) <= number and store.error is None:
                stores.make(store, interpreters, plan.output / "logs")
    return stores


def compare(
    plan: Plan,
    collection: Collection,
    entries: list[Entry],
    interpreters: Interpreters,
    stores: Stores,
) -> str:
    """Check and time every entry, and return the tables; results are written after each round."""
    readable = [entry for entry in entries if entry.storage in {*stores.all, "h5ad", None}]
    results = {entry.name: Result(entry) for entry in readable}
    runner = Runner(plan, collection, stores, interpreters)
    runner.check(list(results.values()))
    text = ""
    for number in range(1, plan.n_rounds + 1):
        runner.time(list(results.values()), number)
        run = describe_run(plan, collection, runner, number)
        text = write(plan.output, run, results, stores)
    return text


def describe_run(plan: Plan, collection: Collection, runner: Runner, n_rounds: int) -> dict:
    """Return the circumstances that the tables state."""
    return {
        "collection": collection.describe(),
        "label": collection.label,
        "machine": describe_machine(),
        "date": dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        "rounds": n_rounds,
        "seconds": plan.seconds,
        "seed": plan.seed,
        "cache": runner.cache,
        "code": measuring_code(),
    }


def describe_machine() -> str:
    """Describe the resources that this process may use."""
    return (
        f"{len(os.sched_getaffinity(0))} cores of {processor()}, "
        f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory, "
        f"{platform.system()} {platform.release()}"
    )


def processor() -> str:
    """Return the name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def write(output: Path, run: dict, results: dict[str, Result], stores: Stores) -> str:
    """Write tables, targets and picture, and return the tables as Markdown."""
    rows = table.rows_of(results, stores.all)
    held = verdicts(results, stores.all)
    text = table.markdown(run=run, rows=rows, stores=stores.all)
    (output / "peers.md").write_text(text)
    (output / "targets.md").write_text(table.targets_markdown(run, held))
    table.write_csv(output / "peers.csv", rows)
    table.write_json(
        output / "peers.json",
        run=run,
        rows=rows,
        results=results,
        stores=stores.all,
        verdicts=held,
    )
    _draw(output / "peers.png", rows, run)
    return text


def _draw(path: Path, rows: list[table.Row], run: dict) -> None:
    sys.path.append(str(ROOT))
    from notebooks.figures import loaders_figure  # noqa: PLC0415

    # Rows of worker processes compare cellfeed with no other loader.
    shown = pd.DataFrame(row for row in rows if row["section"] != PROCESSES)
    if shown.loc[shown["peer"] != "machine", "cells_per_s"].notna().any():
        loaders_figure(shown, caption=table.caption(run)).savefig(path)


if __name__ == "__main__":
    main()
