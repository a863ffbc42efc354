"""The harness of `bench/compare`: ways take turns, and their figures become one table each.

A comparison is a generator of cases; a case has ways, each a function that returns the sizes of
minibatches as they come, which are timed, or figures of its own. Each way runs once in every
round, by default in its own process, and the way that begins differs from round to round. Tables
have medians, with the smallest and largest in brackets; ratios are taken within rounds. All
comparisons have the same options: ``python -m bench.compare NAME --help``.
"""

import argparse
import importlib
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
RATE, PER_CPU = "cells/s", "cells per second of processor time"
MEMORY, BYTES = "peak MB", "bytes from disk per cell"
CALLS, FAULTS = "read calls per cell", "major faults per cell"
MEASURED = RATE, PER_CPU, MEMORY, BYTES, CALLS, FAULTS
Figures = Mapping[str, float]


@dataclass(frozen=True)
class Way:
    """A function that is called with a seed and settings in each round.

    Attributes
    ----------
    function
        Opens what it reads, and returns an iterable of how many cells came each time; or measures
        by itself, and returns figures by unit.
    settings
        Keyword arguments; plain values for a process of its own.
    python
        The interpreter; None calls the function in this process.
    """

    function: Callable[..., Iterable[int] | Figures]
    settings: dict[str, Any]
    python: str | None = sys.executable


def way(function: Any, *, python: str = sys.executable, **settings: Any) -> Way:
    """Return a way that runs in its own process."""
    return Way(function, settings, python)


def here(function: Any, **settings: Any) -> Way:
    """Return a way that runs in this process."""
    return Way(function, settings, None)


@dataclass(frozen=True)
class Case:
    """What one table compares.

    Attributes
    ----------
    ways
        By name.
    title
        What it has in common.
    against
        Ratios are to the best of these in the same round; the first way if empty.
    files
        Files and folders that ``--cache`` is about.
    """

    ways: Mapping[str, Way]
    title: str = ""
    against: Sequence[str] = ()
    files: Iterable[Path] = ()


def main(
    cases: Callable[[Any], Iterator[Case]],
    arguments: Sequence[str] | None = None,
    *,
    columns: Sequence[str] = MEASURED[:3],
    n_ratios: int = 2,
    **defaults: Any,
) -> None:
    """Run a comparison from the command line.

    Parameters
    ----------
    cases
        Yields cases, given the options; what they need exists until the next one.
    arguments
        Of the command line; those of this process if None.
    columns
        Which of the figures that the harness measures are in the table.
    n_ratios
        How many of the first columns are followed by ratios.
    defaults
        Of options; a list takes several values, False a flag. Some have the same meaning in all
        comparisons: ``data``, a folder of .h5ad plates (synthetic ones with ``cells`` and ``genes``
        if there are none); ``rounds``; ``seconds`` of each turn; ``cache``, "warm" or "cold".
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {cases.__module__.replace('compare.', 'compare ')}",
        description=sys.modules[cases.__module__].__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    for name, value in {"data": Path("demo/bench"), "rounds": 3, **defaults}.items():
        option = f"--{name.replace('_', '-')}"
        if value is False:
            parser.add_argument(option, action="store_true")
        elif isinstance(value, list):
            choices = ("warm", "cold") if name == "cache" else None
            kind = type(value[0])
            parser.add_argument(option, type=kind, nargs="+", default=value, choices=choices)
        else:
            kind = str if value is None else type(value)
            parser.add_argument(option, type=kind, default=value, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"`--rounds >= 1` must hold, but got {options.rounds}")
    options.data = options.data.resolve()
    tables = []
    for case in cases(options):
        for cache in getattr(options, "cache", [""]):
            title = ", ".join(filter(None, [case.title, cache]))
            found = _in_turns(case, cache, options)
            say(_table(title, found, case, columns, n_ratios))
            tables.append({"title": title, "ways": found})
            if options.out is not None:
                machine = f"{len(os.sched_getaffinity(0))} cores, {platform.platform()}"
                facts = {"machine": machine, "options": vars(options), "tables": tables}
                options.out.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def plates_of(options: Any, **sizes: Any) -> list[Path]:
    """Return the files of ``--data``; synthetic ones are written if there are none."""
    from cellfeed.synthetic import write_tahoe_like  # noqa: PLC0415 - not for other interpreters

    if not list(options.data.glob("*.h5ad")):
        say(f"{options.data} has no .h5ad file: {options.cells:,} synthetic cells are written")
        write_tahoe_like(options.data, n_cells=options.cells, **sizes)
    return sorted(options.data.glob("*.h5ad"))


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def spread(values: Sequence[float], form: str = "") -> str:
    """Return the median of values, with the smallest and largest in brackets."""
    form = form or (",.0f" if median(values) >= 100 else ".3g")
    return f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def _in_turns(case: Case, cache: str, options: Any) -> dict[str, list[Figures]]:
    names, found = list(case.ways), dict[str, list[Figures]]()
    prepare = {"warm": warm, "cold": drop}.get(cache, list)
    for number in range(options.rounds):
        for k in range(len(names)):
            name = names[(number + k) % len(names)]
            prepare(case.files)
            figures = turn(case.ways[name], number, getattr(options, "seconds", None))
            found.setdefault(name, []).append(figures)
            shown = ", ".join(f"{value} {unit}" for unit, value in figures.items())
            sys.stderr.write(f"round {number + 1} of {options.rounds}: {name}: {shown}\n")
    return {name: found[name] for name in names}


def turn(one: Way, seed: int = 0, seconds: float | None = None) -> Figures:
    """Run a way once, for some seconds or to the end."""
    if one.python is None:
        return figures_of(one.function(seed=seed, **one.settings), seconds)
    module, name = one.function.__module__, one.function.__name__
    asked = [module, name, one.settings | {"seed": seed}, seconds]
    places = map(str, (ROOT, ROOT / "loader", ROOT / "tuner", os.environ.get("PYTHONPATH", "")))
    ran = subprocess.run(
        [one.python, "-W", "ignore", "-m", "bench._harness", json.dumps(asked, default=str)],
        check=False, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
    )  # fmt: skip
    if ran.returncode:
        raise SystemExit(f"`{name}` of {module} ended with {ran.returncode}")
    figures: Figures = json.loads(ran.stdout.splitlines()[-1])
    return figures


def figures_of(found: Iterable[int] | Figures, seconds: float | None = None) -> Figures:
    """Return figures as they are, or those of iterating for some seconds, or to the end."""
    if isinstance(found, Mapping):
        return found
    before, n = _counters(), 0
    start, used = time.perf_counter(), time.process_time()
    for size in found:
        n += size
        if seconds is not None and time.perf_counter() - start > seconds:
            break
    wall, used = time.perf_counter() - start, time.process_time() - used
    counted = {unit: (value - before[unit]) / n for unit, value in _counters().items()}
    return {RATE: n / wall, PER_CPU: n / used, MEMORY: peak_bytes() / 1e6, **counted}


def peak_bytes() -> int:
    """Return the most memory of this process; `getrusage` counts that of its parent, too."""
    told = Path("/proc/self/status").read_text()
    return 1024 * int(told.partition("VmHWM:")[2].split()[0])


def _counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    io = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return {BYTES: io["read_bytes"], CALLS: io["syscr"], FAULTS: faults}


def after(n: int, sizes: Iterable[int]) -> Iterator[int]:
    """Take at least so many cells now, and return the others."""
    iterator, skipped = iter(sizes), 0
    while skipped < n:
        skipped += next(iterator)
    return iterator


def without_end(loader: Iterable[Any]) -> Iterator[int]:
    """Return the sizes of minibatches, epoch after epoch."""
    while True:
        for minibatch in loader:
            yield len(minibatch)


def _table(
    title: str,
    found: Mapping[str, Sequence[Figures]],
    case: Case,
    columns: Sequence[str],
    n_ratios: int,
) -> str:
    against = case.against or list(found)[:1]
    given = next(iter(found.values()))[0]
    units = [unit for unit in given if unit in columns or unit not in MEASURED]
    heads, rows = [title], [[name] for name in found]
    for place, unit in enumerate(units):
        heads.append(unit)
        values: dict[str, list[Any]] = {
            name: [run.get(unit) for run in runs] for name, runs in found.items()
        }
        for row in rows:
            own = values[row[0]]
            row.append("" if None in own else spread(own))
        if place < n_ratios:
            best = [max(found[name][k][unit] for name in against) for k in range(len(own))]
            heads.append(f"times {' or '.join(against)}")
            for row in rows:
                pairs = zip(values[row[0]], best, strict=True)
                row.append(spread([value / one for value, one in pairs], ".2f"))
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def files_of(paths: Iterable[Path]) -> list[Path]:
    """Return files, and all files in folders."""
    found = (each for path in paths for each in ([path] if path.is_file() else path.rglob("*")))
    return [each for each in found if each.is_file()]


def drop(paths: Iterable[Path]) -> None:
    """Drop files, and all files of folders, from the page cache."""
    for path in files_of(paths):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a page that is not on disk yet cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def warm(paths: Iterable[Path]) -> None:
    """Read files, and all files of folders, into the page cache, which must hold them."""
    for path in files_of(paths):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def _answer(module: str, name: str, settings: dict[str, Any], seconds: float | None) -> None:
    """Run one turn in this process, print its figures, and wait for no thread."""
    found = getattr(importlib.import_module(module), name)(**settings)
    say(json.dumps(figures_of(found, seconds)))
    os._exit(0)


if __name__ == "__main__":
    _answer(*json.loads(sys.argv[1]))
