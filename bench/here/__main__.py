"""The comparison on your machine, in one file to share: ``python -m bench.here COMMAND``."""

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import click
from bench.here import document
from bench.here import page as pages

from cellfeed.console import OneLineErrorGroup, interrupted

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.group(cls=OneLineErrorGroup)
def main() -> None:
    """Compare cellfeed with other loaders on this machine, and share the result as one file."""


@main.command("run")
@click.option("--profile", type=click.Choice(["short", "full"]), default="short",
              show_default=True, help="The README's pairs in about ten minutes, or every entry in "
              "hours.")  # fmt: skip
@click.option("--output", type=FOLDER, default=Path("demo/here"), show_default=True,
              help="Folder for the file and its page, the cells, stores and logs.")  # fmt: skip
@click.option("--cells", type=click.IntRange(min=1_000),
              help="Synthetic cells; by default 100,000, or 200,000 for the full profile."
              )  # fmt: skip
@click.option("--rounds", "n_rounds", type=click.IntRange(min=1),
              help="Timed rounds; by default 3, or 5 for the full profile.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True),
              help="Seconds timed of each epoch; by default 3, or 10 for the full profile."
              )  # fmt: skip
@click.option("--peers", metavar="A,B", help="Only these other loaders; default: all.")
@click.option("--collection", type=FOLDER, help="Your own folder of gzip .h5ad plates, in place "
              "of synthetic cells.")  # fmt: skip
@click.option("--label", default="plate", show_default=True,
              help="obs column that loaders deliver too.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True,
              help="Seed of the order of entries and of loaders.")  # fmt: skip
@click.option("--environments", type=FOLDER, default=Path(".peers"), show_default=True,
              help="Folder of the peers' virtual environments.")  # fmt: skip
@click.option("--python312", type=click.Path(path_type=Path),
              help="A Python 3.12, if neither PATH nor pyenv has one.")  # fmt: skip
@click.option("--sign-key", type=click.Path(path_type=Path),
              help="Private key of ssh to sign the file with, such as ~/.ssh/id_ed25519."
              )  # fmt: skip
def run_command(*, sign_key: Path | None, output: Path, **asked: Any) -> None:
    """Measure, and write a file with everything and a page that shows it.

    The file is written after each measurement. Interrupt at any time: the same command continues.
    """
    from bench.here import measure  # noqa: PLC0415 - not needed to verify

    if sign_key is not None:
        sign_key = sign_key.expanduser()
        document.require_signing(sign_key)
    output = output.resolve()
    request = measure.Request(
        output=output, command=shlex.join(["python", "-m", "bench.here", *sys.argv[1:]]), **asked
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as a batch system ends jobs
    session = measure.Session.begin(request)
    try:
        session.measure()
    except KeyboardInterrupt:
        _finish(session.path, sign_key)
        interrupted("Interrupted; the same command continues.")
    _finish(session.path, sign_key)


def _finish(path: Path, sign_key: Path | None) -> None:
    """Sign a file, and write its page."""
    if not path.exists():  # interrupted before the first measurement
        return
    if sign_key is not None:
        click.echo(f"Signature: {document.sign(path, sign_key)}", err=True)
    comparison = document.read(path)
    click.echo(pages.summary(comparison))
    click.echo(f"\nFile: {path}\nPage: {_write_page(path, comparison)}", err=True)


def _write_page(path: Path, comparison: document.Comparison) -> Path:
    target = path.with_suffix(".html")
    sha256 = json.loads(path.read_text())["sha256"]
    target.write_text(pages.page(comparison, name=path.name, sha256=sha256))
    return target


@main.command("page")
@click.argument("file", type=FILE)
def page_command(file: Path) -> None:
    """Write the page of a file beside it."""
    click.echo(_write_page(file, document.read(file)))


@main.command("verify")
@click.argument("file", type=FILE)
@click.option("--keys", type=FILE, help="Public keys, one in each line, such as "
              "https://github.com/USER.keys; the signature must be of one of these.")  # fmt: skip
def verify_command(file: Path, keys: Path | None) -> None:
    """Check that no byte of a file was changed, and its signature FILE.sig if there is one.

    Exit status 2 if it is damaged, edited, of another format, or not signed by one of the keys.
    """
    comparison = document.read(file)
    click.echo(f"intact: {pages.title(comparison)}, {comparison.updated}, "
               f"{'complete' if comparison.complete else 'interrupted'}")  # fmt: skip
    if keys is not None or document.signature_of(file).exists():
        click.echo(document.check_signature(file, keys))
    else:
        click.echo("not signed")


if __name__ == "__main__":
    main(prog_name="python -m bench.here")
