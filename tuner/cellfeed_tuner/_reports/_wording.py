"""What terminal and page say in the same words."""

from collections import Counter
from collections.abc import Iterable

from cellfeed.console import format_bytes
from cellfeed_tuner._constants import FEWEST_ROUNDS, LEAST_ROUNDS, MUCH_SPREAD
from cellfeed_tuner._defaults import REMOTE_PREFETCH
from cellfeed_tuner._interval import interval
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import (
    STATUS_WORDS,
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._results._dataset import Dataset, LabelCensus
from cellfeed_tuner._results._recommended import Recommended, Rival, Waiting
from cellfeed_tuner._verdicts._verdict import VerdictKind

__all__ = [
    "busy_in_words",
    "cache_in_words",
    "cache_name",
    "few_rounds_in_words",
    "how_measured",
    "interruption_in_words",
    "key_figures",
    "loader_faults",
    "missing_in_words",
    "mixing_in_words",
    "prefetch_in_words",
    "proof_of_choice",
    "ranges_in_words",
    "reading_in_words",
    "rivals_in_words",
    "status_in_words",
    "throughput",
    "untimed_in_words",
    "waiting_in_words",
    "warnings_in_words",
    "why_no_bottleneck",
    "why_no_choice",
    "why_nothing",
]

_MOST_FAULTS = 3
_MOST_REASONS = 3
# Share of cells that has a label if it is not called mostly missing.
_MOSTLY = 0.5


def throughput(result: ConfigurationResult) -> str:
    """Return the throughput of a configuration, or nothing; marked if it rests on few rounds."""
    if result.cells_per_second is None:
        return ""
    return interval(result.cells_per_second) + ("*" if result.has_few_rounds else "")


def few_rounds_in_words(results: Iterable[ConfigurationResult]) -> list[str]:
    """Return what the mark of `throughput` stands for, if any of these has it."""
    if not any(each.has_few_rounds for each in results):
        return []
    return [
        f"* Not enough samples: from {FEWEST_ROUNDS} to {LEAST_ROUNDS - 1} rounds of whole fetches."
    ]


def key_figures(result: AutotuneResult) -> dict[str, str]:
    """Return what to know of the choice, by name; nothing if there is none."""
    chosen, known = result.recommended, result.chosen
    if chosen is None or known is None:
        return {}
    entropy = known.entropy_bits
    share = f"{entropy.share_of_random:.1%} of random sampling's"
    return {
        f"throughput, {how_measured(result)}": f"{interval(chosen.cells_per_second)} cells/s",
        f"entropy of {result.dataset.label}": f"{entropy.expected.value:.3f} bits, {share}",
        "peak memory": format_bytes(chosen.peak_memory_bytes),
    }


def cache_name(result: AutotuneResult) -> str:
    """Return what `cache_in_words` is about."""
    return "files" if result.cache == "remote" else "page cache"


def cache_in_words(result: AutotuneResult) -> list[str]:
    """Return the state of the page cache, and what else to measure if files fit in memory."""
    said = {
        "cold": "cold, dropped before each epoch and once used, as where files exceed memory",
        "warm": "warm, all files read beforehand",
        "remote": "read from a server; its caches are not under control",
        "unknown": "unknown, since the kernel kept pages that were to be dropped",
    }[result.cache]
    if result.dataset.cache_bytes:
        kept = format_bytes(result.dataset.cache_bytes)
        return [said, f"(up to {kept} of it were kept on this machine's disk, and read from there)"]
    if result.dataset.direct_io and result.cache == "cold":
        return ["not used: files are read past it"]
    fits = result.dataset.bytes_on_disk < result.machine.memory.available_bytes / 2
    if result.cache == "cold" and fits:
        return [said, "(these files fit in memory: see --cache warm for epochs after the first)"]
    return [said]


def busy_in_words(result: AutotuneResult) -> list[str]:
    """Return warnings if other programs took much of the processors, or replicates differ much."""
    said = [result.busy.sentence] if result.busy is not None and result.busy.sentence else []
    if result.replicate_spread is not None and result.replicate_spread > MUCH_SPREAD:
        said.append(
            f"Measured again, a configuration gave figures {result.replicate_spread:.0%} apart "
            "(standard deviation): the machine or its disk is busy."
        )
    return said


def how_measured(result: AutotuneResult) -> str:
    """Return what the figure of the choice rests on."""
    recommended = result.recommended
    if recommended is not None and recommended.measured_in_turns:
        return "measured in turns with its rivals" if recommended.rivals else "measured again"
    few = result.n_few_rounds
    return f"from {few} rounds only, not measured again" if few else "not measured again"


def rivals_in_words(recommended: Recommended) -> list[str]:
    """Return how the choice compares with the runner-up, and with all it is not told from."""
    return [
        _rival_in_words(each)
        for number, each in enumerate(recommended.rivals)
        if number == 0 or each.is_undecided
    ]


def _rival_in_words(rival: Rival) -> str:
    ratio = rival.ratio
    compared = (
        f"measured in turns, {rival.n_turns} times each, it was {ratio.value:.2f} "
        f"[{ratio.low:.2f}, {ratio.high:.2f}] times as fast"
    )
    if rival.is_undecided:
        return f"Undecided between it and {rival.configuration}: {compared}."
    return f"Beside {rival.configuration}, {compared}."


def prefetch_in_words(result: AutotuneResult) -> list[str]:
    """Return what was measured of reading ahead of a server, or that there was no time for it."""
    recommended = result.recommended
    if recommended is None or result.cache != "remote":
        return []
    speeds = ", ".join(
        f"{each.prefetch}: {interval(each.cells_per_second)}"
        for each in result.prefetch_results
        if each.cells_per_second is not None
    )
    measured = f" Cells/s by the number of fetches, in turns: {speeds}." if speeds else ""
    if recommended.prefetch is None:
        said = (
            "How many fetches to read ahead (prefetch) was not decided, for want of time or of "
            f"fetches: {REMOTE_PREFETCH} is the default."
        )
    else:
        said = (
            f"Reading {recommended.prefetch} fetches ahead (prefetch) is as fast as any, as far as "
            "can be told."
        )
    return [f"{said}{measured}"]


def interruption_in_words(result: AutotuneResult) -> list[str]:
    """Return what the result rests on where the run was interrupted."""
    if not result.interrupted:
        return []
    timed = sum(each.cells_per_second is not None for each in result.configurations)
    counted = "1 configuration" if timed == 1 else f"{timed} configurations"
    said = (
        f"The run was interrupted after {result.seconds:.0f} s: this rests on the {counted} "
        "measured by then, and a complete run may choose otherwise."
    )
    return [said]


def why_no_choice(result: AutotuneResult) -> str:
    """Return the headline where nothing is recommended."""
    if result.loader_fault is not None:
        return "THE LOADER IS WRONG, so nothing is recommended: do not train with it."
    return "No configuration is feasible."


def loader_faults(result: AutotuneResult) -> list[str]:
    """Return what the loader delivered that it should not have, with the first few faults."""
    if result.loader_fault is None:
        return []
    others = [
        f"{each.configuration}: {each.verdict.sentence}"
        for each in result.configurations
        if each.verdict is not None
        and each.verdict.kind == "loader"
        and not result.loader_fault.startswith(f"{each.configuration}: ")
    ]
    return [f"{result.loader_fault}; please report this.", *others[: _MOST_FAULTS - 1]]


def missing_in_words(result: AutotuneResult) -> list[str]:
    """Return a warning for each label that most cells lack."""
    dataset = result.dataset
    censuses: list[Dataset | LabelCensus] = [dataset, *dataset.further_labels.values()]
    lines = list[str]()
    for label, census in zip(dataset.labels, censuses, strict=True):
        known = 1 - census.n_missing / dataset.n_visited
        if known < _MOSTLY:
            lines.append(
                f"{label} is missing in {1 - known:.2%} of the cells: entropy is that of the "
                f"others, of which a minibatch has {known * dataset.batch_size:.2g} on average, "
                "and its share that of random samples with as many. Choose a label that most "
                "cells have, if there is one."
            )
    return lines


def mixing_in_words(result: AutotuneResult) -> list[str]:
    """Return how the choice mixes each of several labels, and the first within another."""
    chosen = result.chosen
    if chosen is None:
        return []
    first, lines = result.dataset.label, list[str]()
    if chosen.further_labels:
        lines = [_expected(name, each) for name, each in result.entropies(chosen).items()]
    if chosen.conditional_entropy_bits is not None:
        within = chosen.conditional_entropy_bits
        lines.append(_expected(f"{first} within {within.given}", within))
    return lines


def _expected(name: str, entropy: EntropyBits | ConditionalEntropyBits) -> str:
    return (
        f"{name}: {entropy.expected.value:.3f} bits, {entropy.share_of_random:.1%} of random "
        f"sampling's {entropy.random_alike:.3f}"
    )


def proof_of_choice(result: AutotuneResult) -> list[str]:
    """Return what the entropy of the choice proves, and whether files are shuffled already.

    And what was read once more to compare it.
    """
    lines = _verdicts_of_choice(result, "inside", "assumptions")
    if result.storage_order is not None and result.storage_order.already_shuffled:
        lines.append(result.storage_order.sentence)
    if result.chosen is not None and result.n_cells_compared:
        lines.append(
            f"{result.n_cells_compared} of the cells that came out were read from the files once "
            "more, without cellfeed, and are the same."
        )
    elif result.chosen is not None and result.cache == "remote":
        lines.append("Values were not read once more without cellfeed: files are on a server.")
    return lines


def reading_in_words(result: AutotuneResult) -> list[str]:
    """Return what is read for each cell of the choice, beside its size in storage."""
    chosen, stored = result.chosen, result.dataset.stored_bytes_per_cell
    if chosen is None or chosen.bytes_read_per_cell is None or stored <= 0:
        return []
    read = chosen.bytes_read_per_cell
    said = f"A cell takes {format_bytes(round(stored))} in storage; for each that came out, "
    said += f"{read.asked / stored:.1f} times as much was requested"
    if result.cache != "cold":
        return [f"{said}."]
    return [f"{said}, and {read.from_storage / stored:.1f} times as much was read from storage."]


def waiting_in_words(result: AutotuneResult) -> list[str]:
    """Return how long training waits for the choice, if its step was given."""
    waiting = result.recommended and result.recommended.waiting
    return [_waiting(waiting, result)] if waiting else []


def _verdicts_of_choice(result: AutotuneResult, *kinds: VerdictKind) -> list[str]:
    """Return verdicts of some kinds on the choice, with the label where there are several."""
    chosen = result.chosen
    if chosen is None:
        return []
    labels: dict[str, ConfigurationResult | LabelResult] = {result.dataset.label: chosen}
    labels |= chosen.further_labels
    return [
        f"{name}: {each.verdict.sentence}" if chosen.further_labels else each.verdict.sentence
        for name, each in labels.items()
        if each.verdict is not None and each.verdict.kind in kinds
    ]


def _waiting(waiting: Waiting, result: AutotuneResult) -> str:
    step = f"{1000 * (result.constraints.step_seconds or 0):g} ms"
    if waiting.share is None:
        return (
            f"There was no time to measure it with a training step of {step}; by its throughput, "
            f"training would wait {waiting.expected_share:.1%} of the time."
        )
    share = waiting.share
    spread = f" [{share.low:.1%}, {share.high:.1%}]" if waiting.n_rounds > 1 else ""
    fetches = "1 whole fetch" if waiting.n_rounds == 1 else f"{waiting.n_rounds} whole fetches"
    few = "" if waiting.n_rounds >= LEAST_ROUNDS else ", which is not enough to rely on"
    return (
        f"With a training step of {step}, training waits {share.value:.1%}{spread} of the time, "
        f"measured over {fetches} per worker{few}."
    )


def why_no_bottleneck(result: AutotuneResult) -> str:
    """Return why it is not known where the time of a cell goes."""
    if result.dataset.loader:
        return f"Not known: {result.dataset.loader} does not count it."
    if result.ranks.n_local > 1:
        return "Not known: it is looked at for one rank alone."
    return (
        "Not known: there is no recommendation, the run was interrupted, or too little was "
        "measured (see --budget)."
    )


def ranges_in_words(result: AutotuneResult) -> list[str]:
    """Return how many configurations the ranges hold, and how many of them were looked at."""
    ranges = result.ranges
    if ranges is None:
        return []
    kinds = (
        ("block size", ranges.block_sizes),
        ("fetch factor", ranges.fetch_factors),
        ("workers", ranges.workers),
    )
    ends = ", ".join(f"{kind} {low:,} to {high:,}" for kind, (low, high) in kinds)
    n_timed = sum(each.peak_memory_bytes is not None for each in result.configurations)
    looked_at = (
        f"{ranges.n_considered:,} were considered, and the {n_timed:,} that promised most were "
        "measured."
    )
    return [f"Of {ranges.n_configurations:,} configurations ({ends}), {looked_at}"]


def status_in_words(result: ConfigurationResult) -> str:
    """Return the status of a configuration."""
    return STATUS_WORDS[result.status].listed


def untimed_in_words(result: AutotuneResult) -> list[str]:
    """Return how many configurations were not measured, and why, and what failed of some."""
    counted = Counter(
        status_in_words(each) for each in result.configurations if each.cells_per_second is None
    )
    reasons = ", ".join(f"{n} x {status}" for status, n in counted.most_common())
    notes = dict.fromkeys(
        f"{each.configuration}: {each.note}."
        for each in result.configurations
        if each.note and (each.status == "failed" or each.note.startswith("killed"))
    )
    unlisted = (
        f"{result.n_unlisted:,} other configurations were not measured: they mix less than what "
        "mixes too little, are predicted slower, or the budget was exhausted."
    )
    return [
        *([f"Not measured: {reasons}."] if reasons else []),
        *([unlisted] if result.n_unlisted else []),
        *list(notes)[:_MOST_REASONS],
    ]


def warnings_in_words(result: AutotuneResult) -> list[str]:
    """Return what to beware of."""
    return [
        *interruption_in_words(result),
        *filter(None, [result.dataset.slow_reading]),
        *_unknown_cache_in_words(result),
        *_verdicts_of_choice(result, "outside"),
        *missing_in_words(result),
        *busy_in_words(result),
    ]


def _unknown_cache_in_words(result: AutotuneResult) -> list[str]:
    if result.cache != "unknown":
        return []
    return ["Files could not be dropped from the page cache: figures are of files that it holds."]


def why_nothing(result: AutotuneResult) -> str:
    """Return what comes nearest where nothing is feasible, or why nothing could be timed."""
    if result.loader_fault is not None:
        return " ".join(loader_faults(result))
    if result.nearest is not None:
        return f"Nearest is {result.nearest.configuration}, but {result.nearest.problem}."
    reasons = {each.note or status_in_words(each) for each in result.configurations}
    return f"None could be timed: {'; '.join(sorted(reasons)[:_MOST_REASONS])}."
