"""How fast a collection is read over various distances, in interleaved rounds of epochs.

``python -m bench.remote.distances FOLDER`` serves the .h5ad plates of a folder on loopback, adds
0, 10, 50 and 150 ms of round trip before the server, and reads epochs in turns, in persistent
processes. The first epoch of each, in which the number of concurrent requests grows, is reported
separately.
"""

import contextlib
import json
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median

import click
from bench._turns import spread
from bench.remote.clients import Client, at_distance, epochs_in_turns, served

from cellfeed.machine import usable_cores

CAPTION = (
    "Medians of the epochs after the first, with the smallest and largest in brackets; ratios are "
    "taken within rounds."
)
COLUMNS = (
    "server", "round trip", "block", "prefetch", "cells/s", "of 0 ms", "first epoch, cells/s",
    "first minibatch", "requests/s", "bytes/cell", "received / wanted", "CPU of client, us/cell",
    "cores: client", "server", "proxy", "opening",
)  # fmt: skip
Key = tuple[str, float, int, int | None]  # target, round trip in ms (-1: none), block, prefetch


def _numbers(_context: object, _parameter: object, value: str) -> list[int]:
    return [int(each) for each in value.split(",") if each]


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--targets", default="web,s3", show_default=True, help="web, s3, or both.")
@click.option(
    "--round-trips",
    default="0,10,50,150",
    show_default=True,
    callback=_numbers,
    help="In milliseconds.",
)
@click.option("--blocks", default="16,64", show_default=True, callback=_numbers)
@click.option(
    "--prefetches",
    default="1,2,4,16",
    show_default=True,
    callback=_numbers,
    help="In addition to the default of 8, at the longest round trip, with the first block size.",
)
@click.option("--rounds", default=5, show_default=True, help="Timed epochs of each row.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path),
              help="JSON file for all measurements.")  # fmt: skip
def main(
    folder: Path,
    targets: str,
    round_trips: list[int],
    blocks: list[int],
    prefetches: list[int],
    rounds: int,
    output: Path | None,
) -> None:
    files = sorted(folder.glob("*.h5ad"))
    if not files:
        raise click.UsageError(f"{folder}: no .h5ad file; run `cellfeed synthesize {folder}`")
    with ExitStack() as opened:
        clients = _clients(opened, files, targets.split(","), round_trips, blocks, prefetches)
        for measured in epochs_in_turns(clients, rounds):
            if output is not None:
                output.write_text(json.dumps([[key, each] for key, each in measured.items()]))
    click.echo(table(measured))


def _clients(
    opened: ExitStack,
    files: list[Path],
    targets: list[str],
    round_trips: list[int],
    blocks: list[int],
    prefetches: list[int],
) -> dict[Key, Client]:
    """Return a process for each row of the table, already opening the collection."""
    found = dict[Key, Client]()
    local = {"paths": [str(file) for file in files], "options": {}, "prefetch": None}
    for block in blocks:
        found["local", -1, block, None] = _client(opened, local | {"block_size": block})
    for kind in targets:
        target = opened.enter_context(served(kind, files[0].parent, files))
        for round_trip in round_trips:
            proxy = opened.enter_context(at_distance(target, round_trip))
            is_longest = round_trip == max(round_trips)
            depths = [*product(blocks, [None])]
            depths += [*product(blocks[:1], prefetches)] if is_longest else []
            reached = {"paths": target.paths(proxy.url), "options": target.options_by(proxy.url)}
            for block, prefetch in depths:
                settings = reached | {"block_size": block, "prefetch": prefetch}
                found[kind, round_trip, block, prefetch] = _client(opened, settings)
    return found


def _client(opened: ExitStack, settings: dict) -> Client:
    return opened.enter_context(contextlib.closing(Client("cellfeed", settings)))


def table(measured: dict[Key, list[dict]]) -> str:
    """Return the measurements as Markdown."""
    lines = [
        f"{usable_cores():.3g} cores. {CAPTION}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "| --- " * 4 + "| ---: " * 12 + "|",
    ]
    for key, (opening, first, *others) in sorted(measured.items(), key=lambda item: item[0][:3]):
        kind, round_trip, block, prefetch = key
        nearest = measured.get((kind, 0, block, None))
        cells = [
            kind,
            "" if kind == "local" else f"{round_trip:g} ms",
            str(block),
            "default" if prefetch is None else str(prefetch),
            spread([_rate(each) for each in others]),
            "" if nearest is None else spread(
                [_rate(a) / _rate(b) for a, b in zip(others, nearest[2:], strict=True)], ".2f"
            ),
            f"{_rate(first):,.0f}",
            f"{median(each['first'] for each in others):.2f} s",
            f"{median(each['n_requests'] / each['seconds'] for each in others):,.0f}",
            f"{median(each['n_bytes'] / each['n_cells'] for each in others):,.0f}",
            f"{median(each['n_bytes'] / max(1, each['n_wanted']) for each in others):.2f}",
            f"{median(each['cpu'] / each['n_cells'] for each in others) * 1e6:.0f}",
            *(
                f"{median(each[name] / each['seconds'] for each in others):.2f}"
                for name in ("cpu", "cpu_of_server", "cpu_of_proxy")
            ),
            f"{opening['opening']:.1f} s",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _rate(epoch: dict) -> float:
    return float(epoch["n_cells"] / epoch["seconds"])


if __name__ == "__main__":
    main()
