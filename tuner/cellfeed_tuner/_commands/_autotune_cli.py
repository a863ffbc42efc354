"""The ``autotune`` command. Results go to stdout, progress and errors to stderr.

Commands import their work only when they run, so that help appears immediately.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cellfeed import FormatError, PathError, __version__
from cellfeed.console import ByteSize, OneLineErrorGroup
from cellfeed_tuner._constants import (
    DEFAULT_BLOCK_SIZES,
    DEFAULT_BUDGET_SECONDS,
    DEFAULT_ENTROPY_FLOOR,
    DEFAULT_FETCH_FACTORS,
    UNLIMITED_SECONDS,
)
from cellfeed_tuner._time_budget import TimeBudget

if TYPE_CHECKING:
    from cellfeed import Collection
    from cellfeed_tuner._measuring._process import MeasuringProcess

    SizesParameter = click.ParamType[Sequence[int]]
    Decorator = Callable[[Any], Any]
else:  # older versions are not generic
    SizesParameter = click.ParamType


class Sizes(SizesParameter):
    """Integers separated by commas or blanks, or a range such as 1:4096.

    Examples
    --------
    >>> Sizes(1).convert("4,16 64", None, None), Sizes(1).convert("1:4096", None, None)
    ((4, 16, 64), range(1, 4097))
    """

    name = "N,N,...|LOW:HIGH"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Sequence[int]:
        """Return the sizes."""
        if not isinstance(value, str):
            return value  # type: ignore[no-any-return]  # the default
        ends = re.fullmatch(r"\s*(-?\d+):(-?\d+)\s*", value)
        texts = ends.groups() if ends else re.split(r"[,\s]+", value.strip(", "))
        if not all(re.fullmatch(r"-?\d+", text) for text in texts):
            wanted = "write 4,16,64, or 1:4096 for a range"
            self.fail(f"{value!r} is not a list of integers; {wanted}", param, ctx)
        sizes = tuple(map(int, texts))
        if min(sizes) < self._least:
            self.fail(f"{min(sizes)} is below {self._least}, the minimum", param, ctx)
        if ends and sizes[0] > sizes[1]:
            self.fail(f"{value!r} is an empty range; write the lower end first", param, ctx)
        return range(sizes[0], sizes[1] + 1) if ends else sizes


def listed(sizes: Sequence[int]) -> str:
    """Return sizes separated by commas."""
    return ",".join(map(str, sizes))


class _Commands(OneLineErrorGroup):
    """A group whose own action takes paths, if the first argument is not the name of a command.

    A path with the name of a command is written as ``./show``.
    """

    allow_interspersed_args = True

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        """Parse the arguments, for a command if they begin with its name."""
        command = self.commands.get(args[0]) if args else None
        if command is None:
            return super().make_context(info_name, args, parent, **extra)
        return command.make_context(f"{info_name} {command.name}", args[1:], parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run what the context was made for."""
        return super().invoke(ctx) if ctx.command is self else ctx.command.invoke(ctx)


def _with(*options: "Decorator") -> "Decorator":
    """Return a decorator that gives a command some options, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_OF_SUBJECT = _with(
    click.argument("paths", nargs=-1, required=True, metavar="PATH..."),
    click.option("--label", multiple=True, metavar="COLUMN",
                  help="obs column to mix minibatches by; required, can be repeated."),
    click.option("--where", "indices", metavar="QUERY",
                  help="Tune on cells whose obs match this: \"plate != 'plate14'\"."),
    click.option("--balance", metavar="COLUMN",
                  help="Draw the classes of this obs column equally often."),
    click.option("--element", "elements", default=("X",), show_default="X", multiple=True,
                  metavar="NAME",
                  help="Element to read, such as layers/counts; can be repeated."),
    click.option("--join-vars", default="same", show_default=True,
                  type=click.Choice(["same", "inner", "outer"]),
                  help="Genes of the collection, where files have others."),
    click.option("--dense", is_flag=True, help="Make minibatches dense, as most models need."),
    click.option("--batch-size", default=64, show_default=True, type=click.IntRange(min=1),
                  help="Cells of a minibatch."),
    click.option("--block-sizes", default=DEFAULT_BLOCK_SIZES, type=Sizes(1),
                  show_default=listed(DEFAULT_BLOCK_SIZES),
                  help="Block sizes to try; 1:4096 is a range."),
    click.option("--fetch-factors", default=DEFAULT_FETCH_FACTORS, type=Sizes(1),
                  show_default=listed(DEFAULT_FETCH_FACTORS),
                  help="Fetch factors to try; 1:512 is a range."),
    click.option("--workers", type=Sizes(0), show_default="0 and powers of two up to the cores",
                  help="Numbers of worker processes to try; 0 for files on servers."),
    click.option("--num-threads", default=(), type=Sizes(1), show_default="chosen by the loader",
                  help="Numbers of reading threads per process to try."),
    click.option("--align", is_flag=True,
                  callback=lambda *given: (None, "chunks") if given[-1] else (),
                  help="Also try blocks aligned with chunks."),
    click.option("--storage-options", type=click.Path(dir_okay=False, path_type=Path),
                  metavar="FILE.json",
                  help="Storage options for files on servers; credentials are not saved."),
)  # fmt: skip
_OF_CHOICE = _with(
    click.option("--entropy-floor", default=DEFAULT_ENTROPY_FLOOR, show_default=True,
                  type=click.FloatRange(0, 1),
                  help="Minimum entropy, as a share of that of random sampling."),
    click.option("--memory", type=ByteSize(), show_default="available memory",
                  help="Memory limit, such as 8GB."),
    click.option("--cache", default=None, show_default="cold", type=click.Choice(["cold", "warm"]),
                  help="State of the page cache to measure in; not for files on servers."),
    click.option("--output", default=".", type=click.Path(file_okay=False), metavar="FOLDER",
                  help="Folder for the files that are written."),
    click.option("--seed", default=0, show_default=True, help="Seed of the plans."),
)  # fmt: skip
_OF_SEARCH = _with(
    click.option("--budget", default=DEFAULT_BUDGET_SECONDS, show_default=True,
                  type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                  help="Total time to spend."),
    click.option("--need", type=click.FloatRange(min=0, min_open=True), metavar="CELLS_PER_S",
                  help="Throughput that suffices; the best mixed is then recommended."),
    click.option("--step-ms", "step_seconds", type=click.FloatRange(min=0, min_open=True),
                  metavar="MS", callback=lambda *given: given[-1] and given[-1] / 1000,
                  help="Time of your training step: keeping up with it suffices, and the "
                  "recommendation is measured with such a loop."),
    click.option("--ranks", type=Sizes(1), show_default="torchrun's, or 1", metavar="N|LOW:HIGH",
                  help="Number of ranks that share this machine, measured side by side; 1:8 with "
                  "--step-ms tells how many of them are fed."),
    click.option("--study", metavar="URL",
                  help="Storage of Optuna to write the search to while it runs, such as "
                  "sqlite:///autotune.db."),
    click.option("--json", "as_json", is_flag=True,
                  help="Print the result as JSON on stdout, and the report on stderr."),
)  # fmt: skip


@click.group(cls=_Commands, invoke_without_command=True, subcommand_metavar="")
@_OF_SUBJECT
@_OF_CHOICE
@_OF_SEARCH
@click.version_option(__version__, prog_name="autotune")
def main(*, paths: tuple[str, ...], **settings: Any) -> None:
    """Measure loader settings on the AnnData files at PATH and recommend those to train with.

    PATH is an .h5ad file, a folder of them, a pattern, or a URL; several make one collection.
    autotune measures throughput and label entropy of minibatches over a grid of block sizes,
    fetch factors and workers; for ranges, around the most promising configurations; for files on
    servers, also how many fetches to read ahead. The exit code is 1 if no configuration is
    feasible or the loader delivers wrong data, and 2 if the input cannot be used. Ctrl-C stops
    early, reports what was measured, and exits with 130.
    """
    seconds, as_json = settings.pop("budget"), settings.pop("as_json")
    output = _folder(settings.pop("output"))
    budget = TimeBudget(seconds)
    # It imports what measures, while this process opens files and imports what searches.
    with _measuring_process(settings["ranks"]) as process:
        collection, settings = _opened(paths, settings, output)
        from cellfeed_tuner._request import collection_request  # noqa: PLC0415

        request = collection_request(collection, budget=seconds, step=None, **settings)
        from cellfeed_tuner._commands._autotune_run import run  # noqa: PLC0415

        run(
            collection,
            output=output,
            as_json=as_json,
            budget=budget,
            process=process,
            request=request,
            **settings,
        )


def _opened(
    paths: tuple[str, ...], settings: dict[str, Any], output: Path
) -> "tuple[Collection, dict[str, Any]]":
    """Open the collection, and check what is given before anything is imported that takes long.

    Returns the collection, and the other settings in the names of `autotune`.
    """
    from cellfeed import ClassBalancedSampling, open_collection  # noqa: PLC0415

    columns = (*settings["label"], settings["balance"])
    collection = open_collection(
        paths,
        obs=list(dict.fromkeys(filter(None, columns))),
        elements=settings.pop("elements"),
        join_vars=settings.pop("join_vars"),
        storage_options=_storage_options(settings.pop("storage_options")),
    )
    if not settings["label"]:
        there = ", ".join(collection.obs_columns) or "none"
        msg = f"an obs column to mix minibatches by, such as the plate; obs has: {there}"
        raise click.UsageError(f"Missing option '--label': {msg}")
    _require_writable(output)
    balance = settings.pop("balance")
    settings["strategy"] = ClassBalancedSampling(balance) if balance else None
    return collection, settings


def _measuring_process(
    ranks: Sequence[int] | None,
) -> "AbstractContextManager[MeasuringProcess | None]":
    """Start the process that measures, unless that is for another rank to do."""
    from cellfeed_tuner._measuring._process import MeasuringProcess  # noqa: PLC0415

    if ranks is None and os.environ.get("RANK", "0") != "0":
        return nullcontext()
    return MeasuringProcess()


def _folder(path: str) -> Path:
    from cellfeed.bytes import writable_path  # noqa: PLC0415 - help does not need it

    return writable_path(path)


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = f"{folder}: not writable ({error.strerror}); choose another folder with --output"
        raise PathError(msg) from error


def _storage_options(path: Path | None) -> dict[str, Any] | None:
    """Return the object in a JSON file; errors must not quote its contents."""
    if path is None:
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        msg = f"{path}: cannot be read ({error.strerror}); give a JSON file of storage options"
        raise PathError(msg) from None
    except ValueError:  # neither UTF-8 nor JSON
        found = None
    if not isinstance(found, dict):
        msg = f'{path}: not a JSON object; write storage options such as {{"region": "eu-west-1"}}'
        raise FormatError(msg)
    return found


@main.command("profile")
@_OF_SUBJECT
@_OF_CHOICE
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=2),
              help="How often to time each configuration.")  # fmt: skip
def profile_command(*, paths: tuple[str, ...], **settings: Any) -> None:
    """Time the whole grid, also what mixes too little, in interleaved rounds.

    Writes profile.csv, a row for each configuration, and profile.json, .png (throughput over the
    fetch factor for each block size, as Figure 2 of the scDataset paper) and .html. Each timing is
    kept in profile.jsonl, so that the same command goes on after Ctrl-C, and more rounds add to it.
    """
    output, rounds = _folder(settings.pop("output")), settings.pop("rounds")
    collection, settings = _opened(paths, settings, output)
    from cellfeed_tuner._request import collection_request  # noqa: PLC0415

    request = collection_request(
        collection,
        step=None,
        need=None,
        step_seconds=None,
        study=None,
        ranks=1,
        budget=UNLIMITED_SECONDS,
        **settings,
    )
    from cellfeed_tuner._commands._autotune_run import run_profile  # noqa: PLC0415

    run_profile(request, output=output, rounds=rounds, strategy=settings["strategy"])


@main.command("explain")
@click.argument("saved", metavar="[AUTOTUNE.json]", default=Path("autotune.json"),
                type=click.Path(dir_okay=False, path_type=Path))  # fmt: skip
@click.option("--block-size", type=click.IntRange(min=1), help="Why not this block size?")
@click.option("--fetch-factor", type=click.IntRange(min=1), help="Why not this fetch factor?")
@click.option("--workers", "num_workers", type=click.IntRange(min=0),
              help="Why not this number of workers?")  # fmt: skip
@click.option("--step-ms", type=click.FloatRange(min=0, min_open=True), metavar="MS",
              help="Time of your training step, in case that is the bottleneck.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def explain_command(*, saved: Path, **asked: Any) -> None:
    """Explain a result: why this configuration, why not another, and where the time goes.

    AUTOTUNE.json is the file that autotune wrote. Given a block size, fetch factor or number of
    workers, explain compares the best such configuration with the recommended one.
    """
    from cellfeed_tuner._commands._explain_report import explain  # noqa: PLC0415

    explain(saved, **asked)


@main.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def show_command(*, as_json: bool) -> None:
    """List earlier runs: the last one for each machine and dataset."""
    from cellfeed_tuner._commands._show_report import show  # noqa: PLC0415

    show(as_json=as_json)
