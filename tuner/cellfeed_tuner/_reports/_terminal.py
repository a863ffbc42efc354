"""What ``autotune`` prints: the recommendation, why, what was not measured, and code to paste."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

from rich.console import Console
from rich.syntax import Syntax

from cellfeed_tuner._comparisons import floor_cost
from cellfeed_tuner._reports import report_console, say
from cellfeed_tuner._reports._words import in_words
from cellfeed_tuner._result import AutotuneResult


def say_choice(console: Console, result: AutotuneResult) -> None:
    """Print the recommendation and why, or the nearest configuration."""
    if result.recommended is None:
        say(console, in_words("no_choice", result), "bold red")
        say(console, in_words("nothing", result))
    else:
        say(console, [f"Recommended: {result.recommended.settings}"], "bold green")
        say(console, in_words("why", result))


def print_report(
    result: AutotuneResult,
    saved_as: Path,
    *,
    elements: Sequence[str] = ("X",),
    to_stderr: bool = False,
) -> None:
    """Print the recommendation and why, what was not measured, and the code to paste."""
    console = report_console(to_stderr=to_stderr, width=100)
    console.print()
    if result.loader_fault is not None:
        say(console, in_words("no_choice", result), "bold red reverse")
        say(console, in_words("faults", result), "bold red")
        return
    say_choice(console, result)
    limits = [result.bottleneck.sentence] if result.bottleneck is not None else []
    limits += in_words("link", result)
    limits += [advice.sentence for advice in result.storage_advice]
    limits += in_words("floor", result, floor_cost(result))
    for lines, style in (
        (limits, ""),
        (in_words("warnings", result), "bold yellow"),
        (in_words("untimed", result), ""),
    ):
        say(console, [""] * bool(lines) + lines, style)
    if result.recommended is not None:
        say(console, ["", "To train with it:"])
        code = code_to_paste(result, saved_as, elements=elements)
        # Wrapping at the width of the terminal would break it.
        console.print(Syntax("", "python").highlight("\n" + indent(code, "    ")), soft_wrap=True)


def code_to_paste(result: AutotuneResult, saved_as: Path, *, elements: Sequence[str]) -> str:
    """Return the lines that train with the recommendation in the file ``saved_as``.

    What a result does not contain, such as weights or storage options, is left to be filled in.
    """
    dataset, strategy, chosen = result.dataset, result.strategy, result.recommended
    if dataset.loader:
        settings = repr(chosen.configuration) if chosen else "..."
        return (
            "from cellfeed_tuner import Configuration\n\n"
            f"loader = {dataset.loader}(...).open({settings})"
        )
    labels, selection = dataset.labels, dataset.selection
    columns = [*labels, *(strategy.columns if strategy else ())]
    arguments = f"{_in_python(dataset.paths)}, obs={list(dict.fromkeys(columns))!r}"
    if list(elements) != ["X"]:
        arguments += f", elements={list(elements)!r}"
    if dataset.has_storage_options:
        arguments += ", storage_options=..."
    if dataset.direct_io:
        arguments += ", direct_io=True"
    rows = ""
    if selection is not None:
        rows = f"collection.where({selection.where!r})" if selection.where else "rows"
    imported, how = "CellDataset, open_collection", f", indices={rows}" if rows else ""
    if strategy is not None and not strategy.is_made_again:
        imported = f"CellDataset, {strategy.name}, open_collection"
        block_size = chosen.configuration.block_size if chosen else None
        how = f", strategy={strategy.in_python(block_size, rows)}"
    n_ranks = result.ranks.n_local
    return "\n".join(
        [
            *([f"# torchrun --nproc-per-node {n_ranks} ..."] if n_ranks > 1 else []),
            f"from cellfeed import {imported}",
            "",
            f"collection = open_collection({arguments})",
            f"dataset = CellDataset.from_autotune(collection, {str(saved_as)!r}{how}, seed=0)",
            "for minibatch in dataset.loader():",
            f"    ...  # minibatch.X, minibatch.obs[{labels[0]!r}], minibatch.rows",
        ]
    )


def _in_python(locations: Sequence[str]) -> str:
    if len(locations) == 1:
        return repr(locations[0])
    folder = Path(locations[0]).parent  # a URL has no such folder
    if set(map(str, folder.glob("*.h5ad"))) == set(locations):
        return repr(str(folder))
    return repr(list(locations))
