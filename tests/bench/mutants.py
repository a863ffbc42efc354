"""Which small changes of the code do the tests notice? A sample of mutants, and what kills them.

    python tests/bench/mutants.py draw mutants.json --seed 0
    make coverage                                  # which test runs which line: .coverage
    python tests/bench/mutants.py run mutants.json light.json --light

A mutant is one change within a function: another comparison, operator, constant or condition, or a
call that is left out. The tests that run its line are run in a copy of the checkout, the most
specific first, until one fails. It survives if all pass, or all that end within the limit.
"""

import ast
import collections
import contextlib
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
# What a minibatch of .h5ad or zarr passes through, and the tuner.
CORE = (
    "bytes", "collection", "dataset", "decode", "fetch", "rows", "_runs.py",
    "sources", "sampling",
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
    "_tokenizing": ["tests/loader/tokenizers", "tests/loader/storages/tokens/test_tokens.py"],
    "_pages": ["tests/loader/storages/parquet"],
    "_transforming": ["tests/loader/transforms"],
    "sampling/_kernels": ["tests/loader/sampling"],
    "": [
        *("tests/loader/decode", "tests/loader/sources/test_conformance.py"),
        *("tests/loader/sources/test_conformance_zarr.py", "tests/loader/collection"),
        "tests/loader/transforms",
    ],
}
OPTIONS = "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"
NO_TESTS, FAILURES = 5, ("FAILED ", "ERROR ")
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
        return str(lines[node.lineno - 1][node.col_offset : node.end_col_offset])

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


def outcome(checkout: Path, tests: Sequence[str], light: Sequence[str], seconds: float) -> str:
    """Return which test fails first in a checkout, or "" if none does within a time."""
    listed = checkout / "tests.txt"
    listed.write_text("\n".join(tests))
    places = [str(checkout / each) for each in ("", "loader", "tuner")]
    with contextlib.suppress(subprocess.TimeoutExpired):
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *OPTIONS, *light, f"@{listed}"], cwd=checkout,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(places)}, timeout=seconds,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if ran.returncode not in {0, NO_TESTS}:
            failed = [line for line in ran.stdout.splitlines() if line.startswith(FAILURES)]
            return failed[0] if failed else f"exit {ran.returncode}"
    return ""


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
@click.option("--seconds", default=120.0, show_default=True, help="The most for each mutant.")
def run(*, mutants: Path, output: Path, coverage: Path, light: bool, seconds: float) -> None:
    """Run the tests of MUTANTS, and write the results to OUTPUT, where a run goes on."""
    drawn = [Mutant(**each) for each in json.loads(mutants.read_text())]
    results = json.loads(output.read_text()) if output.exists() else {}
    covering, amount = tests_by_line(coverage, {each.file for each in drawn})
    options = ["--hypothesis-profile=quick", "-m", LIGHT] if light else []
    for number, mutant in enumerate(drawn):
        line = mutant.line_in(ROOT)
        if str(number) in results or line is None:
            continue
        order = sorted(covering.get((mutant.file, line), ()), key=lambda test: (amount[test], test))
        if not order and "kernels" in mutant.file:
            order = next(tests for name, tests in TESTS_OF_KERNELS.items() if name in mutant.file)
        with copy_of_checkout() as checkout:
            if order and not results:
                failed = outcome(checkout, order, options, seconds)
                if failed:
                    raise click.ClickException(f"without a change, there is a failure: {failed}")
            mutant.apply(checkout, line)
            killed_by = outcome(checkout, order, options, seconds) if order else ""
        results[str(number)] = {"killed_by": killed_by, "n_tests": len(order)}
        output.write_text(json.dumps(results, indent=1))
        click.echo(f"{number}: {mutant.file}:{mutant.line} {mutant.old} -> {mutant.new}")
        click.echo(f"    {killed_by or 'survives'} ({len(order)} tests)")


if __name__ == "__main__":
    main()
