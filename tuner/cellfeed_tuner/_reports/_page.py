"""What ``autotune`` found, as one page that needs neither network nor scripts."""

from collections import Counter
from math import isfinite

from cellfeed.console import format_bytes
from cellfeed_tuner._explain._bottleneck import Bottleneck, microseconds
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
from cellfeed_tuner._results._configuration_result import (
    ConditionalEntropyBits,
    ConfigurationResult,
    EntropyBits,
    LabelResult,
)
from cellfeed_tuner._verdicts._verdict import MEANINGS
from cellfeed_tuner.plots import bounds_figure, heat_map_figure, trade_off_figure

__all__ = ["html_report"]

_UNKNOWN = "unknown"
_Pairs = list[tuple[str, object]]


def html_report(result: AutotuneResult, *, code: str) -> str:
    """Return the page."""
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
        stages=_stages(result.bottleneck) if result.bottleneck else [],
        stages_caption=_stages_caption(result.bottleneck) if result.bottleneck else "",
        verdicts=[(found[kind], kind, said) for kind, said in MEANINGS.items() if found[kind]],
        headings=[name for name, _ in _cells(in_order[0], result)],
        rows=[
            (_kind(each, result), [said for _, said in _cells(each, result)]) for each in in_order
        ],
        cards=[
            ("Data", _data(result)),
            ("Asked for", _asked_for(result)),
            ("Machine", _machine(result)),
            *(("Storage", _storage(storage)) for storage in result.machine.storage),
            ("Versions", _versions(result)),
            ("Run", _run(result)),
        ],
    )


def _pictures(result: AutotuneResult) -> dict[str, str]:
    """Return the figures as elements, of which some have nothing to draw."""
    pictures = dict[str, str]()
    if any(each.cells_per_second for each in result.configurations):
        pictures["trade_off"] = inline_svg(
            trade_off_figure(result),
            name="trade-off",
            description="Throughput against label entropy of each measured configuration",
        )
    if result.ranges is None:
        pictures["heat_maps"] = inline_svg(
            heat_map_figure(result),
            name="heat-maps",
            description="Throughput and label entropy over block sizes and fetch factors",
        )
    if result.ranges is None and not result.dataset.loader:
        pictures["bounds"] = inline_svg(
            bounds_figure(result),
            name="bounds",
            description="Label entropy over the fetch factor for each block size, as planned, as "
            "measured, and between the paper's bounds",
        )
    return pictures


def _stages(found: Bottleneck) -> list[tuple[str, str, float, bool]]:
    """Return for each stage its name, microseconds, percent of the longest, and if it decides."""
    longest = max(each.seconds_per_cell.value for each in found.stages)
    return [
        (
            each.label,
            microseconds(each.seconds_per_cell),
            round(100 * max(0.0, each.seconds_per_cell.value) / longest, 1),
            each.name == found.kind,
        )
        for each in found.stages
    ]


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


def _cells(each: ConfigurationResult, result: AutotuneResult) -> _Pairs:
    """Return what the table says of a configuration, with headings."""
    settings, entropy = each.configuration, each.entropy_bits
    amplification = result.read_amplification(each)
    chosen = result.recommended and result.recommended.configuration
    has_others = any(one.configuration.others for one in result.configurations)
    cells: _Pairs = [
        ("block size", settings.block_size),
        ("fetch factor", settings.fetch_factor),
        ("workers", settings.num_workers),
        *([("other settings", settings.others_in_words)] if has_others else []),
        ("status", "recommended" if settings == chosen else status_in_words(each)),
        ("cells/s [95 % interval]", throughput(each)),
        ("rounds", each.n_rounds or ""),
        *_entropies(each),
        ("bounds (bits)", "{:.3f} to {:.3f}".format(*entropy.bounds)),
        ("memory", format_bytes(each.peak_memory_bytes) if each.peak_memory_bytes else ""),
        ("read / stored", "" if amplification is None else f"{amplification:.1f}"),
    ]
    for name, label in each.further_labels.items():
        cells += _entropies(label, f"{name}: ")
    within = each.conditional_entropy_bits
    if within is not None:
        cells += _bits_of(within, f"{result.dataset.label} within {within.given}: ")
    proof = each.verdict.sentence if each.verdict else ""
    return [*cells, ("remark", "; ".join(filter(None, [each.note, proof])))]


def _kind(each: ConfigurationResult, result: AutotuneResult) -> str:
    if result.recommended is not None and each.configuration == result.recommended.configuration:
        return "chosen"
    return "measured" if each.cells_per_second else "absent"


def _entropies(label: ConfigurationResult | LabelResult, of: str = "") -> _Pairs:
    kind = label.verdict.kind if label.verdict else ""
    return [(f"{of}verdict", kind), *_bits_of(label.entropy_bits, of)]


def _bits_of(bits: EntropyBits | ConditionalEntropyBits, of: str) -> _Pairs:
    return [
        (f"{of}measured bits [95 % interval]", _bits(bits.measured)),
        (f"{of}expected bits", f"{bits.expected.value:.3f}"),
        (f"{of}share of random", f"{bits.share_of_random:.1%}"),
    ]


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
    ]


def _versions(result: AutotuneResult) -> _Pairs:
    platform = result.machine.platform
    packages = ((name, found or "not installed") for name, found in platform.packages.items())
    return [("Python", platform.python), *packages]


def _run(result: AutotuneResult) -> _Pairs:
    busy = result.busy
    return [
        ("date", f"{result.date:%Y-%m-%d %H:%M %Z}".strip()),
        ("took", f"{result.seconds:,.0f} s"),
        (cache_name(result), " ".join(cache_in_words(result))),
        *([("other programs", f"{busy.other_cores:.1f} cores busy")] if busy else []),
    ]
