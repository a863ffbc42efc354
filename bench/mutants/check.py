"""Which small changes of the code do the tests notice? A sample of mutants, and what kills them.

    python bench/mutants/check.py draw mutants.json --seed 0
    make coverage                                  # which test runs which line: .coverage
    python bench/mutants/check.py run mutants.json light.json --light
    python bench/mutants/check.py run mutants.json all.json --survivors light.json

A mutant is one change within a function: another comparison, operator, constant or condition, or a
call that is left out. The tests that run its line are run in a copy of the checkout, the most
specific first, until one fails. It survives if all pass, or all that are run within the limit.
"""

import ast
import collections
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
# What a minibatch of .h5ad or zarr passes through, and the tuner.
CORE = (
    "_bytes", "_collection", "_dataset", "_decode", "_fetch", "_rows", "_runs.py",
    "_storages/_anndata", "sampling",
)  # fmt: skip
PARTS = (*(f"loader/cellfeed/{name}" for name in CORE), "tuner/cellfeed_tuner")
COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Div: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
LIGHT = "smoke or not (slow or process or server or docs)"
# Coverage does not see compiled code; these tests run it.
TESTS_OF_KERNELS = {
    "_tokenizing": ["tests/loader/tokenizers", "tests/loader/storages/test_tokens.py"],
    "_pages": [
        "tests/loader/storages/test_parquet_pages.py", "tests/loader/storages/test_parquet.py",
        "tests/loader/storages/test_parquet_damage.py",
    ],
    "_transforming": ["tests/loader/transforms"],
    "sampling/_kernels": ["tests/loader/sampling"],
    "": [
        "tests/loader/decode", "tests/loader/storages/test_conformance.py",
        "tests/loader/storages/test_conformance_zarr.py", "tests/loader/collection",
        "tests/loader/transforms",
    ],
}  # fmt: skip
# Imported once, before processes are forked in which tests run; pytest warns where a plugin is in
# one of them.
IMPORTED = "anndata", "numba", "pandas", "scipy.sparse", "torch", "zarr"
OPTIONS = (
    "-x", "-q", "--tb=no", "-p", "no:cacheprovider",
    "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
)  # fmt: skip
# Most mutants are killed by one of the first tests, whose few modules are soon imported.
N_FIRST = 20
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".coverage*", ".mypy_cache", ".asv", ".peers", "_build", "demo"
)


@dataclass(frozen=True)
class Mutant:
    """One change: ``old``, from column ``start`` on in a line that reads ``text``, becomes ``new``.

    Lines are counted from 1, columns from 0.
    """

    file: str
    line: int
    start: int
    old: str
    new: str
    text: str

    def line_in(self, checkout: Path) -> int | None:
        """Return the number of the line in a checkout, of the nearest one if it is there twice."""
        path = checkout / self.file
        lines = path.read_text().split("\n") if path.exists() else []
        places = [k for k, line in enumerate(lines, 1) if line == self.text]
        return min(places, key=lambda place: abs(place - self.line), default=None)

    def apply(self, checkout: Path, number: int) -> None:
        """Change the line with this number in a checkout."""
        path = checkout / self.file
        lines = path.read_text().split("\n")
        before, after = self.text[: self.start], self.text[self.start + len(self.old) :]
        lines[number - 1] = before + self.new + after
        path.write_text("\n".join(lines))


def mutants_of(file: str) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    source = (ROOT / file).read_text()
    lines = source.split("\n")

    def text_of(node: Any) -> str:
        """Return the source of a node that is within one line."""
        return lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def visit(node: Any, *, is_inside: bool) -> Iterator[Mutant]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if is_inside and getattr(node, "end_lineno", 0) == getattr(node, "lineno", -1):
            line = lines[node.lineno - 1]
            new = changed(node, text_of) if line.isascii() else None
            if new is not None:
                yield Mutant(file, node.lineno, node.col_offset, text_of(node), new, line)
        is_function = isinstance(node, ast.FunctionDef)
        for child in node.body if is_function else ast.iter_child_nodes(node):
            yield from visit(child, is_inside=is_inside or is_function)

    yield from visit(ast.parse(source), is_inside=False)


def changed(  # noqa: PLR0911 - a table
    node: ast.AST, text_of: Callable[[ast.AST], str]
) -> str | None:
    """Return what a node is changed into; None if it is left alone."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return f"{text_of(left)} {COMPARISONS[type(op)]} {text_of(right)}"
        case ast.BinOp(left=ast.JoinedStr() | ast.Constant()):  # often text
            return None
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return f"({text_of(left)}) {OPERATORS[type(op)]} ({text_of(right)})"
        case ast.BoolOp(op=op, values=values):
            other = " or " if isinstance(op, ast.And) else " and "
            return other.join(f"({text_of(each)})" for each in values)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"bool({text_of(operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int(value)):
            return str(value + 1)
        case ast.IfExp(test=test, body=body, orelse=other):
            return f"({text_of(other)}) if ({text_of(test)}) else ({text_of(body)})"
        case ast.Expr(value=ast.Call()):
            return "pass"
    return None


@click.group()
def main() -> None:
    """Draw mutants, and run the tests that should notice them."""


@main.command()
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--number", default=150, show_default=True)
def draw(output: Path, seed: int, number: int) -> None:
    """Draw mutants into OUTPUT: two of three from the loader's core, the others from the tuner."""
    command = ["git", "ls-files", *PARTS]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [each for each in listed.stdout.split() if each.endswith(".py")]
    rng, drawn = random.Random(seed), list[Mutant]()
    for part, n in (("loader", number - number // 3), ("tuner", number // 3)):
        found = [each for file in files if file.startswith(part) for each in mutants_of(file)]
        drawn += rng.sample(found, n)
        click.echo(f"{part}: {n} of {len(found):,} mutants")
    output.write_text(json.dumps([asdict(each) for each in drawn], indent=1))


def tests_by_line(
    coverage: Path, files: set[str]
) -> tuple[Mapping[tuple[str, int], set[str]], Mapping[str, int]]:
    """Return which tests run each line of some files, and how much each test runs in all files."""
    tests = collections.defaultdict[tuple[str, int], set[str]](set)
    amount = collections.Counter[str]()
    with contextlib.closing(sqlite3.connect(coverage)) as connection:
        contexts = dict(connection.execute("select id, context from context"))
        paths = dict(connection.execute("select id, path from file"))
        wanted = {k: file for k, path in paths.items() for file in files if path.endswith(file)}
        arcs = connection.execute("select file_id, context_id, fromno, tono from arc")
        for file, context, begin, end in arcs:
            test = contexts[context].partition("|")[0]
            amount[test] += 1
            if test and file in wanted:
                tests[wanted[file], abs(begin)].add(test)
                tests[wanted[file], abs(end)].add(test)
    return tests, amount


def tests_of(mutant: Mutant) -> list[str]:
    """Return the files and folders of tests of a compiled function; none of another."""
    if "kernels" not in mutant.file:
        return []
    found = next(tests for name, tests in TESTS_OF_KERNELS.items() if name in mutant.file)
    return [each for each in found if (ROOT / each).exists()]


class Selection:
    """A plugin of pytest that runs tests in a given order, all if there is none, within a time."""

    def __init__(self, order: Sequence[str], seconds: float) -> None:
        self._place = {name: k for k, name in enumerate(order)}
        self._deadline = time.monotonic() + seconds
        self.killed_by, self.n_run = "", 0

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Select and sort."""
        if self._place:
            items[:] = [each for each in items if each.nodeid in self._place]
            items.sort(key=lambda each: self._place[each.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the first failure."""
        self.n_run += report.when == "call"
        if report.failed:
            self.killed_by = self.killed_by or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        """Note that tests cannot be imported."""
        if report.failed:
            self.killed_by = self.killed_by or report.nodeid

    def pytest_runtest_teardown(self, item: Any) -> None:
        """Stop when the time is up."""
        if time.monotonic() > self._deadline:
            item.session.shouldstop = "the time is up"


def run_tests(
    checkout: Path, order: Sequence[str], paths: Sequence[str], options: Sequence[str],
    seconds: float, answer: Any,
) -> None:  # fmt: skip
    """Run tests in a checkout, and send which one failed, and how many ran."""
    os.setsid()
    os.chdir(checkout)
    sources = [str(checkout), str(checkout / "loader"), str(checkout / "tuner")]
    sys.path[:0] = sources
    os.environ["PYTHONPATH"] = os.pathsep.join(sources)
    null = os.open(os.devnull, os.O_RDWR)
    for k in range(3):
        os.dup2(null, k)
    import pytest  # noqa: PLC0415 - of the process that runs tests

    selection = Selection(order, seconds)
    status = pytest.main([*OPTIONS, *options, *paths], plugins=[selection])
    if status not in {
        pytest.ExitCode.OK,
        pytest.ExitCode.INTERRUPTED,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    }:
        selection.killed_by = selection.killed_by or f"exit {status}"
    answer.send((selection.killed_by, selection.n_run))


def outcome(*arguments: Any, seconds: float) -> tuple[str, int]:
    """Return what `run_tests` sends from a process of its own, or how that ended."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_tests, args=(*arguments, seconds, sender))
    process.start()
    sender.close()
    try:
        if not receiver.poll(2 * seconds + 120):
            return "it hangs", 0
        found: tuple[str, int] = receiver.recv()
    except EOFError:
        return "it crashes", 0
    else:
        return found
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


@contextlib.contextmanager
def copy_of_checkout() -> Iterator[Path]:
    """Copy what tests need, for the time of a block."""
    with tempfile.TemporaryDirectory(prefix="mutant") as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=NOT_COPIED)
        (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        yield checkout


@main.command()
@click.argument("mutants", type=click.Path(exists=True, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--coverage", default=ROOT / ".coverage", type=click.Path(path_type=Path))
@click.option("--light", is_flag=True, help="Only what `make test` runs.")
@click.option("--survivors", type=click.Path(exists=True, path_type=Path),
              help="Only mutants that survive in these results.")  # fmt: skip
@click.option("--seconds", default=120.0, show_default=True, help="The most for each mutant.")
@click.option("--part", default="0/1", show_default=True, help="K/N: each N-th one, from K on.")
def run(
    *,
    mutants: Path, output: Path, coverage: Path, light: bool, survivors: Path | None,
    seconds: float, part: str,
) -> None:  # fmt: skip
    """Run the tests of MUTANTS, and write the results to OUTPUT, where a run goes on."""
    for name in IMPORTED:
        importlib.import_module(name)
    drawn = [Mutant(**each) for each in json.loads(mutants.read_text())]
    results = json.loads(output.read_text()) if output.exists() else {}
    before = json.loads(survivors.read_text()) if survivors else {}
    covering, amount = tests_by_line(coverage, {each.file for each in drawn})
    options = ["--hypothesis-profile=quick", "-m", LIGHT] if light else []
    first, step = map(int, part.split("/"))
    for number in map(str, range(first, len(drawn), step)):
        if number in results or before.get(number, {}).get("killed_by"):
            continue
        mutant, began = drawn[int(number)], time.monotonic()
        line = mutant.line_in(ROOT)
        order = sorted(
            covering.get((mutant.file, line or 0), ()), key=lambda test: (amount[test], test)
        )
        parts = [order[:N_FIRST], order[N_FIRST:]] if order else [[]]
        killed_by, n_run = "", 0
        with copy_of_checkout() as checkout:
            for tests in parts if line else []:
                paths = sorted({each.partition("::")[0] for each in tests}) or tests_of(mutant)
                if not paths or killed_by:
                    continue
                if tests is parts[0] and not any(each["n_run"] for each in results.values()):
                    failed, _ = outcome(checkout, tests, paths, options, seconds=seconds)
                    if failed:
                        msg = f"without a change, there is a failure: {failed}"
                        raise click.ClickException(msg)
                mutant.apply(checkout, line)
                killed_by, n = outcome(checkout, tests, paths, options, seconds=seconds)
                n_run += n
        results[number] = {
            "killed_by": killed_by,
            "n_run": n_run,
            "n_tests": len(order),
            "is_there": line is not None,
            "seconds": round(time.monotonic() - began, 1),
        }
        output.write_text(json.dumps(results, indent=1))
        click.echo(f"{number}: {mutant.file}:{mutant.line} {mutant.old} -> {mutant.new}")
        click.echo(f"    {killed_by or 'survives'} ({n_run} of {len(order) or 'all'} tests)")


if __name__ == "__main__":
    main()
