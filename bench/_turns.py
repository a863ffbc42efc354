"""Loaders that take turns, round after round; figures are medians, and ratios within rounds."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

Turn = Callable[[int], Mapping[str, float]]
"""Reads with a seed, and returns figures by their unit, of which more is better."""


def say(line: object = "") -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Return the median of values, with the smallest and largest in brackets."""
    return f"{median(values):{form}} [{min(values):{form}}, {max(values):{form}}]"


def in_turns(
    turns: Mapping[str, Turn],
    rounds: int,
    *,
    against: Sequence[str],
    title: str = "",
    before: Callable[[], object] = lambda: None,
) -> None:
    """Let each have a turn in each round, and print its figures.

    Parameters
    ----------
    turns
        By name.
    rounds
        How many; their numbers are the seeds.
    against
        Names of turns: ratios are to the best of them in the same round.
    title
        Printed before each name.
    before
        Called before each turn.
    """
    found: dict[str, list[Mapping[str, float]]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, turn in turns.items():
            before()
            found[name].append(turn(number))
    for name, runs in found.items():
        parts = []
        for unit in runs[0]:
            values = [run[unit] for run in runs]
            part = f"{spread(values, ',.0f' if median(values) >= 100 else '.3g')} {unit}"
            best = [max(found[each][k][unit] for each in against) for k in range(rounds)]
            if all(best):
                ratios = [value / one for value, one in zip(values, best, strict=True)]
                part += f", {spread(ratios, '.2f')} times {' or '.join(against)}"
            parts.append(part)
        say(f"{title}{name}: {'; '.join(parts)}")


def answer_of(code: str, *arguments: object, python: str = sys.executable) -> dict[str, float]:
    """Run code in its own process, and return the JSON object in the last line that it prints."""
    command = [python, "-W", "ignore", "-c", code, *map(str, arguments)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    answer: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return answer


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


RATES = """
import json, sys, time, warnings
warnings.simplefilter("ignore")

def report(sizes, seconds=float("inf"), first=0):
    '''Print cells/s, and cells per second of processor time, after some first cells.'''
    skipped = 0
    while skipped < first:
        skipped += next(sizes)
    start, used, n = time.perf_counter(), time.process_time(), 0
    for size in sizes:
        n += size
        if time.perf_counter() - start > seconds:
            break
    wall, used = time.perf_counter() - start, time.process_time() - used
    print(json.dumps({"cells/s": n / wall, "cells per second of processor time": n / used}))
"""
"""Defines ``report``, for code that a process of its own runs."""
