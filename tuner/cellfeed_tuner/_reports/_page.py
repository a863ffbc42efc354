"""What ``autotune`` found, as one page that needs neither network nor scripts."""

from collections import Counter
from dataclasses import asdict
from math import isfinite

from cellfeed.console import format_bytes
from cellfeed_tuner._explain._bottleneck import Bottleneck
from cellfeed_tuner._interval import Estimate
from cellfeed_tuner._machine._storage import Storage
from cellfeed_tuner._reports._svg import inline_svg
from cellfeed_tuner._reports._template import rendered
from cellfeed_tuner._reports._wording import (
    cache_in_words,
    cache_name,
    status_in_words,
    throughput,
)
from cellfeed_tuner._result import AutotuneResult
from cellfeed_tuner._results._configuration_result import ConfigurationResult
from cellfeed_tuner._verdicts._verdict import VerdictKind
from cellfeed_tuner.plots import (
    bounds_figure,
    epoch_figure,
    heat_map_figure,
    stages_figure,
    trade_off_figure,
)

__all__ = ["html_report"]

_UNKNOWN = "unknown"
_VERDICTS: dict[VerdictKind, str] = {
    "inside": "as planned, and inside the paper's bounds.",
    "outside": "as planned, but outside the bounds or off the exact expectation, though theory "
    "should apply.",
    "assumptions": "as planned, but this collection is not as theory assumes.",
    "loader": "not as planned: something is wrong with the loader.",
}
_SETTINGS = ("block size", "fetch factor", "workers")
_HEADINGS = (
    "status",
    "verdict",
    "cells/s [95 % interval]",
    "rounds",
    "measured bits [95 % interval]",
    "expected bits",
    "share of random",
    "bounds (bits)",
    "memory",
    "read / stored",
)
_Pairs = list[tuple[str, object]]


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return the page.

    Parameters
    ----------
    result
        What ``autotune`` found.
    code
        The lines that train with the recommendation; left out if there is none.
    """
    labels = " and ".join(result.dataset.labels)
    chosen = result.recommended and result.recommended.configuration
    found = Counter(each.verdict.kind for each in result.configurations if each.verdict)
    in_order = sorted(result.configurations, key=lambda each: each.configuration != chosen)
    return rendered(
        "page.html.jinja",
        result,
        title=f"autotune: {result.dataset.n_visited:,} cells mixed by {labels}",
        code=code,
        pictures=_pictures(result),
        stages_caption=_stages_caption(result.bottleneck) if result.bottleneck else "",
        verdicts=[(found[kind], kind, said) for kind, said in _VERDICTS.items() if found[kind]],
        headings=[
            *_headings(result),
            *(name for name, _ in _further(in_order[0], result)),
            "remark",
        ],
        rows=[_row(each, result, is_chosen=each.configuration == chosen) for each in in_order],
        cards=[
            ("Data", _data(result)),
            ("Asked for", _asked_for(result)),
            ("Machine", _machine(result)),
            *(("Storage", _storage(storage)) for storage in result.machine.storage),
            ("Versions", _versions(result)),
            ("Run", _run(result)),
        ],
    )


def _pictures(result: AutotuneResult) -> dict[str, str | None]:
    """Return the figures as elements, None where there is nothing to draw."""
    chosen = result.chosen if result.entropy_over_epoch else None
    random = (
        {name: each.random for name, each in result.entropies(chosen).items()} if chosen else {}
    )
    is_timed = any(each.cells_per_second for each in result.configurations)
    return {
        "stages": inline_svg(
            stages_figure(result.bottleneck),
            name="stages",
            description="Microseconds for each cell that threads are busy with every stage",
        )
        if result.bottleneck
        else None,
        "trade_off": inline_svg(
            trade_off_figure(result),
            name="trade-off",
            description="Throughput against label entropy of each measured configuration",
        )
        if is_timed
        else None,
        "heat_maps": inline_svg(
            heat_map_figure(result),
            name="heat-maps",
            description="Throughput and label entropy over block sizes and fetch factors",
        ),
        "bounds": inline_svg(
            bounds_figure(result),
            name="bounds",
            description="Label entropy over the fetch factor for each block size, as planned, as "
            "measured, and between the paper's bounds",
        )
        if result.ranges is None and not result.dataset.loader
        else None,
        "epoch": inline_svg(
            epoch_figure(result.entropy_over_epoch, random),
            name="epoch",
            description="Label entropy of the recommended configuration in each tenth of an epoch",
        )
        if chosen
        else None,
    }


def _stages_caption(found: Bottleneck) -> str:
    said = (
        f"Counted over {found.n_rounds} rounds of the recommended configuration, with 95 % "
        "intervals: how long all threads together are busy with a stage. While one fetch is made "
        "into minibatches, the next is read and the one after that is planned, so bars do not add "
        f"up to the measured time; side by side, they explain {found.accounted:.0%} of it."
    )
    if found.read_amplification is None:
        return said
    return f"{said} {found.read_amplification:.2f} bytes are decompressed for each that is used."


# All configurations


def _headings(result: AutotuneResult) -> list[str]:
    return [*_SETTINGS, *(["other settings"] if _has_others(result) else []), *_HEADINGS]


def _has_others(result: AutotuneResult) -> bool:
    return any(each.configuration.others for each in result.configurations)


def _further(each: ConfigurationResult, result: AutotuneResult) -> list[tuple[str, str]]:
    """Return what is said of further labels, and of the first within another, with headings."""
    said = list[tuple[str, str]]()
    for name, label in each.further_labels.items():
        bits, verdict = label.entropy_bits, label.verdict
        said += [
            (f"{name}: verdict", verdict.kind if verdict else ""),
            (f"{name}: measured bits", _bits(bits.measured)),
            (f"{name}: expected bits", f"{bits.expected.value:.3f}"),
            (f"{name}: share of random", f"{bits.share_of_random:.1%}"),
        ]
    within = each.conditional_entropy_bits
    if within is not None:
        heading = f"{result.dataset.label} within {within.given}"
        said += [
            (f"{heading}: measured bits", _bits(within.measured)),
            (f"{heading}: expected bits", f"{within.expected.value:.3f}"),
            (f"{heading}: share of random", f"{within.share_of_random:.1%}"),
        ]
    return said


def _row(
    each: ConfigurationResult, result: AutotuneResult, *, is_chosen: bool
) -> tuple[str, list[object], str]:
    """Return the kind of a row, its cells, and what else there is to say."""
    settings, entropy, verdict = each.configuration, each.entropy_bits, each.verdict
    amplification = result.read_amplification(each)
    cells: list[object] = [
        settings.block_size,
        settings.fetch_factor,
        settings.num_workers,
        *([settings.others_in_words] if _has_others(result) else []),
        "recommended" if is_chosen else status_in_words(each),
        verdict.kind if verdict else "",
        throughput(each),
        each.n_rounds or "",
        _bits(entropy.measured),
        f"{entropy.expected.value:.3f}",
        f"{entropy.share_of_random:.1%}",
        "{:.3f} to {:.3f}".format(*entropy.bounds),
        format_bytes(each.peak_memory_bytes) if each.peak_memory_bytes else "",
        "" if amplification is None else f"{amplification:.1f}",
        *(text for _, text in _further(each, result)),
    ]
    kind = "chosen" if is_chosen else "measured" if each.cells_per_second else "absent"
    return kind, cells, "; ".join(filter(None, [each.note, verdict.sentence if verdict else ""]))


def _bits(bits: Estimate | None) -> str:
    if bits is None:
        return ""
    if not (isfinite(bits.low) and isfinite(bits.high)):
        return f"{bits.value:.3f}"
    return f"{bits.value:.3f} [{bits.low:.3f}, {bits.high:.3f}]"


# What this was measured on


def _data(result: AutotuneResult) -> _Pairs:
    dataset, order, one = result.dataset, result.storage_order, result.configurations[0]
    further: _Pairs = []
    for name, each in dataset.further_labels.items():
        further += [
            ("label", name),
            ("values", f"{each.n_labels:,}, {each.label_entropy_bits:.3f} bits"),
            ("without label", f"{each.n_missing:,} cells"),
            ("random sampling", f"{one.further_labels[name].entropy_bits.random:.3f} bits"),
        ]
    stored: _Pairs = [
        ("matrix", f"{dataset.n_cells:,} cells x {dataset.n_vars:,} genes"),
        *([("visited", dataset.selection.in_words)] if dataset.selection else []),
        *([("strategy", result.strategy.in_python())] if result.strategy else []),
        ("stored as", f"{dataset.layout}, {dataset.dtype}, {format_bytes(dataset.bytes_on_disk)}"),
        ("a cell in storage", format_bytes(round(dataset.stored_bytes_per_cell))),
        ("read as a whole", f"{dataset.rows_per_chunk:,.1f} cells per chunk"),
        *([("slow reading", dataset.slow_reading)] if dataset.slow_reading else []),
    ]
    if dataset.loader:
        stored = [
            ("loader", dataset.loader),
            ("rows", f"{dataset.n_cells:,}"),
            ("files", format_bytes(dataset.bytes_on_disk)),
        ]
    return [
        *stored,
        ("minibatch", f"{dataset.batch_size} cells"),
        ("label", dataset.label),
        ("values", f"{dataset.n_labels:,}, {dataset.label_entropy_bits:.3f} bits"),
        ("without label", f"{dataset.n_missing:,} cells"),
        ("random sampling", f"{one.entropy_bits.random:.3f} bits"),
        *further,
        ("storage order", order.sentence if order else "not checked"),
    ]


def _asked_for(result: AutotuneResult) -> _Pairs:
    asked = result.constraints
    need, step = asked.need_cells_per_second, asked.step_seconds
    return [
        *([("ranks", f"{result.ranks}, side by side")] if result.ranks.n_total > 1 else []),
        ("entropy", f"at least {asked.entropy_floor:g} times random sampling's"),
        ("memory", f"at most {format_bytes(asked.memory_bytes)}"),
        ("throughput", "as high as can be" if need is None else f"at least {need:,.0f} cells/s"),
        *([("training step", f"{1000 * step:g} ms")] if step is not None else []),
    ]


def _machine(result: AutotuneResult) -> _Pairs:
    cpu, memory, platform = result.machine.cpu, result.machine.memory, result.machine.platform
    total, available = format_bytes(memory.total_bytes), format_bytes(memory.available_bytes)
    return [
        ("processor", cpu.model or _UNKNOWN),
        ("cores", f"{cpu.usable_cores:g} usable of {cpu.logical_cores}"),
        ("memory", f"{available} available of {total}"),
        ("system", platform.system or _UNKNOWN),
        ("kernel", f"{platform.kernel}, {platform.architecture}"),
    ]


def _storage(storage: Storage) -> _Pairs:
    return [
        ("file system", f"{storage.file_system or _UNKNOWN} ({storage.kind or _UNKNOWN})"),
        ("mounted on", storage.mount_point or _UNKNOWN),
        ("device", storage.device or _UNKNOWN),
        ("model", storage.model or _UNKNOWN),
    ]


def _versions(result: AutotuneResult) -> _Pairs:
    packages = asdict(result.machine.platform.packages)
    return [
        ("Python", result.machine.platform.python),
        *((name, version or "not installed") for name, version in packages.items()),
    ]


def _run(result: AutotuneResult) -> _Pairs:
    busy = result.busy
    return [
        ("date", f"{result.date:%Y-%m-%d %H:%M %Z}".strip()),
        ("took", f"{result.seconds:,.0f} s"),
        (cache_name(result), " ".join(cache_in_words(result))),
        *([("other programs", f"{busy.other_cores:.1f} cores busy")] if busy else []),
    ]
