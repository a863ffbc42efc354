"""The asv suite from the command line: run it, compare two commits, record one.

Verdicts go to stdout, and asv's progress to stderr.
"""

import os

import click
from asv_runs import FOLDER, ROOT, Side, asv, commit_of, has_changes, source_of
from verdict import compare, is_accepted, read_figures, report

ONE_ROUND = "--attribute=rounds=1"
# Each time is taken once.
ONE_SAMPLE = [f"--attribute={each}" for each in ("repeat=1", "number=1", "warmup_time=0")]


@click.group()
def main() -> None:
    """Run the asv suite of this working tree."""


@main.command("check")
def check_command() -> None:
    """Measure the working tree once; exit status 1 if a benchmark fails, or nothing is measured."""
    head = Side(name="head", source=ROOT, commit=commit_of("HEAD"))
    head.begin()
    head.measure(ONE_ROUND, *ONE_SAMPLE)
    figures = read_figures(head.results)
    n_measured = sum(figure.is_measured for figure in figures.values())
    click.echo(f"{n_measured} of {len(figures)} figures were measured.")
    failed = [name for name, figure in figures.items() if figure.value is None]
    for name in failed:
        click.echo(f"FAILED: {name}")
    if failed or not n_measured:
        raise SystemExit(1)


@main.command("compare")
@click.argument("base")
@click.option("--bench", default="", metavar="REGEX", help="Only benchmarks whose names match.")
def compare_command(base: str, bench: str) -> None:
    """Measure the working tree against BASE; exit status 1 if a counter got worse.

    Both run this working tree's benchmarks in this environment, in the order base, head, head,
    base, so that changes on the machine affect both alike.
    """
    before = commit_of(base)
    sides = (
        Side(name="base", source=source_of(before, FOLDER / "sources"), commit=before),
        Side(name="head", source=ROOT, commit=commit_of("HEAD")),
    )
    for side in sides:
        side.begin()
        side.measure(ONE_ROUND, f"--bench={bench}")
    times = [each for each in read_figures(sides[1].results).values() if each.kind == "time"]
    for side in reversed(sides if times else ()):
        side.measure(ONE_ROUND, rf"--bench=^(?=.*(?:{bench})).*\.time_")
    changes = ", with changes" if has_changes() else ""
    click.echo(f"Base: {base} ({before[:8]}); head: {sides[1].commit[:8]}{changes}\n")
    compared = compare(*(read_figures(side.results) for side in sides))
    click.echo(report(compared))
    if not is_accepted(compared):
        raise SystemExit(1)


@main.command("record")
@click.argument("commits", default="HEAD^!")
def record_command(commits: str) -> None:
    """Measure COMMITS (a git range) with pinned versions, and publish the history as HTML."""
    asv("run", "--show-stderr", "--record-samples", commits)
    asv("publish")
    html = os.path.relpath(FOLDER / "html", ROOT)
    click.echo(f"To browse it: python3 -m http.server --bind 127.0.0.1 --directory {html}")


if __name__ == "__main__":
    main()
