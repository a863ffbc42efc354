"""Who else reads the same cells over a distance? Interleaved rounds, from one web server.

``python -m bench.remote.peers FOLDER`` takes the .h5ad plates of a folder, and writes a shuffled
zarr store beside them; reads both by cellfeed, by slices of blocks through fsspec + h5py and
obstore + zarr-python, and by annbatch where ``--annbatch`` names a Python that has it (as
`bench/peers` makes one).
"""

from contextlib import ExitStack
from pathlib import Path
from statistics import median

import click
import numpy as np
from bench.remote.clients import JOBS, Client, Target, at_distance, client, served

from cellfeed import preshuffle

OURS, SLICES, ANNBATCH = (
    str(JOBS / f"{name}.py") for name in ("read_cellfeed", "read_slices", "read_annbatch")
)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--annbatch", metavar="PYTHON", help="Interpreter of an environment with annbatch.")
@click.option("--round-trips", default="0,50", show_default=True, help="In milliseconds.")
@click.option("--block", default=16, show_default=True)
@click.option("--seconds", default=5.0, show_default=True, help="How long slices are followed.")
@click.option("--rounds", default=3, show_default=True, help="Timed, after one that is not.")
def main(
    folder: Path, annbatch: str | None, round_trips: str, block: int, seconds: float, rounds: int
) -> None:
    files = sorted(folder.glob("*.h5ad"))
    store = folder / "shuffled.zarr"
    if not store.exists():
        preshuffle(files, store, seed=0)
    parts = [str(part.relative_to(folder)) for part in sorted(store.glob("dataset_*"))]
    found = dict[tuple[str, str], list[dict]]()
    with ExitStack() as opened:
        target = opened.enter_context(served("web", files))
        clients = dict[tuple[str, str], Client]()
        for round_trip in round_trips.split(","):
            proxy = opened.enter_context(at_distance(target, float(round_trip)))
            jobs = _jobs(target.paths(proxy.url), Target(proxy.url, parts).paths(proxy.url))
            for name, (job, paths, more) in jobs.items():
                if job != ANNBATCH or annbatch:
                    settings = {"paths": paths, "block_size": block, "seconds": seconds} | more
                    command = [annbatch, job] if job == ANNBATCH and annbatch else [job]
                    clients[name, round_trip] = client(opened, command, settings)
        for key, one in clients.items():
            found[key] = [{"opening": one.opened()}]
        random = np.random.default_rng(0)
        for number in range(rounds + 1):
            for k in random.permutation(len(clients)).tolist():
                key = list(clients)[k]
                found[key].append(clients[key].epoch(number))
            click.echo(f"round {number} of {rounds}", err=True)
    click.echo(_table(found))


def _jobs(plates: list[str], parts: list[str]) -> dict[str, tuple[str, list[str], dict]]:
    """Return script, URLs and further settings by the name of a row."""
    ours = {"options": {}, "prefetch": None}
    return {
        "cellfeed, .h5ad": (OURS, plates, ours),
        "fsspec + h5py, .h5ad": (SLICES, plates, {"kind": "h5py"}),
        "cellfeed, zarr": (OURS, parts, ours),
        "obstore + zarr-python, zarr": (SLICES, parts, {"kind": "zarr"}),
        "annbatch, zarr": (ANNBATCH, parts, {}),
    }


def _table(found: dict[tuple[str, str], list[dict]]) -> str:
    lines = [
        "| loader | round trip | cells/s | cellfeed is faster by | CPU, us/cell | opening |",
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
        faster = "" if name.startswith("cellfeed") else _spread(ratios, ".3g")
        lines.append(
            f"| {name} | {round_trip} ms | {_spread(speeds, ',.0f')} | {faster} "
            f"| {cpu:,.0f} | {opening['opening']:.1f} s |"
        )
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


if __name__ == "__main__":
    main()
