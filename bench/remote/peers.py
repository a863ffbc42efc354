"""Compare other ways to read the same cells over a distance, in interleaved rounds.

``python -m bench.remote.peers FOLDER`` takes the .h5ad plates of a folder, and writes a shuffled
zarr store beside them. It reads both with cellfeed, with slices of blocks through fsspec + h5py
and obstore + zarr-python, and with annbatch if ``--annbatch`` names a Python that has it (as
`bench/peers` makes one). On an object store, fsspec needs s3fs: ``--fsspec`` names a Python with
it.
"""

from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median

import click
from bench._turns import spread
from bench.remote.clients import Client, at_distance, epochs_in_turns, served

from cellfeed import preshuffle


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--annbatch", metavar="PYTHON", help="Interpreter of an environment with annbatch.")
@click.option("--fsspec", metavar="PYTHON", help="Interpreter of one with fsspec, s3fs and h5py.")
@click.option("--target", type=click.Choice(["web", "s3"]), default="web", show_default=True)
@click.option("--round-trips", default="0,50", show_default=True, help="In milliseconds.")
@click.option("--block", default=16, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="Seconds timed of slices.")
@click.option("--rounds", default=3, show_default=True, help="Timed rounds, after an untimed one.")
def main(
    folder: Path,
    annbatch: str | None,
    fsspec: str | None,
    target: str,
    round_trips: str,
    block: int,
    seconds: float,
    rounds: int,
) -> None:
    files = sorted(folder.glob("*.h5ad"))
    store = folder / "shuffled.zarr"
    if not store.exists():
        preshuffle(files, store, seed=0, codec="annbatch")  # which annbatch reads too
    parts = [str(part.relative_to(folder)) for part in sorted(store.glob("dataset_*"))]
    of_store = [file for file in store.rglob("*") if file.is_file()]
    with ExitStack() as opened:
        on_server = opened.enter_context(served(target, folder, [*files, *of_store]))
        clients = dict[tuple[str, str], Client]()
        for round_trip in round_trips.split(","):
            proxy = opened.enter_context(at_distance(on_server, float(round_trip)))
            shared = {
                "options": on_server.options_by(proxy.url),
                "block_size": block,
                "seconds": seconds,
                "prefetch": None,
            }
            plates = on_server.paths(proxy.url, [file.name for file in files])
            datasets = on_server.paths(proxy.url, parts)
            for name, loader, python, paths in (
                ("cellfeed, .h5ad", "cellfeed", None, plates),
                ("fsspec + h5py, .h5ad", "h5py", fsspec, plates),
                ("cellfeed, zarr", "cellfeed", None, datasets),
                ("obstore + zarr-python, zarr", "zarr", None, datasets),
                *([("annbatch, zarr", "annbatch", annbatch, datasets)] if annbatch else []),
            ):
                client = Client(loader, shared | {"paths": paths}, python)
                clients[name, round_trip] = opened.enter_context(closing(client))
        for measured in epochs_in_turns(clients, rounds):
            found = measured
    click.echo(_table(found))


def _table(found: dict[tuple[str, str], list[dict]]) -> str:
    lines = [
        "| loader | round trip | cells/s | cellfeed's speedup | CPU, us/cell | opening |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for (name, round_trip), (opening, _, *rounds) in found.items():
        ours = found[f"cellfeed, {name.rpartition(', ')[2]}", round_trip][2:]
        speeds = [each["n_cells"] / each["seconds"] for each in rounds]
        ratios = [
            each["n_cells"] / each["seconds"] / speed
            for each, speed in zip(ours, speeds, strict=True)
        ]
        cpu = median(each["cpu"] / each["n_cells"] for each in rounds) * 1e6
        faster = "" if name.startswith("cellfeed") else spread(ratios, ".3g")
        lines.append(
            f"| {name} | {round_trip} ms | {spread(speeds)} | {faster} "
            f"| {cpu:,.0f} | {opening['opening']:.1f} s |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
