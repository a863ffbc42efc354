"""An epoch of the default SCVI: minibatches from files, from memory, and the same one each time.

Run from the root of the repository, as ``python -m bench.scvi.compare SCRATCH``. Writes synthetic
plates to SCRATCH once, and from them the zarr store that scvi-tools' ``setup_annbatch`` makes.
Each entry trains in a process of its own, in turns, round after round, on the same cells and all in
one environment, which is made in SCRATCH from ``environment.txt`` unless ``--python`` names one. A
first epoch compiles and fills the page cache; the second one counts. Where the same minibatch comes
again and again, there is the time of the model and its trainer alone.

- between steps: until the next minibatch is there, dense on the device; where the same one comes
  again and again, that is the trainer's own time.
- memory: the most that the process had, of which the entry without a loader has all but the cells.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from bench._turns import answer_of, files_of, say, spread
from bench.peers.processes import find_python

ALONE = "the same minibatch"
ENTRIES = (ALONE, "in memory", "cellfeed", "annbatch", "AnnCollection")
ROOT = Path(__file__).parents[2]
RUN = "import sys; from bench.scvi.training import main; main(*sys.argv[1:])"


def environment(folder: Path) -> Path:
    """Return the Python of the environment, made on first use."""
    python = folder / "bin" / "python"
    if not (folder / "done").exists():
        say(f"making the environment {folder} ...")
        subprocess.run([find_python("3.12"), "-m", "venv", "--clear", folder], check=True)
        needed = ["--requirement", str(Path(__file__).parent / "environment.txt"), str(ROOT)]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)
        (folder / "done").touch()
    return python


def n_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_of([folder]))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scratch", type=Path, help="where the cells are, or are written")
    parser.add_argument("--cells", type=int, default=30_000)
    parser.add_argument("--genes", type=int, default=2_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="of an environment that has environment.txt and cellfeed")
    parser.add_argument("--without", nargs="*", choices=ENTRIES[1:], default=[])
    options = parser.parse_args(arguments)
    own = [str(ROOT), str(ROOT / "loader"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, own))
    python = options.python or str(environment(options.scratch / "environment"))
    plates, store = options.scratch / "plates", options.scratch / "annbatch.zarr"
    if not plates.exists():
        answer_of(RUN, "write", plates, options.cells, options.genes, python=python)
    if not store.exists():
        found = answer_of(RUN, "build", plates, store, python=python)
        figures = [f"{value:,.0f} {unit}" for unit, value in found.items()]
        sizes = [f"{what.name} {n_bytes(what) / 2**20:,.0f} MiB" for what in (plates, store)]
        say(f"{store.name} written: {', '.join([*figures, *sizes])}")

    entries = [each for each in ENTRIES if each not in options.without]
    runs: dict[str, list[dict[str, float]]] = {entry: [] for entry in entries}
    for number in range(options.rounds):
        for entry in entries[number % len(entries) :] + entries[: number % len(entries)]:
            found = answer_of(RUN, "train", entry, plates, store, python=python)
            say(f"round {number}, {entry}: {found}")
            runs[entry].append(found)
    heads = [*runs[ALONE][0], f"of {ALONE}"]
    say(f"| minibatches come from | {' | '.join(heads)} |")
    say(f"| --- |{' ---: |' * len(heads)}")
    for entry, its in runs.items():
        columns = [spread([run[unit] for run in its]) for unit in heads[:-1]]
        pairs = zip(its, runs[ALONE], strict=True)
        ratios = [run["cells/s"] / alone["cells/s"] for run, alone in pairs]
        say(f"| {entry} | {' | '.join(columns)} | {spread(ratios, '.2f')} |")


if __name__ == "__main__":
    main(sys.argv[1:])
